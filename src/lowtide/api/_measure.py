"""``measure``: one training step, timed and its true peak found.

    step() x warm_up ─► step() x repeats, timed ─► step() once more, every allocation followed ─► Measurement

Times and bytes come from different runs of the step, since following allocations on a CPU is slow. Passes are told
apart without touching the step: backward is what autograd's engine runs (``torch.autograd._engine_run_backward``, which
every backward of torch 2.11 to 2.15 calls), the optimizer is ``Optimizer.step`` (torch's global hooks).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide.errors import UserError
from lowtide.measurement import PeakMeter, mark_phase, places_in
from lowtide.measurement._versions import environment
from lowtide.records import Measurement, PhaseBytes

__all__ = ["measure"]

_PASSES = ("forward", "backward", "optimizer")


def measure(
    step: Callable[[], object],
    *,
    static: Any = (),
    warm_up: int = 2,
    repeats: int = 5,
    device: str | torch.device | None = None,
    compiled: bool = False,
) -> Measurement:
    """Measure a training step: true peak, peak of each pass, and the time of each.

    Every rank of a run calls it with its own step; the largest figures over the ranks come back to all.

    Args:
        step: runs forward, backward and optimizer once. It is called ``warm_up + repeats + 1`` times.
        static: what is alive before a step: model, optimizer, batch. On a CPU only what is given here, and what
            the step makes, can be counted.
        warm_up: steps before any counts; at least one, since the first makes the optimizer's states.
        repeats: steps that are timed.
        device: where it computes; left out, a GPU where there is one.
        compiled: whether code under ``torch.compile`` runs in it.

    Raises:
        UserError: fewer than one warm-up or repeat.
    """
    if warm_up < 1 or repeats < 1:
        raise UserError(f"measure needs at least one warm-up and one repeat, not {warm_up} and {repeats}")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for _ in range(warm_up):
        step()
    times = [_timed(step, where) for _ in range(repeats)]
    gc.collect()
    start_bytes = _start_bytes(static, where)
    phases = _Phases(where)
    meter = PeakMeter(static=static, device=where, compiled=compiled)
    with meter, phases.watching():
        step()
    peaks = phases.peaks(meter.phase_peaks)
    mine = {
        "peak": peaks.get("step", meter.peak.bytes),
        "start": start_bytes,
        "method": meter.peak.method,
        "note": meter.peak.note,
        "phases": peaks,
        "times": {name: statistics.median(t[name] for t in times) for name in (*_PASSES, "step")},
    }
    return _record(_told(mine), tuple(t["step"] for t in times), warm_up=warm_up, device=str(where))


def _record(told: list[dict[str, Any]], times_ms: tuple[float, ...], *, warm_up: int, device: str) -> Measurement:
    """Take the largest of what every rank told."""
    chosen = next((one for one in told if one["peak"] is None), None) or max(told, key=lambda one: one["peak"])
    ms = {name: max(one["times"][name] for one in told) for name in (*_PASSES, "step")}
    peaks = {name: max((o["phases"][name] for o in told if name in o["phases"]), default=None) for name in _PASSES}
    return Measurement(
        peak_bytes=chosen["peak"],
        start_bytes=chosen["start"],
        phase_peaks=PhaseBytes(**peaks),
        method=chosen["method"],
        note=chosen["note"],
        step_ms=ms["step"],
        forward_ms=ms["forward"],
        backward_ms=ms["backward"],
        optimizer_ms=ms["optimizer"],
        other_ms=max(0.0, ms["step"] - sum(ms[name] for name in _PASSES)),
        step_times_ms=times_ms,
        warm_up=warm_up,
        repeats=len(times_ms),
        device=device,
        world_size=len(told),
        environment=environment(),
    )


def _start_bytes(static: Any, device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum(storage.nbytes() for storage, place in places_in(static) if place.type == "cpu")


def _told(mine: dict[str, Any]) -> list[dict[str, Any]]:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [mine]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def _timed(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Run one step; return the milliseconds of each pass and of the whole."""
    phases = _Phases(device)
    with phases.watching():
        step()
    return phases.times()


class _Phases:
    """Follows which pass runs; notes its times and, on a GPU, its peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._names: list[str] = []
        """Of each stretch of the step; what follows a backward is another forward once another backward comes."""
        self._moments: list[Any] = []
        self._cuda_peaks: dict[int, int] = {}

    def enter(self, name: str) -> None:
        """A stretch begins; the one before has ended."""
        self._look()
        if not self._cuda:
            mark_phase(len(self._names))
        self._names.append(name)
        self._moments.append(self.now())

    def end(self) -> None:
        """The step has ended."""
        self._look()
        self._moments.append(self.now())

    def _look(self) -> None:
        if self._cuda:
            # Else a high forward would hide how high backward goes.
            self._cuda_peaks[len(self._names) - 1] = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def now(self) -> Any:
        """Return this moment, on the device's own clock."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) if self._cuda else (ended - began) * 1000

    def times(self) -> dict[str, float]:
        """Return milliseconds of each pass, and of the whole step."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        found = dict.fromkeys(_PASSES, 0.0)
        for name, began, ended in zip(self._names, self._moments, self._moments[1:], strict=False):
            if name in found:
                found[name] += self._between(began, ended)
        return {**found, "step": self._between(self._moments[0], self._moments[-1])}

    def peaks(self, by_number: Mapping[int, int]) -> dict[str, int]:
        """Return the most bytes of each pass, and of the whole step under ``step`` where the device told them."""
        found: dict[str, int] = {}
        for number, nbytes in (self._cuda_peaks or by_number).items():
            name = self._names[number] if number >= 0 else "before"
            found[name] = max(found.get(name, 0), nbytes)
        if self._cuda_peaks:
            found["step"] = max(nbytes for number, nbytes in self._cuda_peaks.items() if number >= 0)
        return found

    @contextmanager
    def watching(self) -> Generator[None]:
        """Tell passes apart until the context ends."""
        original = torch.autograd._engine_run_backward  # pyright: ignore[reportAttributeAccessIssue]

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self._names[-1] == "between":
                self._names[-1] = "forward"
            self.enter("backward")
            try:
                return original(*args, **kwargs)
            finally:
                self.enter("between")

        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.enter("optimizer")

        def ends(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.enter("after")

        with ExitStack() as stack:
            torch.autograd._engine_run_backward = run_backward  # pyright: ignore[reportAttributeAccessIssue]
            stack.callback(setattr, torch.autograd, "_engine_run_backward", original)
            stack.callback(register_optimizer_step_pre_hook(begins).remove)
            stack.callback(register_optimizer_step_post_hook(ends).remove)
            self.enter("forward")
            yield
            self.end()
