"""What a replayed region ran in forward: operators over numbered values.

A *state* is the content of one storage between two writes. A tensor is a state and the way to look at it (size,
stride, offset, dtype), so views are never recorded: one ``as_strided`` rebuilds any of them. A write makes a new
state. What was made outside the region (arguments, parameters, buffers, constants) is *external* and is held by
reference, with its version. FSDP2 frees and refills the same storage and keeps the version, so its parameters need
no special case (checked in torch 2.11 to 2.14).

``Recorder`` is a dispatch mode below autograd. ``saved_tensors_hooks`` around it turn what autograd packs into
``Slot``s that name a state. Storages are told apart by the address of their ``StorageImpl``; a weak reference on
each keeps the address from being given out again while recording, and keeps no data.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import RefusedError
from lowtide.regions._operators import Trait, draws, traits, written_positions
from lowtide.regions._tape import Plan, Witness, describe, generator_states, share

__all__ = ["External", "Look", "Op", "Recorder", "Slot"]


@dataclass(frozen=True, slots=True)
class Look:
    """A tensor as a state and the way to look at it. Offsets count elements of ``dtype`` from the storage's start."""

    state: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(slots=True)
class External:
    """A tensor from outside, as it was when the region first used it."""

    tensor: torch.Tensor
    version: int


@dataclass(slots=True)
class Op:
    """One call. ``args`` and ``kwargs`` hold ``Look``s in the place of tensors, everything else as it was given."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    """States that it reads, writes included."""
    makes: tuple[tuple[int, int], ...]
    """(position in the flat outputs, state) of storages that it makes."""
    writes: tuple[tuple[int, int], ...]
    """(state before, state after) of storages that it writes to."""
    generators: list[tuple[str, torch.Tensor]] | None
    """Where the generators stood before it, if it drew random numbers."""
    own_generator: torch.Tensor | None = None
    """State of the generator given by the caller."""


class Slot:
    """What autograd holds in the place of a tensor that it saved."""

    __slots__ = ("__weakref__", "last", "look", "original", "record", "served")

    def __init__(self, record: Any, look: Look, original: torch.Tensor | None) -> None:
        self.record = record
        self.look = look
        self.original = original
        self.served = False
        self.last: weakref.ref[torch.Tensor] | None = None


@dataclass
class _Books:
    """Everything that recording writes down."""

    ops: list[Op | None] = field(default_factory=list[Op | None])
    producer: dict[int, int] = field(default_factory=dict[int, int])
    """State -> index of the operator that made it; externals have none."""
    externals: dict[int, External] = field(default_factory=dict[int, External])
    kept: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict[int, tuple[torch.Tensor, int]])
    """State -> (tensor on its storage, version) of what the rules keep."""
    copies: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """State -> copy of an external's content, taken before the region wrote to it."""
    slots: list[weakref.ref[Slot]] = field(default_factory=list[weakref.ref[Slot]])
    saw_routing: bool = False


class Recorder(TorchDispatchMode):
    """Records one call of a region."""

    supports_higher_order_operators = True

    def __init__(self, plan: Plan, witness: Witness, fqn: str, *, watch: bool) -> None:
        super().__init__()
        self.plan = plan
        self.witness = witness
        self.fqn = fqn
        self.watch = watch
        """Whether to tell the witness which operators ran."""
        self.books = _Books()
        self.problem: str | None = None
        self._current: dict[int, int] = {}
        self._pins: list[int] = []
        self._states = 0
        self._calls = [0] * len(plan.keeps)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def close(self) -> None:
        """Let go of the addresses."""
        for pin in self._pins:
            torch.UntypedStorage._free_weak_ref(pin)
        self._pins.clear()
        self._current.clear()

    # -- values ------------------------------------------------------------------------------------------------

    def _new_state(self) -> int:
        self._states += 1
        return self._states - 1

    def _pin(self, storage: torch.UntypedStorage, state: int) -> None:
        self._pins.append(storage._weak_ref())  # pyright: ignore[reportArgumentType]
        self._current[storage._cdata] = state

    def state_of(self, tensor: torch.Tensor) -> int:
        """Return the state of a tensor's storage; a storage not seen before is external."""
        storage = tensor.untyped_storage()
        state = self._current.get(storage._cdata)
        if state is None:
            state = self._new_state()
            self._pin(storage, state)
            self.books.externals[state] = External(share(tensor), tensor._version)
        return state

    def look_at(self, tensor: torch.Tensor) -> Look:
        """Describe a tensor."""
        return Look(self.state_of(tensor), tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _encode(self, value: Any, reads: list[int]) -> Any:
        if isinstance(value, torch.Tensor):
            look = self.look_at(value)
            reads.append(look.state)
            return look
        if isinstance(value, list | tuple):
            return type(value)(self._encode(v, reads) for v in value)
        return value

    # -- operators ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        trait = traits(func)
        if trait & Trait.SKIPPED or self.problem is not None:
            if self.problem is None and func.namespace in ("fsdp", "c10d"):
                self.problem = f"{describe(func)} runs inside it"
            return func(*args, **kwargs)
        if self.watch:
            self.witness.ran(func)
        if trait & Trait.VIEW:
            return func(*args, **kwargs)
        self.problem = _unsupported(func, types, args)
        if self.problem is not None:
            return func(*args, **kwargs)
        return self._record(func, trait, args, kwargs)

    def _record(self, func: OpOverload, trait: Trait, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads: list[int] = []
        saved_args = tuple(self._encode(a, reads) for a in args)
        saved_kwargs = {k: self._encode(v, reads) for k, v in kwargs.items()} if kwargs else kwargs
        generators = own = None
        if trait & Trait.RANDOM and draws(func, args, kwargs):
            self._check_random(func)
            generators = generator_states([*args, *kwargs.values()])
            given = kwargs.get("generator")
            own = None if given is None else given.get_state()
        written = self._before_writes(func, trait, args, kwargs)
        out = func(*args, **kwargs)
        books = self.books
        index = len(books.ops)
        writes = tuple(self._after_write(t, before, index) for t, before in written)
        makes = self._makes(out, index)
        books.ops.append(Op(func, saved_args, saved_kwargs, tuple(reads), makes, writes, generators, own))
        if makes:
            self._decide(func, trait, out, makes)
        return out

    def _makes(self, out: Any, index: int) -> tuple[tuple[int, int], ...]:
        if isinstance(out, torch.Tensor):
            return self._make(0, out, index)
        if isinstance(out, list | tuple):
            found: list[tuple[int, int]] = []
            for position, value in enumerate(out):
                if isinstance(value, torch.Tensor):
                    found += self._make(position, value, index)
            return tuple(found)
        return ()

    def _make(self, position: int, value: torch.Tensor, index: int) -> tuple[tuple[int, int], ...]:
        storage = value.untyped_storage()
        if storage._cdata in self._current:
            return ()
        state = self._new_state()
        self._pin(storage, state)
        self.books.producer[state] = index
        return ((position, state),)

    def _before_writes(
        self, func: OpOverload, trait: Trait, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[torch.Tensor, int]]:
        """Find what a call writes to; copy externals first, since replay must start from what they were."""
        positions = written_positions(func)
        if not positions:
            return []
        found: list[tuple[torch.Tensor, int]] = []
        for position, name in positions:
            target = args[position] if position < len(args) else kwargs.get(name)
            for tensor in target if isinstance(target, list | tuple) else (target,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                before = self.state_of(tensor)
                self.books.kept.pop(before, None)
                if before in self.books.externals and before not in self.books.copies:
                    self.books.copies[before] = whole_storage(tensor).clone()
                found.append((tensor, before))
        return found

    def _after_write(self, tensor: torch.Tensor, before: int, index: int) -> tuple[int, int]:
        after = self._new_state()
        self._current[tensor.untyped_storage()._cdata] = after
        self.books.producer[after] = index
        return before, after

    def _decide(self, func: OpOverload, trait: Trait, out: Any, makes: Sequence[tuple[int, int]]) -> None:
        """Keep the outputs that a rule names, and routing results."""
        rule = self.plan.table.get(func)
        if rule is None:
            if not trait & Trait.ROUTING:
                return
            self.books.saw_routing = True
        else:
            call = self._calls[rule]
            self._calls[rule] = call + 1
            if call == 0:
                self.witness.matched(rule)
            if not self.plan.keeps[rule](call):
                return
        values = (out,) if isinstance(out, torch.Tensor) else out
        for position, state in makes:
            tensor = share(values[position])
            self.books.kept[state] = (tensor, tensor._version)

    def _check_random(self, func: Any) -> None:
        if self.plan.preserve_rng or self.plan.allow_inexact:
            return
        raise RefusedError(
            f"region {self.fqn}: {describe(func)} draws random numbers and preserve_rng is off: backward would draw "
            "others, and the gradients would belong to another sample than the loss. Remove preserve_rng: false, or "
            "set allow_inexact: true"
        )

    # -- what autograd saves -----------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor, record: Any, *, keep_original: bool) -> Any:
        """Turn what autograd saves into a slot, or, for what comes from outside, into the tensor with its version."""
        if self.problem is None and (tensor.dtype.is_complex or not is_plain(tensor)):
            self.problem = f"autograd saves a {type(tensor).__name__} of {tensor.dtype}"
        if self.problem is not None:
            return External(tensor, tensor._version)
        state = self._current.get(tensor.untyped_storage()._cdata)
        if state is None or state in self.books.externals:
            return External(tensor, tensor._version)
        look = Look(state, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        slot = Slot(record, look, tensor.detach() if keep_original else None)
        self.books.slots.append(weakref.ref(slot))
        return slot


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a strided one of no subclass that changes what operators do."""
    kind = type(tensor)
    ordinary = kind is torch.Tensor or kind is torch.nn.Parameter or isinstance(tensor, torch._subclasses.FakeTensor)
    return ordinary and tensor.layout is torch.strided


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a tensor's storage as a flat tensor of the same dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return share(tensor).as_strided((count,), (1,), 0)


def _unsupported(func: Any, types: Sequence[type], args: Sequence[Any]) -> str | None:
    """Say why a call cannot be recorded; None where it can."""
    if not isinstance(func, OpOverload):
        return f"the higher-order operator {func} runs inside it"
    if func.namespace == "_c10d_functional":
        return f"the collective {describe(func)} runs inside it"
    for kind in types:
        if kind is not torch.nn.Parameter and not issubclass(kind, torch._subclasses.FakeTensor):
            return f"{kind.__name__} (a tensor subclass) goes through {describe(func)}"
    for value in args:
        if isinstance(value, torch.Tensor) and (value.dtype.is_complex or value.layout is not torch.strided):
            return f"{describe(func)} works on {value.dtype}, {value.layout}"
    return None
