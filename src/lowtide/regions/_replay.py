"""Executor ``replay``: backward runs again only the operators that it needs, straight from forward's record.

The built-in recompute runs a region's Python code a second time, with everything that is not saved, needed or not.
Replay does not: hooks, counters and caches inside the region run once, and an operator runs again only if some
value that backward asks for depends on it (``_record`` writes down, ``_schedule`` decides, ``_rerun`` carries out).

The first time that a region meets inputs of a form, all values are replayed at the end of its forward and compared,
bit by bit, with what autograd saved. Where that fails, or the region holds something that cannot be recorded, this
call keeps what autograd saved and later calls go to ``recompute``, and the report says why.

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


def _unpack(held: Slot | Held | Passed) -> torch.Tensor:
    return held.get()


class Replayer:
    """Runs one region's forward on record; knows the schedules that came up so far."""

    def __init__(self, plan: Plan, witness: Witness, fqn: str) -> None:
        self._catalogue = Catalogue(plan)
        self._witness = witness
        self._fqn = fqn
        self._schedules: list[Schedule] = []

    def run(
        self, call: Callable[[], Any], module: nn.Module, scope: Scope | None = None, *, verify: bool
    ) -> tuple[Any, str | None]:
        """Run forward.

        Args:
            call: runs forward.
            module: the region's module; its buffers must be as they were after a verification.
            scope: tells which modules run, where a rule asks for it.
            verify: whether to compare a whole replay with the originals at the end of forward.

        Returns:
            The outputs, and why they cannot be replayed (None where they can). Where they cannot, this call keeps
            what autograd saved.
        """
        recorder = Recorder(self._catalogue, self._witness, self._fqn, scope, watch=verify)
        record = Record(recorder)
        hooks: HookPair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]

        def pack(tensor: torch.Tensor) -> Slot | Held | Passed:
            slot = recorder.slot_for(tensor, record, keep_original=verify)
            if slot is not None:
                return slot
            return Held(tensor, recorder.where) if hooks is None else Passed(tensor, hooks)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack), recorder:
                out = call()
            problem = recorder.problem
            slots = recorder.slots_to_replay(direct=hooks is None)
            if slots and not (verify and problem):
                record.finish(slots, self._schedules)
                record.watch(out)
                if verify:
                    problem = _verify(record, slots, module, foreign=recorder.saw_foreign)
                if not (verify and problem):
                    for slot in slots:
                        slot.original = None
                    if hooks is not None:
                        record.pass_on(slots, hooks)
        finally:
            record.forward_ended()
            recorder.close()
        return out, problem


def _verify(record: Record, slots: list[Slot], module: nn.Module, *, foreign: bool) -> str | None:
    """Replay once, and see that nothing outside changed by it (a kernel may write what its schema does not tell)."""
    outside = list(module.buffers())
    if foreign:
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
