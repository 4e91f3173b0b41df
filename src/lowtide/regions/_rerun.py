"""One call of a replayed region, from the end of its forward until backward has taken everything.

A record is held by the slots in autograd's graph and by nothing else, and refers to none of them; so all of it goes
with the graph, without the cycle collector. Operators run below autograd and with autocast off (casts are on the
record).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lowtide.regions._catalogue import Kind
from lowtide.regions._held import Held, Passed, Slot, copy_of_storage, look, version_only
from lowtide.regions._record import Call, Generators, Recorder
from lowtide.regions._schedule import Node, Run, Schedule
from lowtide.regions._tape import generator_states, restore_generators

__all__ = ["HookPair", "Record", "same_bits"]

HookPair = tuple[Callable[..., Any], Callable[..., Any]]


class Record:
    """One call of a region, until backward has taken everything."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder: Recorder | None = recorder
        """While forward runs."""
        self._schedule: Schedule | None = None
        self._calls: dict[int, Call] = {}
        self._held: dict[int, Held | Passed] = {}
        self._kept: dict[int, weakref.ref[Held | Passed]] = {}
        self._slots: list[weakref.ref[Slot]] = []
        self._watched: dict[int, list[Held]] = {}
        """State -> versions of the region's outputs that share its storage."""
        self._values: list[torch.Tensor | None] = []
        """State -> what was replayed or fetched of it, as long as it is needed."""
        self._node: Node | None = None
        self._passed_on = False

    # -- after forward -----------------------------------------------------------------------------------------

    def finish(self, slots: list[Slot], schedules: list[Schedule]) -> Schedule:
        """Take over from the recorder what a backward of these slots needs; return the schedule, now the first."""
        recorder = self._recorder
        assert recorder is not None
        states = tuple([slot.state for slot in slots])
        schedule = _find(schedules, recorder, states)
        self._schedule = schedule
        self._slots = [weakref.ref(slot) for slot in slots]
        self._calls = {index: recorder.calls[index] for index in schedule.needed}
        self._values = [None] * len(recorder.forms)
        externals, copies = recorder.externals, recorder.copies
        for state in schedule.outside:
            held = externals.get(state)
            self._held[state] = Held(copies[state], recorder.where) if held is None else held
        self._let_slots_keep(slots, {s: recorder.kept[s] for s in schedule.inner_kept})
        return schedule

    def _let_slots_keep(self, slots: list[Slot], kept: Mapping[int, Held | Passed]) -> None:
        """Give each slot the kept values that it depends on: they go when the last such slot goes."""
        schedule = self._schedule
        assert schedule is not None
        self._kept = {s: weakref.ref(value) for s, value in kept.items()}
        for index, (slot, keeps) in enumerate(zip(slots, schedule.keeps, strict=True)):
            slot.index = index
            if keeps:
                slot.keeps = tuple([kept[s] for s in keeps])

    def pass_on(self, slots: list[Slot], hooks: HookPair) -> None:
        """Hand what is held to the saved-tensor hooks around the region."""
        self._passed_on = True
        kept = {s: value for s, ref in self._kept.items() if (value := ref()) is not None}
        self._held = {s: _passed(self._held[s], hooks) for s in sorted(self._held)}
        self._let_slots_keep(slots, {s: _passed(kept[s], hooks) for s in sorted(kept)})

    def watch(self, outputs: Any) -> None:
        """Remember the versions of outputs that share storage with a value that backward may need."""
        recorder, schedule = self._recorder, self._schedule
        assert recorder is not None
        assert schedule is not None
        for tensor in _tensors(outputs):
            state = recorder.known(tensor)
            if state in schedule.watchable:
                self._watched.setdefault(state, []).append(version_only(tensor, recorder.where))

    def forward_ended(self) -> None:
        """Let go of the recorder."""
        self._recorder = None

    # -- in backward -------------------------------------------------------------------------------------------

    def take(self, slot: Slot) -> torch.Tensor:
        """Return the value of a slot, replaying what it needs."""
        schedule = self._schedule
        if schedule is None:
            return self._take_early(slot)
        node = self._node
        if node is None or slot.index in node.served:
            node = self._begin(schedule)
        found = node.next.get(slot.index) or schedule.after(node, slot.index)
        values = self._values
        try:
            if found.runs:
                self._execute(found.runs)
            value = values[slot.state]
            if value is None:
                value = self._fetch(slot.state)
        except BaseException:
            self._close()
            raise
        if self._watched:
            self._check_outputs(slot.state)
        for state in found.frees:
            values[state] = None
        self._node = found
        if slot.form is not None:
            value = look(value, slot.form)
        if _graph_is_freed():
            # A function may read its saved tensors twice; the slot goes right after it has run.
            slot.value = value
        return value

    def _take_early(self, slot: Slot) -> torch.Tensor:
        """Answer a backward that runs inside forward."""
        recorder = self._recorder
        assert recorder is not None
        record = Record(recorder)
        again = Slot(record, slot.state, slot.form, None)
        with recorder.pause():
            record.finish([again], [])
            return record.take(again)

    def _begin(self, schedule: Schedule) -> Node:
        """Start anew: all slots that autograd still holds may be asked for, each once."""
        self._close()
        return schedule.root(tuple([slot.index for ref in self._slots if (slot := ref()) is not None]))

    def _close(self) -> None:
        self._node = None
        self._values = [None] * len(self._values)

    def _fetch(self, state: int) -> torch.Tensor:
        """Return a tensor on the storage of a state that is held."""
        held = self._held.get(state)
        if held is None:
            kept = self._kept[state]()
            assert kept is not None, "a slot holds the kept values that it depends on"
            held = kept
            if self._watched:
                self._check_outputs(state)
        value = self._values[state] = held.get()
        return value

    def _check_outputs(self, state: int) -> None:
        for held in self._watched.get(state, ()):
            held.get()

    def _execute(self, runs: Iterable[Run]) -> None:
        values, calls, schedule = self._values, self._calls, self._schedule
        assert schedule is not None
        steps = schedule.steps
        if self._passed_on:
            self._fetch_first(runs)
        with _below_autograd():
            for run in runs:
                for before, after, copied in run.writes:
                    base = values[before]
                    if base is None:
                        base = self._fetch(before)
                    values[after] = copy_of_storage(base) if copied else base
                call = calls[run.index]
                args, kwargs = self._arguments(call, run.sources)
                kind: Kind = steps[run.index][0]
                generators = call[3]
                if generators is None:
                    out = kind.call(*args, **kwargs)
                else:
                    out = _call_random(kind, args, kwargs, generators)
                for position, state in run.stores:
                    values[state] = out if isinstance(out, torch.Tensor) else out[position]
                for state in run.frees:
                    values[state] = None

    def _fetch_first(self, runs: Iterable[Run]) -> None:
        """Ask the hooks around the region before autograd is switched off: a checkpoint around it may recompute."""
        for run in runs:
            for state in (*run.sources, *(before for before, _, _ in run.writes)):
                if self._values[state] is None and (state in self._held or state in self._kept):
                    self._fetch(state)

    def _arguments(self, call: Call, sources: tuple[int, ...]) -> tuple[list[Any], Mapping[str, Any]]:
        rest, kwargs, reads, _ = call
        values = self._values
        args = rest.copy()
        for (place, form), state in zip(reads, sources, strict=True):
            if type(place) is not int:
                return self._arguments_anywhere(call, sources)
            value = values[state]
            if value is None:
                value = self._fetch(state)
            args[place] = value if form is None else look(value, form)
        return args, kwargs

    def _arguments_anywhere(self, call: Call, sources: tuple[int, ...]) -> tuple[list[Any], Mapping[str, Any]]:
        """Fill in tensors that stand in lists or have names."""
        rest, named, reads, _ = call
        args = [list(a) if type(a) is list else a for a in rest]
        kwargs = {k: list(v) if type(v) is list else v for k, v in named.items()}
        for (place, form), state in zip(reads, sources, strict=True):
            value = self._values[state]
            if value is None:
                value = self._fetch(state)
            outer, inner = place if type(place) is tuple else (place, None)
            target: Any = kwargs if type(outer) is str else args
            if inner is not None:
                target, outer = target[outer], inner
            target[outer] = value if form is None else look(value, form)
        return args, kwargs

    # -- verification ------------------------------------------------------------------------------------------

    def difference(self, slots: list[Slot]) -> str | None:
        """Replay everything now and compare it with the originals; say what differs, None where nothing does."""
        originals = [slot.original for slot in slots]
        for slot in slots:
            slot.original = None
        try:
            # From the end, as backward does.
            for slot, original in zip(reversed(slots), reversed(originals), strict=True):
                assert original is not None
                if not same_bits(self.take(slot), original.tensor):
                    return f"{self._name(slot.state)} gives another result in replay"
        except Exception as error:
            return f"replay fails: {type(error).__name__}: {error}"
        finally:
            self._close()
            for slot, original in zip(slots, originals, strict=True):
                slot.original = original
        return None

    def _name(self, state: int) -> str:
        schedule = self._schedule
        index = None if schedule is None else schedule.producer(state)
        return "a value from outside" if schedule is None or index is None else repr(schedule.steps[index][0])

    def runs_foreign(self) -> bool:
        """Whether replay runs an operator that does not come with torch."""
        schedule = self._schedule
        return schedule is not None and any(schedule.steps[index][0].foreign for index in schedule.needed)

    def outside(self) -> list[torch.Tensor]:
        """Return the tensors from outside that replay reads."""
        return [held.tensor for held in self._held.values() if isinstance(held, Held)]


class _below_autograd:  # noqa: N801 (a context manager; as a generator it would cost as much as an operator)
    """Run operators as they ran below the recording: no graph, and no casts, which are on the record."""

    __slots__ = ("_autocast", "_autograd", "_grad")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch._C._set_grad_enabled(False)
        self._autocast = torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else None
        if self._autocast is not None:
            self._autocast.__enter__()
        self._autograd = torch._C._AutoDispatchBelowAutograd()
        self._autograd.__enter__()

    def __exit__(self, *error: object) -> None:
        self._autograd.__exit__(*error)
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        if self._grad:
            torch._C._set_grad_enabled(True)


@contextmanager
def _without_vmap() -> Generator[None]:
    """Step out of a vmap around backward, which would refuse random operators."""
    depth = torch._C._vmapmode_increment_nesting()
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(depth - 1):
            torch._C._vmapmode_increment_nesting()


def _find(schedules: list[Schedule], recorder: Recorder, states: tuple[int, ...]) -> Schedule:
    """Return the schedule for what was recorded: the last one used first."""
    steps, kept = tuple(recorder.steps), frozenset(recorder.kept)
    for i, schedule in enumerate(schedules):
        if schedule.matches(steps, kept, states):
            if i:
                schedules.insert(0, schedules.pop(i))
            return schedule
    schedule = Schedule(steps, kept, states)
    schedules.insert(0, schedule)
    return schedule


def _passed(held: Held | Passed, hooks: HookPair) -> Passed:
    return Passed(held.get(), hooks)


def _call_random(kind: Kind, args: list[Any], kwargs: Mapping[str, Any], generators: Generators) -> Any:
    """Call with the generators as they were in forward, and put them back."""
    states, own = generators
    given: torch.Generator | None = kwargs.get("generator")
    given_before = None if given is None else given.get_state()
    before = generator_states([*args, *kwargs.values()])
    try:
        restore_generators(states)
        if given is not None and own is not None:
            given.set_state(own)
        with _without_vmap():
            return kind.call(*args, **kwargs)
    finally:
        restore_generators(before)
        if given is not None and given_before is not None:
            given.set_state(given_before)


def _tensors(value: Any) -> Generator[torch.Tensor]:
    """Yield the tensors in outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in vars(value).values():
            yield from _tensors(item)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same form and the same bits."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if isinstance(a, torch._subclasses.FakeTensor) or a.is_meta:
        return True
    with torch.no_grad():
        a, b = a.detach(), b.detach()
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        kind = _BITS[a.element_size()]
        return torch.equal(a.view(kind), b.view(kind))


def _graph_is_freed() -> bool:
    """Whether the running backward frees its graph (no ``retain_graph``)."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
