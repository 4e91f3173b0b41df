"""Where the time and the memory of a step go: phases, ranks, operators, modules.

    config ─► build ─► warm up ─► timed steps (phases) ─► one for the peaks ─► one for FLOPs ─► some under the profiler

Every rank calls ``profile_config``. Each question has steps of its own, because each way of looking slows a step down
or moves its memory: times come from steps that nobody else watches.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.measurement import PeakMeter, StepProfiler, mark_phase
from lowtide.prediction import find_device, match_device, peak_flops, read_profile
from lowtide.regions import bare_fqn
from lowtide.system.files import write_json
from lowtide.training.build import Built, build
from lowtide.training.checkpoint import Progress
from lowtide.training.config import TrainConfig
from lowtide.training.data.kinds import RandomConfig
from lowtide.training.events import Bus
from lowtide.training.loop import Trainer, next_token_loss
from lowtide.training.mesh import World
from lowtide.training.model.forward import forward_logits
from lowtide.training.stopping import StopRequest

__all__ = ["PHASES", "PROFILE_FILE", "ProfileOptions", "profile_config", "profiler_of", "write_operators"]

PROFILE_FILE = "profile.json"
PHASES = ("data", "forward", "backward", "optimizer")
Step = Callable[[], object]


@dataclass(frozen=True)
class ProfileOptions:
    """What is asked."""

    phase: Literal["forward", "step"] = "step"
    warmup: int = 2
    repeats: int = 5
    active: int = 1
    random_data: bool = True
    device_profile: Path | None = None
    out: Path = Path("profile")
    trace: bool = True


def profile_config(config: TrainConfig, world: World, options: ProfileOptions) -> dict[str, Any]:
    """Profile steps of a config on this rank; return what rank 0 writes into ``profile.json``.

    Raises:
        UserError: config, data, model or policy do not fit.
    """
    built = build(_with_random_data(config) if options.random_data else config, world)
    steps = _Steps(built, options.phase)
    for _ in range(options.warmup):
        steps.run()
    times = _Times(world.device)
    steps.trainer.profiler = times
    for _ in range(options.repeats):
        steps.run()
        times.step()
    steps.trainer.profiler = phases = _PhasePeaks(world.device)
    mine = {"rank": world.rank, "ms": times.medians(), **phases.measure(steps, built)}
    hardware_flops, flops_note = _count_flops(steps, built)
    everyone = _gather({**mine, "hardware_flops": hardware_flops})
    rows = _operators(steps, built, options)
    return {
        "kind": "StepProfile",
        "schema_version": 1,
        "phase": options.phase,
        "world_size": world.world_size,
        "device": _device_name(world.device),
        "policy": str(built.parallelized.applied),
        "warmup": options.warmup,
        "repeats": options.repeats,
        "data": "random" if isinstance(built.config.data, RandomConfig) else "config",
        "ranks": everyone,
        **_rates(built, options, everyone),
        "notes": [note for note in (flops_note, *dict.fromkeys(str(r["peak_note"]) for r in everyone)) if note],
        "operators": rows,
    }


def profiler_of(config: TrainConfig, built: Built, folder: Path, *, rank: int) -> StepProfiler | None:
    """Return the profiler that the config asks for; its files go beside the rank's log."""
    asked = config.profile
    if asked is None:
        return None
    logs = folder / "logs"
    return StepProfiler(
        _names(built),
        wait=asked.wait,
        warmup=asked.warmup,
        active=asked.active,
        trace=logs / f"rank{rank}.trace.json" if asked.trace else None,
        snapshot=logs / f"rank{rank}.snapshot.pickle" if asked.trace else None,
    )


def write_operators(profiler: StepProfiler, folder: Path) -> None:
    """Write what a run's profiler found; nothing where the run ended before its steps came."""
    if profiler.rows:
        rows = [row.model_dump() for row in profiler.rows]
        write_json(folder / PROFILE_FILE, {"kind": "Operators", "schema_version": 1, "operators": rows})


class _Steps:
    """Steps of the trainer, or of its forward alone."""

    def __init__(self, built: Built, phase: str) -> None:
        self._built = built
        self._forward_only = phase == "forward"
        built.model.train()
        self.trainer = Trainer(built, Bus(), Path(), progress=Progress(0, 0, 0), saved=True, stop=StopRequest())
        self._batches: Iterator[tuple[Tensor, Tensor]] = built.data.batches()
        self._count = 0

    def run(self) -> None:
        self._count += 1
        if self._forward_only:
            self._forward()
        else:
            # A long run has more steps than are profiled, and the schedule knows no step after the last.
            self.trainer.optimize(min(self._count, self._built.config.training.steps), self._batches)

    def _forward(self) -> None:
        phase, device = self.trainer.profiler.phase, self._built.world.device
        with phase("data"):
            inputs, targets = (t.to(device) for t in next(self._batches))
        with phase("forward"):
            next_token_loss(forward_logits(self._built.model, inputs), targets)
            self._built.parallelized.applied.check()


@dataclass
class _Times:
    """Times phases, by the host's clock on a CPU and by the device's on CUDA."""

    device: torch.device
    steps: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    _marks: list[tuple[str, Any, Any]] = field(default_factory=list[tuple[str, Any, Any]])

    def __enter__(self) -> _Times:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @contextlib.contextmanager
    def phase(self, name: str, /) -> Generator[None]:
        begin = self._now()
        yield
        self._marks.append((name, begin, self._now()))

    def step(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        took: dict[str, float] = dict.fromkeys([*PHASES, "step"], 0.0)
        for name, begin, end in self._marks:
            took[name] += begin.elapsed_time(end) if self.device.type == "cuda" else (end - begin) * 1000
        first, last = self._marks[0][1], self._marks[-1][2]
        took["step"] = first.elapsed_time(last) if self.device.type == "cuda" else (last - first) * 1000
        self.steps.append(took)
        self._marks.clear()

    def medians(self) -> dict[str, float]:
        """Return the median of each phase, and of the whole step, in milliseconds."""
        return {name: statistics.median(step[name] for step in self.steps) for name in (*PHASES, "step")}

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _PhasePeaks:
    """The peak of each phase of one step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: dict[str, int] = {}
        self._watching = False

    def __enter__(self) -> _PhasePeaks:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def step(self) -> None:
        """Nothing."""

    @contextlib.contextmanager
    def phase(self, name: str, /) -> Generator[None]:
        if self._watching and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._watching:
            mark_phase(PHASES.index(name))
        yield
        if self._watching and self._device.type == "cuda":
            self._cuda[name] = max(self._cuda.get(name, 0), torch.cuda.max_memory_allocated(self._device))

    def measure(self, steps: _Steps, built: Built) -> dict[str, Any]:
        """Run one step and return its peaks in bytes."""
        static = (built.model, built.optimizer)
        self._watching = True
        with PeakMeter(static=static, device=self._device, compiled=built.config.compile) as meter:
            steps.run()
        self._watching = False
        by_phase = self._cuda or {PHASES[number]: nbytes for number, nbytes in meter.phase_peaks.items()}
        peak = max(self._cuda.values()) if self._cuda else meter.peak.bytes
        note = meter.peak.note
        if not self._cuda and built.world.world_size > 1:
            note = f"{note}; " if note else ""
            note += "with several processes on a CPU the peaks of phases are upper bounds"
        by_phase = {name: by_phase[name] for name in PHASES if name in by_phase}
        return {"peak_bytes": peak, "peak_method": meter.peak.method, "peak_note": note, "phase_peak_bytes": by_phase}


def _with_random_data(config: TrainConfig) -> TrainConfig:
    """Return the config with random batches of the same shape; data without a known shape stays."""
    data = config.data
    size, length = getattr(data, "batch_size", None), getattr(data, "sequence_length", None)
    vocabulary = getattr(config.model, "vocab_size", None)
    if isinstance(data, RandomConfig) or not isinstance(size, int) or not isinstance(length, int):
        return config
    if not isinstance(vocabulary, int):
        return config
    return config.model_copy(
        update={"data": RandomConfig(batch_size=size, sequence_length=length, vocab_size=vocabulary)}
    )


def _count_flops(steps: _Steps, built: Built) -> tuple[int | None, str]:
    """Count the FLOPs of one step on this rank, recompute too; None, and why, where they cannot be counted."""
    if built.config.compile:
        return None, "HFU is not known: FLOPs inside compiled code are not counted"
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        steps.run()
    return int(counter.get_total_flops()), ""


def _operators(steps: _Steps, built: Built, options: ProfileOptions) -> list[dict[str, Any]]:
    rank = built.world.rank
    profiler = StepProfiler(
        _names(built),
        warmup=1,
        active=options.active,
        trace=options.out / f"trace-rank{rank}.json" if options.trace else None,
        snapshot=options.out / f"snapshot-rank{rank}.pickle" if options.trace else None,
    )
    steps.trainer.profiler = profiler
    with profiler:
        while not profiler.done:
            steps.run()
            profiler.step()
    return [row.model_dump() for row in profiler.rows]


def _names(built: Built) -> dict[Any, str]:
    return {module: bare_fqn(name) for name, module in built.model.named_modules()}


def _rates(built: Built, options: ProfileOptions, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Return speeds and shares of what the devices could do, from the slowest rank's median step."""
    step_s = max(rank["ms"]["step"] for rank in everyone) / 1000
    accumulation = built.config.training.grad_accumulation if options.phase == "step" else 1
    tokens = built.tokens_per_batch * accumulation
    # Forward is a third of forward and backward in the count of model FLOPs.
    model_flops = tokens * built.flops_per_token * (1 if options.phase == "step" else 1 / 3)
    counted = [rank["hardware_flops"] for rank in everyone]
    hardware_flops = sum(counted) if all(count is not None for count in counted) else None
    possible = _possible_flops(built, options)
    return {
        "tokens_per_s": tokens / step_s,
        "model_flops": model_flops,
        "hardware_flops": hardware_flops,
        "possible_flops_per_s": possible,
        "mfu": None if possible is None else model_flops / step_s / possible,
        "hfu": None if possible is None or hardware_flops is None else hardware_flops / step_s / possible,
    }


def _possible_flops(built: Built, options: ProfileOptions) -> float | None:
    """Return what all devices together could do in a second; None where nobody knows."""
    world, dtype = built.world, built.config.precision.compute
    if options.device_profile is not None:
        profile = read_profile(options.device_profile)
        return world.world_size * peak_flops(profile, dtype, threads=torch.get_num_threads())
    if world.device.type != "cuda":
        return None
    known = match_device(torch.cuda.get_device_name(world.device))
    return None if known is None else world.world_size * peak_flops(find_device(known), dtype)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads a process"


def _gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
    told: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, json.loads(json.dumps(mine)))
    return told
