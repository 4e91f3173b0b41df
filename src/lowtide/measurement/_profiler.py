"""What each operator of some steps cost, by operator and by the module inside of which it ran.

    torch.profiler (schedule) ─► events ─► self time, self bytes ─► rows by (operator, module, phase)
         ▲ marks: phases, modules                └─► Chrome trace; on CUDA the allocator's snapshot

Marks are ``_RecordFunctionFast``: the public ``record_function`` runs an operator, which policies that name operators
would see. An operator's module is the innermost mark around it. In backward no module runs, but autograd gives a node
the sequence number of the operator that made it, and that one ran inside a module; what a region runs again by its
module's Python code has marks of its own. What is left (replayed from a record, the optimizer) has no module.

Times are of the host, and of the device where there is one; with asynchronous devices the two do not add up. One
profiler runs per process. Checked with torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, schedule

from lowtide.run_record import OpRow

__all__ = ["StepProfiler", "phase_mark"]

_MODULE, _PHASE = "lowtide.module:", "lowtide.phase:"
_NODE = "autograd::engine::evaluate_function: "


@contextlib.contextmanager
def phase_mark(name: str) -> Generator[None]:
    """Name a part of a step for a profiler that runs around it."""
    with _RecordFunctionFast(f"{_PHASE}{name}"):
        yield


@dataclass
class _Sum:
    calls: int = 0
    time_us: float = 0.0
    allocated: int = 0


class StepProfiler:
    """Profiles some of the steps that run inside the context; call ``step`` after each, and name parts by ``phase``.

    ``wait`` steps pass, ``warmup`` steps run under the profiler and are thrown away, ``active`` steps are kept; then
    ``rows`` holds the operators, the costliest first. Calls, times and bytes are those of one step.
    """

    phase = staticmethod(phase_mark)

    def __init__(
        self,
        modules: Mapping[nn.Module, str],
        *,
        wait: int = 0,
        warmup: int = 1,
        active: int = 1,
        trace: Path | None = None,
        snapshot: Path | None = None,
    ) -> None:
        """``modules`` by the names to show; ``trace`` and ``snapshot`` (CUDA) are files to write."""
        self._modules = modules
        self._active = active
        self._first, self._last = wait + warmup, wait + warmup + active
        self._trace, self._snapshot = trace, snapshot
        self._on_cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._take,
            profile_memory=True,
            acc_events=True,
        )
        self._exits = contextlib.ExitStack()
        self._step = 0
        self.rows: tuple[OpRow, ...] = ()

    @property
    def done(self) -> bool:
        """Whether all steps that were asked for have been seen."""
        return self._step >= self._last

    def __enter__(self) -> StepProfiler:
        self._exits.enter_context(_module_marks(self._modules))
        self._exits.enter_context(self._profile)
        self._begin_snapshot()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    def step(self) -> None:
        """Say that a step is over."""
        self._step += 1
        if self._step == self._last:
            self._end_snapshot()
        self._profile.step()
        self._begin_snapshot()

    def _begin_snapshot(self) -> None:
        if self._snapshot is not None and self._on_cuda and self._step == self._first:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    def _end_snapshot(self) -> None:
        if self._snapshot is not None and self._on_cuda:
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _take(self, finished: Any) -> None:
        self.rows = _rows(list(finished.events()), steps=self._active)
        if self._trace is not None:
            finished.export_chrome_trace(str(self._trace))


@contextlib.contextmanager
def _module_marks(modules: Mapping[nn.Module, str]) -> Generator[None]:
    """Put a mark around the forward of each module, also of one that ends with an error."""
    open_marks: list[Any] = []

    def before(module: nn.Module, _args: Any) -> None:
        mark = _RecordFunctionFast(f"{_MODULE}{modules.get(module, '')}")
        mark.__enter__()
        open_marks.append(mark)

    def after(_module: nn.Module, _args: Any, _result: Any) -> None:
        if open_marks:
            open_marks.pop().__exit__(None, None, None)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Reader:
    """Finds phase and module of an event by what is around it."""

    by_sequence: dict[int, str] = field(default_factory=dict[int, str])

    def place(self, event: Any) -> tuple[str, str]:
        """Return phase and module."""
        module: str | None = None
        phase: str | None = None
        node: int | None = None
        around = event.cpu_parent
        while around is not None:
            name = str(around.name)
            if module is None and name.startswith(_MODULE):
                module = name.removeprefix(_MODULE)
            elif name.startswith(_NODE) and node is None:
                node = int(around.sequence_nr)
            elif name.startswith(_PHASE):
                phase = name.removeprefix(_PHASE)
            around = around.cpu_parent
        if module is None and node is not None:
            module = self.by_sequence.get(node)
        return ("backward" if node is not None else phase or ""), module or ""


def _rows(events: list[Any], *, steps: int) -> tuple[OpRow, ...]:
    reader = _Reader()
    operators = [event for event in events if _is_operator(event)]
    for event in operators:
        if event.sequence_nr >= 0 and not _in_backward(event):
            # The innermost operator of a number comes last, and all of them ran inside the same module.
            reader.by_sequence[int(event.sequence_nr)] = reader.place(event)[1]
    sums: dict[tuple[str, str, str], _Sum] = {}
    for event in operators:
        phase, module = reader.place(event)
        row = sums.setdefault((_operator(event), module, phase), _Sum())
        # A dispatch mode, such as a region's, hands an operator on to itself: one call, told twice.
        row.calls += not _is_handed_on(event)
        row.time_us += max(float(event.self_cpu_time_total), float(getattr(event, "self_device_time_total", 0.0)))
        row.allocated += max(0, int(event.self_cpu_memory_usage)) + max(
            0, int(getattr(event, "self_device_memory_usage", 0))
        )
    made = [
        OpRow(
            op=op,
            module=module,
            phase=phase,
            calls=total.calls // steps,
            time_ms=total.time_us / 1000 / steps,
            allocated_bytes=total.allocated // steps,
        )
        for (op, module, phase), total in sums.items()
    ]
    return tuple(sorted(made, key=lambda row: -row.time_ms))


def _is_operator(event: Any) -> bool:
    name = str(event.name)
    return "::" in name and not name.startswith((_NODE, "autograd::", "lowtide::", "profiler::")) and not event.is_async


def _is_handed_on(event: Any) -> bool:
    around = event.cpu_parent
    while around is not None and around.name == "PythonDispatchMode":
        around = around.cpu_parent
    return around is not event.cpu_parent and around is not None and around.name == event.name


def _in_backward(event: Any) -> bool:
    around = event.cpu_parent
    while around is not None:
        if str(around.name).startswith(_NODE):
            return True
        around = around.cpu_parent
    return False


def _operator(event: Any) -> str:
    return str(event.name).replace("::", ".", 1)
