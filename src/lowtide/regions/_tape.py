"""What a region ran in forward, and the two modes that write and follow it.

Torch's own selective contexts match a recomputed operator to a saved one by its name and count alone: another
operator of the same name and shape in between gives wrong gradients without an error, a random operator whose output
is saved leaves the generator where the next random operator does not expect it, and saving an output that is
later written in place fails (measured in torch 2.13 and 2.14). The modes here compare the whole sequence of
operators and their outputs' shapes, put the generators where forward had them, and recompute what was overwritten.

``Recording`` runs in forward. It appends every operator to a ``Tape`` and keeps the outputs that the rules name.
``Repeating`` runs in recompute. It walks along the tape, returns what was kept and runs the rest.

Not compared: views (outside the thorough first pass), metadata, profiler marks, the operators of FSDP and c10d, and
``_to_copy``, which autocast's weight cache makes come and go (pytorch issue 193338).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.errors import RecomputeError, RefusedError
from lowtide.regions._operators import Trait, draws, mutated_arguments, traits


@dataclass(frozen=True)
class Plan:
    """How calls are carried out; one for all regions of an ``apply``, so that compiled blocks share their code."""

    table: Mapping[Any, int]
    """Overload -> index of the rule that saves it."""
    keeps: Sequence[Callable[[int], bool]]
    """For each rule: whether its call number i, counted from 0 in each call of the region, is kept."""
    preserve_rng: bool
    strict: bool
    allow_inexact: bool


class Witness(Protocol):
    """Learns which rules matched and which operators ran, for the error about rules that matched nothing."""

    def matched(self, rule: int) -> None:
        """A rule matched a call."""

    def ran(self, func: Any) -> None:
        """An operator ran in a thorough pass."""


@dataclass
class Kept:
    """An output that stays from forward to backward."""

    value: Any
    version: int
    generators: list[tuple[str, torch.Tensor]] | None
    """Where the generators stood after it, if the operator drew random numbers."""


@dataclass
class Tape:
    """What one call of a region ran, in order."""

    thorough: bool
    funcs: list[Any] = field(default_factory=list)
    shapes: list[Any] = field(default_factory=list)
    literals: list[Any] = field(default_factory=list)
    digests: list[Any] = field(default_factory=list)
    kept: dict[int, Kept] = field(default_factory=dict)
    wrote_outside: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """Operators of a thorough pass that wrote to storages made outside the region."""
    saw_routing: bool = False
    unneeded: frozenset[tuple[int, int]] = frozenset()
    """(rule, call) of outputs that an earlier recompute of this form never came to: they are not kept."""
    kept_calls: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Position -> (rule, call) of what was kept in forward."""
    used: set[int] = field(default_factory=set)
    """Positions of kept outputs that recompute took."""

    def unused(self) -> frozenset[tuple[int, int]]:
        """Return (rule, call) of what was kept and not taken by a whole recompute."""
        return frozenset(call for position, call in self.kept_calls.items() if position not in self.used)


_EXCLUDE_INPLACE = torch._C.DispatchKey.ADInplaceOrView


def share(value: torch.Tensor) -> torch.Tensor:
    """Detach, keeping the version counter in common, so that a later write in place can be seen.

    Source: torch.utils.checkpoint does the same below its selective contexts.
    """
    with torch._C._SetExcludeDispatchKeyGuard(_EXCLUDE_INPLACE, False):
        return value.detach()


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, tuple | list):
        return tuple(_shape(v) for v in value)
    return None


def _version(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value._version
    return sum(v._version for v in tree_leaves(value) if isinstance(v, torch.Tensor))


def _literal(value: Any) -> Any:
    """A comparable picture of an argument: a tensor's form, any other value with its type (1 is not True)."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.shape, value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_literal(v) for v in value)
    if isinstance(value, float) and value != value:
        return ("nan",)
    return (type(value), value)


def _literals(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return (
        tuple(map(_literal, args)),
        tuple((k, _literal(v)) for k, v in kwargs.items() if k != "generator"),
    )


def _digest(value: Any) -> tuple[int, ...]:
    """A fingerprint of every bit of every output tensor, and of the order of its elements."""
    return tuple(_fingerprint(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20


def _fingerprint(tensor: torch.Tensor) -> int:
    """Sum of the elements' bits, each times an odd number of its own, modulo 2**64; in chunks, to need no memory."""
    if tensor.layout is not torch.strided:
        return 0
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().reshape(-1).view(_BITS[plain.element_size()])
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].long()
        weights = torch.arange(start, start + bits.numel(), device=bits.device) * 0x5851F42D4C957F2D | 1
        total += int((bits * weights).sum())
    return total


def _has_values(out: Any, trait: Trait) -> bool:
    fake = torch._subclasses.FakeTensor
    return not trait & Trait.UNINITIALISED and not any(isinstance(t, fake) for t in tree_leaves(out))


def generator_states(value: Any) -> list[tuple[str, torch.Tensor]]:
    states = [("cpu", torch.get_rng_state())]
    first = next((t for t in tree_leaves(value) if isinstance(t, torch.Tensor)), None)
    if first is not None and first.device.type != "cpu":
        module = torch.get_device_module(first.device)
        states.append((str(first.device), module.get_rng_state(first.device)))
    return states


def restore_generators(states: list[tuple[str, torch.Tensor]]) -> None:
    for device, state in states:
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def describe(func: Any) -> str:
    """An operator as users write it: ``aten.mm.default``."""
    return str(func)


class _RegionMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.fsdp_depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else every operator passes through a wrapper that switches dynamo off.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def is_fsdp(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Tell whether a call belongs to FSDP2's hooks on a unit inside the region.

        They gather in forward and not in recompute, or the other way, and are no operators of the region. FSDP2 does
        its work inside profiler marks named ``FSDP::...`` (torch 2.11 to 2.14), which a mode sees begin and end.
        """
        if func is _ENTER and (self.fsdp_depth or str(args[0]).startswith("FSDP::")):
            self.fsdp_depth += 1
        elif func in _EXITS and self.fsdp_depth:
            self.fsdp_depth -= 1
        return self.fsdp_depth > 0


_ENTER = torch.ops.profiler._record_function_enter_new.default
_EXITS = frozenset(
    getattr(torch.ops.profiler._record_function_exit, o) for o in torch.ops.profiler._record_function_exit.overloads()
)


class Recording(_RegionMode):
    """Writes the tape in forward and keeps what the rules name."""

    def __init__(self, plan: Plan, tape: Tape, witness: Witness, fqn: str) -> None:
        super().__init__()
        self.plan = plan
        self.fqn = fqn
        self.tape = tape
        self.witness = witness
        self.calls = [0] * len(plan.keeps)
        self.made: set[int] = set()
        self.kept_storages: dict[int, list[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        trait = traits(func)
        if self.is_fsdp(func, args) if trait & Trait.SKIPPED else self.fsdp_depth:
            return func(*args, **kwargs)
        if trait & Trait.SKIPPED:
            return func(*args, **kwargs)
        if trait & Trait.RANDOM:
            self._check_random(func, args, kwargs)
        out = func(*args, **kwargs)
        tape = self.tape
        rule = self.plan.table.get(func)
        if rule is None and not tape.thorough and trait & (Trait.VIEW | Trait.CAST):
            return out
        if trait & Trait.MUTATES:
            self._forget_overwritten(func, args, kwargs)
        if rule is None and trait & Trait.CAST:
            self._note(func, out, trait)
            return out
        position = len(tape.funcs)
        tape.funcs.append(func)
        tape.shapes.append(_shape(out))
        if tape.thorough:
            self._note(func, out, trait)
            tape.literals.append(_literals(args, kwargs))
            tape.digests.append(_digest(out) if self.plan.strict and _has_values(out, trait) else None)
        if self._keeps(rule, trait, position):
            drew = trait & Trait.RANDOM and draws(func, args, kwargs)
            self._keep(position, out, generator_states(out) if drew else None)
        return out

    def _keeps(self, rule: int | None, trait: Trait, position: int) -> bool:
        if rule is None:
            if trait & Trait.ROUTING:
                self.tape.saw_routing = True
                return True
            return False
        call = self.calls[rule]
        self.calls[rule] = call + 1
        if call == 0:
            self.witness.matched(rule)
        if not self.plan.keeps[rule](call) or (rule, call) in self.tape.unneeded:
            return False
        self.tape.kept_calls[position] = (rule, call)
        return True

    def _keep(self, position: int, out: Any, generators: list[tuple[str, torch.Tensor]] | None) -> None:
        value = share(out) if isinstance(out, torch.Tensor) else tree_map_only(torch.Tensor, share, out)
        self.tape.kept[position] = Kept(value, _version(value), generators)
        for t in tree_leaves(value):
            if isinstance(t, torch.Tensor):
                self.kept_storages.setdefault(_storage(t), []).append(position)

    def _forget_overwritten(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Drop kept values that this operator overwrites: they are recomputed, writes and all."""
        for target in mutated_arguments(func, args, kwargs):
            storage = _storage(target)
            for position in self.kept_storages.pop(storage, ()):
                self.tape.kept.pop(position, None)
                self.tape.kept_calls.pop(position, None)
            if self.tape.thorough and storage not in self.made:
                self.tape.wrote_outside.append((func, target))

    def _note(self, func: Any, out: Any, trait: Trait) -> None:
        if not self.tape.thorough:
            return
        self.witness.ran(func)
        if not trait & (Trait.VIEW | Trait.MUTATES) or func is torch.ops.aten.lift_fresh.default:
            self.made.update(_storage(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor))

    def _check_random(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.plan.allow_inexact or not draws(func, args, kwargs):
            return
        if kwargs.get("generator") is not None:
            raise RefusedError(
                f"region {self.fqn}: {describe(func)} draws from a generator of its own, which recompute cannot "
                "put back: it would draw other numbers. Use the default generator, or leave this layer out of the "
                "policy; allow_inexact: true lets it through"
            )
        if not self.plan.preserve_rng:
            raise RefusedError(random_without_state(self.fqn, describe(func)))


def random_without_state(fqn: str, what: str) -> str:
    """Say why random numbers and preserve_rng: false do not go together."""
    return (
        f"region {fqn}: {what} draws random numbers and preserve_rng is off: backward would draw others, and the "
        "gradients would belong to another sample than the loss. Remove preserve_rng: false, or set "
        "allow_inexact: true"
    )


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


class Repeating(_RegionMode):
    """Walks along the tape in recompute: returns what was kept, runs and compares the rest."""

    def __init__(self, plan: Plan, tape: Tape, on_enter: Callable[[], None], fqn: str) -> None:
        super().__init__()
        self.plan = plan
        self.fqn = fqn
        self.tape = tape
        self.on_enter = on_enter
        self.position = 0
        self.release = False

    def __enter__(self) -> Repeating:
        self.on_enter()
        self.position = 0
        self.release = _graph_is_freed()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        trait = traits(func)
        tape = self.tape
        unruled = func not in self.plan.table
        if self.is_fsdp(func, args) if trait & Trait.SKIPPED else self.fsdp_depth:
            return func(*args, **kwargs)
        if trait & Trait.SKIPPED or (unruled and (trait & Trait.CAST or (trait & Trait.VIEW and not tape.thorough))):
            return func(*args, **kwargs)
        position = self.position
        if position >= len(tape.funcs) or tape.funcs[position] is not func:
            raise self._other_operator(func)
        self.position = position + 1
        tape.used.add(position)
        if tape.thorough and tape.literals[position] != _literals(args, kwargs):
            raise self._other_arguments(func, position, args, kwargs)
        kept = tape.kept.get(position)
        if kept is not None and _version(kept.value) == kept.version:
            return self._give_back(position, kept)
        out = func(*args, **kwargs)
        if _shape(out) != tape.shapes[position]:
            raise self._other_shape(func, position, out)
        if tape.thorough and tape.digests[position] is not None and tape.digests[position] != _digest(out):
            raise self._other_values(func, position)
        return out

    def _give_back(self, position: int, kept: Kept) -> Any:
        if kept.generators is not None:
            restore_generators(kept.generators)
        if self.release:
            del self.tape.kept[position]
        value = kept.value
        return share(value) if isinstance(value, torch.Tensor) else tree_map_only(torch.Tensor, share, value)

    def _place(self, position: int) -> str:
        return f"region {self.fqn}, operator {position + 1} of {len(self.tape.funcs)}"

    def _other_operator(self, func: Any) -> RecomputeError:
        position, funcs = self.position, self.tape.funcs
        expected = f"forward ran {describe(funcs[position])}" if position < len(funcs) else "forward had ended"
        return RecomputeError(f"{self._place(position)}: {expected}, recompute runs {describe(func)}. {CAUSES}")

    def _other_arguments(
        self, func: Any, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RecomputeError:
        return RecomputeError(
            f"{self._place(position)}, {describe(func)}: its arguments were {_plain(self.tape.literals[position])} in "
            f"forward and are {_plain(_literals(args, kwargs))} in recompute. {CAUSES}"
        )

    def _other_shape(self, func: Any, position: int, out: Any) -> RecomputeError:
        return RecomputeError(
            f"{self._place(position)}, {describe(func)}: its output was {_plain(self.tape.shapes[position])} in "
            f"forward and is {_plain(_shape(out))} in recompute. {CAUSES}"
        )

    def _other_values(self, func: Any, position: int) -> RecomputeError:
        return RecomputeError(
            f"{self._place(position)}, {describe(func)}: determinism is strict, and its result differs from forward's "
            f"in at least one bit, with equal shapes. It is the first that differs. {CAUSES} A kernel that is not "
            "deterministic (torch.use_deterministic_algorithms(True) names them) does the same."
        )


CAUSES = (
    "The second run of this region is not like its first, so its gradients would be wrong. Usual causes: a table or "
    "mask that is built at the first call and cached (run one forward under torch.no_grad() first); a cache object "
    "that the block appends to (use_cache=False); a counter, a clock or other Python state that the block reads; "
    "an argument that the block changes in place."
)


def _plain(value: Any) -> str:
    """A shape or literal for a message, kept short."""
    text = str(value).replace("torch.Size", "").replace("<class '", "").replace("'>", "")
    return text if len(text) <= 200 else text[:197] + "..."


def _graph_is_freed() -> bool:
    """Whether the running backward frees its graph (no ``retain_graph``), so that kept values may go."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def refuse_outside_writes(fqn: str, tape: Tape, buffers: Mapping[int, str], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse a region that writes to tensors from outside other than its own buffers.

    Args:
        fqn: the region, for the message.
        tape: a thorough tape.
        buffers: storage -> name of the region's buffers, which are put back around recompute.
        inputs: the region's tensor arguments.

    Raises:
        RefusedError: recompute would write a second time, or start from what forward wrote.
    """
    input_storages = {_storage(t) for t in inputs}
    for func, target in tape.wrote_outside:
        storage = _storage(target)
        if storage in buffers:
            continue
        where = "an input of the region" if storage in input_storages else "a tensor made outside the region"
        raise RefusedError(
            f"region {fqn}: {describe(func)} writes into {where} (shape {tuple(target.shape)}); recompute would "
            "start from what forward wrote, or write a second time. Write it out of place, or make the tensor a "
            "buffer of the module; otherwise leave this layer out of the policy"
        )
