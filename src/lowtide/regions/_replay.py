"""Executor ``replay``: backward runs again only the operators that it needs, straight from forward's record.

The built-in recompute runs a region's Python code a second time, with everything that is not saved, needed or not.
Replay does not: hooks, counters and caches inside the region run once, and an operator runs again only if some
value that backward asks for depends on it (``_record`` writes down, ``_schedule`` decides, ``_rerun`` carries out).

The first time that a region meets inputs of a form, all values are replayed at the end of its forward and compared,
bit by bit, with what autograd saved. A later call follows the steps that were compared; from the first step that
differs, what autograd saves is held and compared as well. Where that fails, or the region holds something that cannot
be recorded, this call keeps what autograd saved and later calls go to ``recompute``, and the report says why.

Limit: what Python writes behind torch's back (NumPy on a tensor's memory) is seen only when a sequence of steps comes
up for the first time. Code that does so in a later call, with no other step than before, is not seen.

Autograd's own check of versions is off under hooks, so externals, kept values and the region's outputs are checked
here when they are used. What comes from outside goes through the saved-tensor hooks around the region, if there are
any: a region inside another one then holds nothing that the outer one could drop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.regions._catalogue import Catalogue
from lowtide.regions._held import Held, Passed, Slot
from lowtide.regions._plan import Plan, Scope
from lowtide.regions._record import Recorder
from lowtide.regions._rerun import HookPair, Record, same_bits
from lowtide.regions._schedule import Schedule
from lowtide.regions._tape import Witness, generator_states, restore_generators

__all__ = ["Replayer"]

_MOST_FORMS = 256
_MOST_SCHEDULES = 16
_NONE: list[Schedule] = []


def _unpack(held: Slot | Held | Passed) -> torch.Tensor:
    return held.get()


class Replayer:
    """Runs one region's forward on record; knows the schedules that came up so far."""

    def __init__(self, plan: Plan, witness: Witness, fqn: str) -> None:
        self._catalogue = Catalogue(plan)
        self._witness = witness
        self._fqn = fqn
        self._schedules: list[Schedule] = []
        self._verified: dict[Any, list[Schedule]] = {}
        """Form of inputs -> schedules that were verified with it, the last one used first."""

    def run(
        self, call: Callable[[], Any], module: nn.Module, form: Any, scope: Scope | None = None
    ) -> tuple[Any, str | None]:
        """Run forward.

        Args:
            call: runs forward.
            module: the region's module; its buffers must be as they were after a verification.
            form: the form of the inputs; what runs first with it is verified.
            scope: tells which modules run, where a rule asks for it.

        Returns:
            The outputs, and why they cannot be replayed (None where they can). Where they cannot, this call keeps
            what autograd saved.
        """
        known = self._verified.get(form, _NONE)
        recorder = Recorder(self._catalogue, self._witness, self._fqn, scope, known, watch=known is _NONE)
        record = Record(recorder)
        hooks: HookPair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]

        def pack(tensor: torch.Tensor) -> Slot | Held | Passed:
            slot = recorder.slot_for(tensor, record)
            if slot is not None:
                return slot
            return Held(tensor, recorder.where) if hooks is None else Passed(tensor, hooks)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack), recorder:
                out = call()
            schedule, problem = self._finish(recorder, record, module, out, hooks)
            if problem is None:
                self._remember(form, schedule)
        finally:
            record.forward_ended()
            recorder.close()
        return out, problem

    def _finish(
        self, recorder: Recorder, record: Record, module: nn.Module, out: Any, hooks: HookPair | None
    ) -> tuple[Schedule | None, str | None]:
        """Make the record ready for backward, and compare what was never compared."""
        problem = recorder.problem
        slots = recorder.slots_to_replay(direct=hooks is None)
        if not slots:
            return None, problem
        unverified = recorder.never_verified(slots)
        if problem is not None:
            # What was verified before the problem came up is not held any more, and need not be.
            slots = [slot for slot in slots if slot not in unverified]
            unverified = []
        schedule = record.finish(slots, self._schedules)
        record.watch(out)
        if unverified:
            problem = _verify(record, unverified, module)
            if problem is not None:
                slots = [slot for slot in slots if slot not in unverified]
        for slot in slots:
            slot.original = None
        if hooks is not None:
            record.pass_on(slots, hooks)
        return schedule, problem

    def _remember(self, form: Any, schedule: Schedule | None) -> None:
        if form not in self._verified and len(self._verified) >= _MOST_FORMS:
            self._verified.clear()
        known = self._verified.setdefault(form, [])
        if schedule is None or (known and known[0] is schedule):
            return
        if schedule in known:
            known.remove(schedule)
        known.insert(0, schedule)
        for oldest in self._schedules[_MOST_SCHEDULES:]:
            for others in self._verified.values():
                if oldest in others:
                    others.remove(oldest)
        del self._schedules[_MOST_SCHEDULES:]


def _verify(record: Record, slots: list[Slot], module: nn.Module) -> str | None:
    """Replay once, and see that nothing outside changed by it (a kernel may write what its schema does not tell)."""
    outside = list(module.buffers())
    if record.runs_foreign():
        outside += record.outside()
    before = [tensor.detach().clone() for tensor in outside]
    with _random_state_kept(slots):
        problem = record.difference(slots)
    for tensor, was in zip(outside, before, strict=True):
        if not same_bits(tensor.detach().contiguous(), was.contiguous()):
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(was)
            problem = problem or f"replay writes to a tensor from outside, of shape {tuple(tensor.shape)}"
    return problem


@contextmanager
def _random_state_kept(slots: list[Slot]) -> Generator[None]:
    """A kernel may draw numbers and not say so."""
    states = generator_states([slot.original.tensor for slot in slots[:1] if slot.original is not None])
    try:
        yield
    finally:
        restore_generators(states)
