"""Executor ``replay``: backward runs again only the operators that it needs, straight from forward's record.

The built-in recompute runs a region's Python code a second time, with everything that is not saved, needed or not.
Replay does not: hooks, counters and caches inside the region run once, and an operator runs again only if some
value that backward asks for depends on it. When backward asks for the first value, the operators behind it run, in
the order in which forward ran them, below autograd and with autocast off (casts are on the record); a value stays
while another value that backward may still ask for, or an operator of it, needs it, so each operator runs once.

The first time that a region meets inputs of a form, all values are replayed at the end of its forward and compared,
bit by bit, with what autograd saved. Where that fails, or the region holds something that cannot be recorded, this call
keeps what autograd saved and later calls go to ``recompute``, and the report says why.

Every write to a tensor from outside is refused or copied before: autograd's own check of versions is off under
hooks, so externals and kept values are checked here when they are used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lowtide.errors import RecomputeError
from lowtide.regions._record import External, Look, Op, Recorder, Slot, whole_storage
from lowtide.regions._tape import Plan, Witness, describe, generator_states, restore_generators

__all__ = ["Record", "run_replayed"]


class Record:
    """One call of a region, from the end of forward until backward has taken everything."""

    def __init__(self, recorder: Recorder) -> None:
        self.fqn = recorder.fqn
        self._books = recorder.books
        self._needed: list[int] = []
        self._done: set[int] = set()
        self._uses: dict[int, int] = {}
        self._bases: dict[int, torch.Tensor] = {}
        self._open = False
        self._verifying = False

    # -- after forward -----------------------------------------------------------------------------------------

    def prune(self) -> None:
        """Forget what no saved value depends on: operators, externals, and values that a rule kept in vain."""
        books = self._books
        needed, states = self._closure(s.look.state for s in self._slots())
        for index in range(len(books.ops)):
            if index not in needed:
                books.ops[index] = None
        for held in (books.kept, books.externals, books.copies):
            for state in [s for s in held if s not in states]:
                del held[state]

    def _slots(self) -> list[Slot]:
        """Slots that autograd still holds."""
        return [slot for ref in self._books.slots if (slot := ref()) is not None]

    def _closure(self, wanted: Iterable[int]) -> tuple[set[int], set[int]]:
        """Return the operators and states that lead to the wanted states, from what is held."""
        books = self._books
        ops: set[int] = set()
        seen: set[int] = set()
        stack = list(wanted)
        while stack:
            state = stack.pop()
            if state in seen:
                continue
            seen.add(state)
            if state in books.kept or state not in books.producer:
                continue
            index = books.producer[state]
            if index not in ops:
                ops.add(index)
                op = books.ops[index]
                assert op is not None
                stack.extend(op.reads)
        return ops, seen

    # -- in backward -------------------------------------------------------------------------------------------

    def take(self, slot: Slot) -> torch.Tensor:
        """Return the value of a slot, replaying what it needs."""
        if slot.original is not None:
            return slot.original
        if slot.last is not None and (again := slot.last()) is not None:
            return again
        if not self._open or slot.served:
            self._begin()
        value = self._value(slot)
        slot.served = True
        slot.last = weakref.ref(value)
        self._release(slot.look.state)
        return value

    def _begin(self) -> None:
        """Plan an epoch: all slots that autograd still holds may be asked for, each once."""
        slots = self._slots()
        for slot in slots:
            slot.served = False
        self._bases.clear()
        self._done.clear()
        ops, _ = self._closure(s.look.state for s in slots)
        self._uses = {}
        for slot in slots:
            self._count(slot.look.state)
        for index in ops:
            op = self._books.ops[index]
            assert op is not None
            for state in op.reads:
                self._count(state)
        self._open = True

    def _count(self, state: int) -> None:
        self._uses[state] = self._uses.get(state, 0) + 1

    def _value(self, slot: Slot) -> torch.Tensor:
        state = slot.look.state
        if state in self._bases or state in self._books.kept:
            return _view(self._base(state), slot.look)
        pending = sorted(i for i in self._behind(state) if i not in self._done)
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            for index in pending:
                self._run(index)
        return _view(self._base(state), slot.look)

    def _behind(self, state: int) -> set[int]:
        """Operators to run for a state, from what is held or was replayed already."""
        books = self._books
        ops: set[int] = set()
        stack = [state]
        while stack:
            current = stack.pop()
            if current in self._bases or current in books.kept or current not in books.producer:
                continue
            index = books.producer[current]
            if index not in ops:
                ops.add(index)
                op = books.ops[index]
                assert op is not None
                stack.extend(op.reads)
        return ops

    def _run(self, index: int) -> None:
        op = self._books.ops[index]
        assert op is not None
        fresh = {before: self._writable(before) for before, _ in op.writes}
        args = tuple(self._decode(a, fresh) for a in op.args)
        kwargs = {k: self._decode(v, fresh) for k, v in op.kwargs.items()}
        out = _call(op, args, kwargs)
        values = (out,) if isinstance(out, torch.Tensor) else out
        for position, state in op.makes:
            if self._uses.get(state):
                self._bases[state] = values[position]
        for before, after in op.writes:
            self._bases[after] = fresh[before]
        self._done.add(index)
        for state in op.reads:
            self._release(state)
        for _, after in op.writes:
            if not self._uses.get(after):
                self._bases.pop(after, None)

    def _writable(self, state: int) -> torch.Tensor:
        """Return a tensor on a storage that may be written: the value's own where nobody else needs it, else a copy."""
        base = self._base(state)
        if state in self._bases and self._uses.get(state, 0) <= 1:
            return base
        return whole_storage(base).clone()

    def _base(self, state: int) -> torch.Tensor:
        """Return a tensor on the storage of a state."""
        found = self._bases.get(state)
        if found is not None:
            return found
        books = self._books
        if state in books.copies:
            return books.copies[state]
        if state in books.kept:
            tensor, version = books.kept[state]
            self._check(tensor, version, "a value that the policy keeps")
            return tensor
        external = books.externals[state]
        self._check(external.tensor, external.version, "a tensor that the region was given")
        return external.tensor

    def _check(self, tensor: torch.Tensor, version: int, what: str) -> None:
        if tensor._version != version:
            raise RecomputeError(
                f"region {self.fqn}: {what} (shape {tuple(tensor.shape)}) was changed in place after the region used "
                f"it (version {tensor._version}, expected {version}), so backward cannot compute the right gradient. "
                "Write it out of place, or clone it first"
            )

    def _decode(self, value: Any, fresh: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, Look):
            base = fresh.get(value.state)
            return _view(self._base(value.state) if base is None else base, value)
        if isinstance(value, list | tuple):
            return type(value)(self._decode(v, fresh) for v in value)
        return value

    def _release(self, state: int) -> None:
        left = self._uses.get(state, 0) - 1
        self._uses[state] = left
        if left <= 0:
            self._bases.pop(state, None)
            if state in self._books.kept and not self._verifying and _graph_is_freed():
                # Nobody asks again: autograd frees this graph as it goes.
                del self._books.kept[state]

    # -- verification ------------------------------------------------------------------------------------------

    def difference(self) -> str | None:
        """Replay everything now and compare it with the originals; say what differs, None where nothing does."""
        self._verifying = True
        slots = self._slots()
        originals = [(slot, slot.original) for slot in slots]
        for slot in slots:
            slot.original = None
        try:
            for slot, original in originals:
                assert original is not None
                value = self.take(slot)
                if not _same(value, original):
                    return f"{self._name(slot.look.state)} gives another result in replay"
        except RuntimeError as error:
            return f"replay fails: {type(error).__name__}: {error}"
        finally:
            self._verifying = False
            self._close()
            for slot, original in originals:
                slot.original = original
                slot.served, slot.last = False, None
        return None

    def _close(self) -> None:
        self._bases.clear()
        self._done.clear()
        self._uses.clear()
        self._open = False

    def _name(self, state: int) -> str:
        index = self._books.producer.get(state)
        op = None if index is None else self._books.ops[index]
        return "a value from outside" if op is None else describe(op.func)

    def drop_originals(self) -> None:
        """From here on values are replayed."""
        for slot in self._slots():
            slot.original = None

    @property
    def saw_routing(self) -> bool:
        """Whether an operator that routes tokens ran."""
        return self._books.saw_routing


def _view(base: torch.Tensor, look: Look) -> torch.Tensor:
    """Look at the storage of ``base`` as the record says."""
    if base.dtype is not look.dtype:
        empty = torch.empty(0, dtype=look.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), look.offset, look.size, look.stride)
    return base.as_strided(look.size, look.stride, look.offset)


def _call(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if op.generators is None:
        return op.func(*args, **kwargs)
    before = generator_states(args)
    given = kwargs.get("generator")
    given_before = None if given is None else given.get_state()
    try:
        restore_generators(op.generators)
        if given is not None and op.own_generator is not None:
            given.set_state(op.own_generator)
        return op.func(*args, **kwargs)
    finally:
        restore_generators(before)
        if given is not None and given_before is not None:
            given.set_state(given_before)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if isinstance(a, torch._subclasses.FakeTensor):
        return True
    with torch.no_grad():
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _graph_is_freed() -> bool:
    if torch._C._current_graph_task_id() == -1:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def _unpack(held: Any) -> torch.Tensor:
    if isinstance(held, Slot):
        return held.record.take(held)
    assert isinstance(held, External)
    if held.tensor._version != held.version:
        raise RecomputeError(
            f"a tensor of shape {tuple(held.tensor.shape)} that backward needs was changed in place after a region "
            f"used it (version {held.tensor._version}, expected {held.version}). Write it out of place, or clone it first"
        )
    return held.tensor


def run_replayed(
    call: Callable[[], Any],
    *,
    plan: Plan,
    witness: Witness,
    fqn: str,
    verify: bool,
    module: nn.Module,
) -> tuple[Any, str | None]:
    """Run a region's forward under the recorder.

    Args:
        call: runs forward.
        plan: what the rules keep.
        witness: learns which rules matched.
        fqn: the region, for messages.
        verify: whether to compare a whole replay with the originals at the end of forward.
        module: the region's module; its buffers must be as they were after a verification.

    Returns:
        The outputs, and why they cannot be replayed (None where they can). Where they cannot, this call keeps what
        autograd saved.
    """
    recorder = Recorder(plan, witness, fqn, watch=verify)
    record = Record(recorder)

    def pack(tensor: torch.Tensor) -> Any:
        return recorder.pack(tensor, record, keep_original=verify or recorder.problem is not None)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack), recorder:
            out = call()
    finally:
        recorder.close()
    problem = recorder.problem
    record.prune()
    if problem is None and verify:
        problem = _verify(record, module)
    if problem is None:
        record.drop_originals()
    return out, problem


def _verify(record: Record, module: nn.Module) -> str | None:
    """Replay once, and see that nothing outside changed by it (a kernel may write what its schema does not tell)."""
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    problem = record.difference()
    for name, buffer in module.named_buffers():
        if name in before and not _same(buffer, before[name]):
            with torch.no_grad():
                buffer.copy_(before[name])
            problem = problem or f"replay writes to the buffer {name}"
    return problem
