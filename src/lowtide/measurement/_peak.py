"""The true peak of one step. This is the one way in which lowtide measures memory; it is never RSS.

    device   processes   code       truth
    CUDA     any         any        the caching allocator's own maximum
    CPU      one         any        the allocator's events (``_events``)
    CPU      several     eager      the storage tracker (``_live``), where the events confirm it
    CPU      several     compiled   the events' peak, which is an upper bound

With several processes the events miss releases on gloo's threads, and the tracker misses what no operator shows;
``judge`` says how the two are put together, and that there is no number where they contradict each other.

What is alive before the step and not among the ``static`` things is in none of the CPU numbers. The gradients
that the step before left behind are found through their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed

from lowtide.measurement._events import AllocatorEvents, EventAccount
from lowtide.measurement._live import LiveStorages
from lowtide.units import format_bytes

Method = Literal[
    "cuda allocator", "allocator events", "storage tracker", "allocator events (upper bound)", "not available"
]

_SLACK_BYTES = 64 * 1024
_SLACK_SHARE = 0.001


@dataclass(frozen=True)
class Peak:
    """The peak bytes of one step on one process, and how they were found."""

    bytes: int | None
    """The most bytes allocated at once; None where no number can be trusted."""

    method: Method
    """What measured it."""

    note: str = ""
    """Why there is no number, or what the number leaves out; empty when there is nothing to say."""

    def __str__(self) -> str:
        text = "not available" if self.bytes is None else f"{format_bytes(self.bytes)} ({self.method})"
        return f"{text}: {self.note}" if self.note else text


class PeakMeter:
    """Measures the step that runs inside the context; ``peak`` holds the result afterwards.

    ``static`` are the things whose tensors are alive before (model, optimizer, batch). ``device`` defaults to
    CUDA where there is one; ``processes`` to the size of the default process group. ``compiled`` says that
    code under ``torch.compile`` runs in the step.
    """

    def __init__(
        self,
        *,
        static: Any = (),
        device: str | torch.device | None = None,
        processes: int | None = None,
        compiled: bool = False,
    ) -> None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(default if device is None else device)
        self._processes = _world_size() if processes is None else processes
        self._compiled = compiled
        self._static = static
        self._events: AllocatorEvents | None = None
        self._tracker: LiveStorages | None = None
        self._exits = ExitStack()
        self._peak: Peak | None = None

    @property
    def peak(self) -> Peak:
        """The result, once the context was left without an error."""
        assert self._peak is not None, "the peak is known once the step has ended"
        return self._peak

    @property
    def phase_peaks(self) -> Mapping[int, int]:
        """By number of the phase, the events' peak within it: exact with one process, else an upper bound. CPU only."""
        account = None if self._events is None else self._events.account
        return {} if account is None else account.phase_peaks

    def __enter__(self) -> PeakMeter:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        elif not torch.autograd._profiler_enabled():
            self._events = self._exits.enter_context(AllocatorEvents(self._static))
            if self._processes > 1 and not self._compiled:
                tracker = LiveStorages(self._static, device="cpu", listener=self._events)
                self._tracker = self._exits.enter_context(tracker)
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)
        if error[0] is None:
            self._peak = self._result()

    def _result(self) -> Peak:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return Peak(torch.cuda.max_memory_allocated(self._device), "cuda allocator")
        if self._events is None:
            return Peak(None, "not available", "another profiler runs in this process, and torch has room for one")
        account = self._events.account
        assert account is not None, "the events end without an error before the result is asked for"
        if self._processes == 1:
            return Peak(account.peak_bytes, "allocator events")
        if self._tracker is None:
            return Peak(
                account.peak_bytes,
                "allocator events (upper bound)",
                "compiled code over several processes: releases on the communication threads are not seen",
            )
        return judge(self._tracker.peak_bytes, account)


def judge(tracked_bytes: int, account: EventAccount) -> Peak:
    """Accept the tracker's peak where the allocator's events confirm it.

    The events give two ends: their peak with the blocks that gloo's threads released unseen, which is never
    too low, and without them. A tracker between those two, less a slack, is right. Where it is lower,
    scratch memory in kernels escaped it, and the lower end of the events, which has that, is nearer the truth.
    """
    low, high = account.certain_peak_bytes, account.peak_bytes
    slack = max(_SLACK_BYTES, int(_SLACK_SHARE * high))
    if low - slack <= tracked_bytes <= high:
        return Peak(tracked_bytes, "storage tracker")
    if tracked_bytes < low:
        note = f"{format_bytes(low - tracked_bytes)} of it are scratch memory in kernels"
        if high > low:
            note += f"; up to {format_bytes(high - low)} more while collectives ran"
        return Peak(low, "allocator events", note)
    return Peak(
        None,
        "not available",
        f"the storage tracker saw {format_bytes(tracked_bytes)}, more than the {format_bytes(high)} that the "
        "allocator handed out: some of it is not the allocator's memory",
    )


def measure_peak(
    step: Callable[[], object],
    *,
    static: Any = (),
    device: str | torch.device | None = None,
    processes: int | None = None,
    compiled: bool = False,
) -> Peak:
    """Run ``step`` once and return its peak. Choose a step after the first of the optimizer, which makes states."""
    with PeakMeter(static=static, device=device, processes=processes, compiled=compiled) as meter:
        step()
    return meter.peak


def _world_size() -> int:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size()
