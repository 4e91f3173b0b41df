"""What a replayed region ran in forward: operators over numbered values.

A *state* is the content of one storage between two writes. A tensor is a state and a *form*, the way to look at it
(size, stride, offset, dtype), so views are never recorded: one ``as_strided`` rebuilds any of them. A write makes a
new state. What was made outside the region (arguments, parameters, buffers, constants) is *external* and is held by
reference, with its version. FSDP2 frees and refills the same storage and keeps the version, so its parameters need
no special case (checked in torch 2.11 to 2.14).

``Recorder`` is a dispatch mode below autograd. ``saved_tensors_hooks`` around it turn what autograd packs into
``Slot``s that name a state. Storages are told apart by the address of their ``StorageImpl``; a weak reference on
each keeps the address from being given out again while recording, and keeps no data.

This code runs for every operator of every forward, and its time is the executor's cost. Hence plain tuples, one
look-up for each operator, and ``func._op`` in the place of ``func``.

Over 400 lines: recording, and what it decides to keep, share one hot path and its state.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import LowtideError, RefusedError
from lowtide.regions._catalogue import Catalogue, Kind
from lowtide.regions._held import Form, Held, HeldView, Slot, copy_of_storage, look, version_only, without_cycle
from lowtide.regions._operators import draws
from lowtide.regions._plan import NOTHING, Decision, Scope
from lowtide.regions._schedule import Schedule, Step
from lowtide.regions._tape import Witness, generator_states, share

__all__ = ["Call", "Generators", "Recorder"]

Place = Any
"""Where a tensor stands among the arguments: a position, a name, or (position or name, index in a list)."""

Generators = tuple[list[tuple[str, torch.Tensor]], torch.Tensor | None]
"""Where the default generators stood, and the one that the caller gave."""

Call = tuple[list[Any], dict[str, Any], list[tuple[Place, Form | None]], Generators | None]
"""(arguments, keyword arguments, both with None in the place of tensors; where tensors stand and their forms, None
for the form that the state was made with; generators of an operator that drew random numbers)."""

_NOTHING: dict[str, Any] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Recorder(TorchDispatchMode):
    """Records one call of a region."""

    supports_higher_order_operators = True

    def __init__(
        self,
        catalogue: Catalogue,
        witness: Witness,
        fqn: str,
        scope: Scope | None,
        known: Sequence[Schedule],
        *,
        watch: bool,
    ) -> None:
        """Args: ``known`` are the schedules that were verified, the last one used first; ``watch`` tells the witness
        which operators run.
        """
        super().__init__()
        self.catalogue = catalogue
        self.witness = witness
        self.fqn = fqn
        self.watch = watch
        self.where = f"region {fqn}"
        self.paused = False
        self.problem: str | None = None
        self.steps: list[Step] = []
        self.calls: list[Call] = []
        self.forms: list[Form] = []
        """State -> form of the tensor that it was made as."""
        self.externals: dict[int, Held] = {}
        self.kept: dict[int, Held] = {}
        self.copies: dict[int, torch.Tensor] = {}
        """State -> copy of an external's content, taken before the region wrote to it."""
        self.slots: list[weakref.ref[Slot]] = []
        self.unverified: list[weakref.ref[Slot]] = []
        """Slots whose replay was never compared with what autograd saves; they hold that."""
        self._kinds = catalogue.kinds
        self._careful = watch
        self._known = known
        self._expected: tuple[Step, ...] = ()
        """Steps of the schedule that this call has followed so far."""
        self._verified: frozenset[int] = frozenset()
        """States whose replay was compared before, as long as this call follows a schedule."""
        self._cuts: set[int] = set()
        """States that were kept when others were compared: what leads to them may never have been replayed."""
        self._follow(0)
        self._current: dict[int, int] = {}
        self._pins: list[int] = []
        self._scope = scope
        self._counts = [0] * len(catalogue.plan.rules)
        self._soft: set[int] = set()
        """States to keep if backward needs them: autograd packs them, or an operator to run again reads them."""
        self._decided: dict[int, Decision] | None = {} if catalogue.plan.by_name else None
        """State -> what decided it, where a name may still decide otherwise."""
        self._several: list[tuple[int, torch.Tensor]] = []
        """States and values of the last operator with several outputs: who names one means all, as attention's
        backward needs its output and its normaliser."""
        self._packed = 0
        """How many slots there were after the last operator."""
        self._doubtful: list[tuple[Slot, Held, int, Held]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else every operator passes through a wrapper that switches dynamo off.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def close(self) -> None:
        """Let go of the addresses, and of all else: autograd holds the pack hook, and with it this, for long."""
        for pin in self._pins:
            torch.UntypedStorage._free_weak_ref(pin)
        for held in (self._pins, self._current, self._doubtful, self.steps, self.calls, self.forms):
            held.clear()
        self._several.clear()
        for held in (self.externals, self.kept, self.copies, self.slots, self.unverified):
            held.clear()

    # -- known schedules ---------------------------------------------------------------------------------------

    def _follow(self, count: int) -> None:
        """Find a schedule that starts with the first ``count`` steps; from here on, what autograd saves is held where
        there is none, until it has been compared. Code that runs for the first time may write behind torch's back.
        """
        self._expected, self._verified = (), frozenset()
        steps = tuple(self.steps[:count])
        for schedule in self._known:
            if schedule.steps[:count] == steps:
                self._expected, self._verified = schedule.steps, schedule.verified
                self._cuts |= schedule.kept
                return

    def _noted(self, step: Step) -> None:
        """Add a step."""
        at, expected = len(self.steps), self._expected
        if at < len(expected) and expected[at] == step:
            self.steps.append(expected[at])
            return
        self.steps.append(step)
        if expected:
            self._follow(at + 1)

    # -- values ------------------------------------------------------------------------------------------------

    def known(self, tensor: torch.Tensor) -> int:
        """Return the state of a tensor's storage; -1 for one that the region never saw, or that has no storage."""
        try:
            state = self.state_of(tensor)
        except NotImplementedError:
            return -1
        return -1 if state is None else state

    def state_of(self, tensor: torch.Tensor) -> int | None:
        """Return the state of a tensor's storage; None for one that the region never saw."""
        return self._current.get(tensor.untyped_storage()._cdata)

    def _new_state(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
        state = len(self.forms)
        form = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        self._pins.append(storage._weak_ref())  # pyright: ignore[reportArgumentType]
        self._current[storage._cdata] = state
        self.forms.append(form)
        return state

    def _look(self, tensor: torch.Tensor, states: list[int]) -> Form | None:
        """Note the state of an argument, and return its form where it is not the one that the state was made with."""
        storage = tensor.untyped_storage()
        state = self._current.get(storage._cdata)
        if state is None:
            state = self._new_state(storage, tensor)
            self.externals[state] = Held(without_cycle(tensor), self.where)
            states.append(state)
            return None
        states.append(state)
        form = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        return None if form == self.forms[state] else form

    # -- operators ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = self._kinds.get(id(func)) or self.catalogue.add(func)
        if types or self._careful:
            return self._carefully(kind, types, args, kwargs or _NOTHING)
        if kind.free:
            return kind.call(*args, **kwargs) if kwargs else kind.call(*args)
        return self._record(kind, args, kwargs or _NOTHING)

    def _carefully(self, kind: Kind, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.paused:
            return kind.call(*args, **kwargs)
        if self.watch:
            self.witness.ran(kind.func)
        for subclass in types:
            if subclass not in _PLAIN and not issubclass(subclass, torch._subclasses.FakeTensor):
                self.give_up(f"{subclass.__name__} (a tensor subclass) goes through {kind!r}")
        if self.problem is not None:
            self._note_writes(kind, args, kwargs)
            return kind.call(*args, **kwargs)
        if kind.free:
            return kind.call(*args, **kwargs)
        return self._record(kind, args, kwargs)

    @contextmanager
    def pause(self) -> Generator[None]:
        """Let operators through unrecorded: a backward that runs inside forward replays them."""
        before = self.paused, self._careful
        self.paused = self._careful = True
        try:
            yield
        finally:
            self.paused, self._careful = before

    def give_up(self, problem: str) -> None:
        """Stop recording; what was recorded stays right."""
        self.problem = self.problem or problem
        self._careful = True

    def _note_writes(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After recording has stopped, still see which rules match, and that nothing held is overwritten."""
        if kind.ruled:
            self._count(self.catalogue.plan.decide(kind.func, self._counts, self._scope))
        if kind.writes:
            try:
                self._before_writes(kind, args, kwargs)
            except (NotImplementedError, RuntimeError):
                return

    def _record_blank(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record fresh memory by its form alone, else a mask would hang on all that led to what it is the mask of."""
        out = kind.call(*args, **kwargs)
        fresh = self.catalogue.fresh
        self._packed = len(self.slots)
        makes = self._make(fresh, out)
        self._noted((fresh, (), makes, ()))
        form = {"dtype": out.dtype, "device": out.device}
        self.calls.append(([list(out.shape), list(out.stride())], form, [], None))
        if kind.decides and makes:
            self._decide(kind, ((), {}, []), out, makes, ())
        return out

    def _record(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind.blank:
            return self._record_blank(kind, args, kwargs)
        states: list[int] = []
        reads: list[tuple[Place, Form | None]] = []
        generators, written = None, ()
        try:
            rest = list(args)
            for place, value in enumerate(args):
                if isinstance(value, torch.Tensor):
                    rest[place] = None
                    reads.append((place, self._look(value, states)))
                elif type(value) is list:
                    rest[place] = self._look_into(place, value, states, reads)
            named = self._look_at_named(kwargs, states, reads) if kwargs else kwargs
            if kind.special:
                if kind.refused:
                    raise NotImplementedError(kind.refused)
                generators = self._generators(kind, args, kwargs)
                written = self._before_writes(kind, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, LowtideError):
                raise
            self.give_up(kind.refused or f"{kind!r}: {_first_line(error)}")
            self._note_writes(kind, args, kwargs)
            return kind.call(*args, **kwargs)
        out = kind.call(*args, **kwargs)
        writes = self._after_writes(written) if written else ()
        self._packed = len(self.slots)
        makes = self._make(kind, out)
        self._noted((kind, tuple(states), makes, writes))
        self.calls.append((rest, named, reads, generators))
        if kind.decides and (makes or writes):
            self._decide(kind, (args, kwargs, states), out, makes, writes)
        return out

    def _look_into(
        self, place: Place, values: list[Any], states: list[int], reads: list[tuple[Place, Form | None]]
    ) -> list[Any]:
        rest = list(values)
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                rest[i] = None
                reads.append(((place, i), self._look(value, states)))
        return rest

    def _look_at_named(
        self, kwargs: dict[str, Any], states: list[int], reads: list[tuple[Place, Form | None]]
    ) -> dict[str, Any]:
        rest = dict(kwargs)
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                rest[name] = None
                reads.append((name, self._look(value, states)))
            elif type(value) is list:
                rest[name] = self._look_into(name, value, states, reads)
        return rest

    def _make(self, kind: Kind, out: Any) -> tuple[tuple[int, int], ...]:
        """Number the storages that an operator made."""
        try:
            if isinstance(out, torch.Tensor):
                storage = out.untyped_storage()
                return () if storage._cdata in self._current else ((0, self._new_state(storage, out)),)
            if not isinstance(out, list | tuple):
                return ()
            makes: list[tuple[int, int]] = []
            for position, value in enumerate(out):
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    if storage._cdata not in self._current:
                        makes.append((position, self._new_state(storage, value)))
            return tuple(makes)
        except (NotImplementedError, RuntimeError) as error:
            self.give_up(f"the output of {kind!r}: {_first_line(error)}")
            return ()

    def _before_writes(
        self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[torch.Tensor, int]]:
        """Find what a call writes to; copy externals first, since replay must start from what they were."""
        found: list[tuple[torch.Tensor, int]] = []
        for position, name in kind.writes:
            target = args[position] if position < len(args) else kwargs.get(name)
            for tensor in target if isinstance(target, list | tuple) else (target,):
                if not isinstance(tensor, torch.Tensor):
                    continue
                before = self.state_of(tensor)
                if before is None:
                    continue
                kept = self.kept.pop(before, None)
                if kept is not None and before in self._cuts:
                    self.kept[before] = Held(copy_of_storage(kept.tensor), self.where)
                if before in self.externals:
                    self.copies[before] = copy_of_storage(self.externals.pop(before).tensor)
                found.append((tensor, before))
        return found

    def _after_writes(self, written: Sequence[tuple[torch.Tensor, int]]) -> tuple[tuple[int, int], ...]:
        writes: dict[int, int] = {}
        self.settle()
        recent = [slot for ref in self.slots[self._packed :] if (slot := ref()) is not None]
        for tensor, before in written:
            if before not in writes:
                after = writes[before] = len(self.forms)
                self.forms.append(self.forms[before])
                self._current[tensor.untyped_storage()._cdata] = after
                for slot in recent:
                    if slot.state == before:
                        value = look(share(tensor), slot.form or self.forms[before])
                        self._doubtful.append((slot, version_only(tensor, self.where), after, Held(value, self.where)))
        return tuple(writes.items())

    def settle(self) -> None:
        """Find out what autograd saved before a write: the content after it, where the write counts no version.

        Autograd saves the noise of ``rrelu`` before the kernel fills it in; a usual write in place moves the version.
        """
        for slot, held, after, value in self._doubtful:
            if held.tensor._version == held.version:
                slot.state = after
                if slot.original is None:
                    slot.original = value
                    self.unverified.append(weakref.ref(slot))
        self._doubtful.clear()

    def _decide(
        self,
        kind: Kind,
        read: tuple[tuple[Any, ...], dict[str, Any], list[int]],
        out: Any,
        makes: Sequence[tuple[int, int]],
        writes: Sequence[tuple[int, int]],
    ) -> None:
        """Keep the outputs that a rule names, and routing results."""
        plan = self.catalogue.plan
        decision = plan.decide(kind.func, self._counts, self._scope) if kind.ruled else NOTHING
        self._count(decision)
        if self._decided is not None:
            self._decided.update((state, decision) for _, state in (*makes, *writes))
            if len(makes) > 1:
                self._several = [(state, out[position]) for position, state in makes]
        softly = decision.keep and (decision.rule is None or decision.rule in plan.broad)
        if softly:
            self._soft.update(state for _, state in (*makes, *writes))
        elif plan.wide and not decision.keep:
            self._keep_what_it_reads(read, writes)
        if kind.routing or (decision.keep and not softly):
            values = (out,) if isinstance(out, torch.Tensor) else out
            for position, state in makes:
                self.kept[state] = Held(share(values[position]), self.where)

    def _count(self, decision: Decision) -> None:
        """Tell the witness that a rule matched."""
        if decision.rule is not None and decision.call == 0:
            self.witness.matched(self.catalogue.plan.rules[decision.rule].number)

    def _keep_what_it_reads(
        self, read: tuple[tuple[Any, ...], dict[str, Any], list[int]], writes: Sequence[tuple[int, int]]
    ) -> None:
        """Keep what an operator needs that will run again; what backward does not need of it goes with forward."""
        args, kwargs, states = read
        written = {before for before, _ in writes}
        for tensor, state in zip(_tensors_in((*args, *kwargs.values())), states, strict=True):
            if state in self._soft and state not in written:
                self._keep_softly(state, tensor)

    def _keep_softly(self, state: int, tensor: torch.Tensor) -> None:
        if state not in self.kept:
            form = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
            made, value = self.forms[state], share(tensor)
            self.kept[state] = Held(value, self.where) if form == made else HeldView(value, self.where, made)

    def take_name(self, tensor: torch.Tensor, name: str) -> None:
        """Decide a value anew, by its name."""
        if self.paused:
            return
        self.witness.named(name)
        if self.problem is not None:
            named = self.catalogue.plan.decide_name(name, NOTHING, self._counts, self._scope)
            self._count(named or NOTHING)
            return
        state = self.known(tensor)
        if self._decided is None:
            return
        plan = self.catalogue.plan
        decision = plan.decide_name(name, self._decided.get(state, NOTHING), self._counts, self._scope)
        if decision is None or decision.rule is None:
            return
        if decision.call == 0:
            self.witness.matched(plan.rules[decision.rule].number)
        if state < 0 or state in self.externals:
            return
        if decision.keep:
            named = [(state, tensor)]
            for one, value in self._several if any(one == state for one, _ in self._several) else named:
                self._keep_softly(one, value)
        else:
            self._soft.discard(state)
            self.kept.pop(state, None)

    def _generators(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generators | None:
        if not kind.draws or not draws(kind.func, args, kwargs):
            return None
        plan = self.catalogue.plan
        if not plan.preserve_rng and not plan.allow_inexact:
            raise RefusedError(
                f"region {self.fqn}: {kind!r} draws random numbers and preserve_rng is off: backward would draw "
                "others, and the gradients would belong to another sample than the loss. Remove preserve_rng: false, "
                "or set allow_inexact: true"
            )
        given = kwargs.get("generator")
        return generator_states([*args, *kwargs.values()]), None if given is None else given.get_state()

    def slots_to_replay(self, *, direct: bool) -> list[Slot]:
        """List the slots that autograd still holds; with ``direct``, without those whose own tensor is held anyway."""
        self.settle()
        slots = [slot for ref in self.slots if (slot := ref()) is not None]
        if not direct or not self.kept:
            return slots
        return [slot for slot in slots if slot.original is None or slot.state not in self.kept]

    def never_verified(self, slots: Sequence[Slot]) -> list[Slot]:
        """List those whose replay was never compared with what autograd saved."""
        doubted = {id(ref()) for ref in self.unverified}
        return [slot for slot in slots if id(slot) in doubted] if doubted else []

    # -- what autograd saves -----------------------------------------------------------------------------------

    def slot_for(self, tensor: torch.Tensor, record: Any) -> Slot | None:
        """Return a slot for what autograd saves; None for what must be held as it is."""
        if self.problem is not None or not (type(tensor) is torch.Tensor or is_plain(tensor)):
            if self.problem is None:
                self.give_up(f"autograd saves a {type(tensor).__name__} of layout {tensor.layout}")
            return None
        try:
            state = self._current.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:
            self.give_up(f"autograd saves a tensor of layout {tensor.layout}")
            return None
        if state is None or state in self.externals:
            return None
        if state in self._soft:
            self._keep_softly(state, tensor)
        form = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if form == self.forms[state]:
            form = None
        verified = state in self._verified
        # Without its graph: an operator's saved result would lead back to the node that holds this slot, and a graph
        # that no backward frees would stay.
        alone = tensor if tensor.grad_fn is None else share(tensor)
        slot = Slot(record, state, form, None if verified and state not in self.kept else Held(alone, self.where))
        ref = weakref.ref(slot)
        self.slots.append(ref)
        if not verified:
            self.unverified.append(ref)
        return slot


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, in the order in which they are recorded."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) is list:
            yield from (item for item in value if isinstance(item, torch.Tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass that changes what operators do."""
    return isinstance(tensor, torch.nn.Parameter | torch._subclasses.FakeTensor)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]
