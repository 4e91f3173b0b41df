"""The training loop. Variation comes from what it is given; it knows no tracker, no model and no sharding.

    batch ─► forward, backward (x grad_accumulation) ─► clip ─► optimizer ─► StepDone
                                                          every n: evaluate · checkpoint

Peak bytes are measured in one designated step, the second of this attempt: the first makes the optimizer's states.
On a CPU that step is slower, since every allocation is followed, and it is left out of tokens/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lowtide.errors import StoppedError
from lowtide.measurement import Peak, measure_peak
from lowtide.training.build import Built
from lowtide.training.checkpoint import Progress, save
from lowtide.training.events import Bus, CheckpointSaved, EvaluationDone, StepDone
from lowtide.training.mesh import during
from lowtide.training.model.forward import forward_logits
from lowtide.training.optim import clip_gradients, set_learning_rate
from lowtide.training.parallelize import gradient_sync
from lowtide.training.stopping import StopRequest

__all__ = ["Outcome", "Profiler", "Trainer", "Unprofiled", "next_token_loss"]

_MEASURED_STEP = 2
_UNTIMED_STEPS = 2


@dataclass
class Outcome:
    """What the loop learned."""

    steps: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    loss_held_out: float | None = None
    tokens_per_s: float | None = None
    peak: Peak | None = None
    peak_step: int | None = None
    timed_ms: list[float] = field(default_factory=list[float])


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [B, T, V] against targets [B, T], computed in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Profiler(Protocol):
    """Who is told where a step is, between entering and leaving."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...

    @property
    def phase(self) -> Callable[[str], AbstractContextManager[Any]]:
        """What is around one phase of a step: data, forward, backward or optimizer."""
        ...

    def step(self) -> None:
        """A step is over."""
        ...


class Unprofiled(nullcontext[None]):
    """Nobody is told."""

    @property
    def phase(self) -> Callable[[str], AbstractContextManager[Any]]:
        """Nothing."""
        return nullcontext

    def step(self) -> None:
        """Nothing."""


class Trainer:
    """Trains from a step to the last one."""

    def __init__(
        self, built: Built, bus: Bus, checkpoints: Path, *, progress: Progress, saved: bool, stop: StopRequest
    ) -> None:
        """``saved``: whether ``progress`` is that of a checkpoint there."""
        self._built = built
        self._config = built.config
        self._bus = bus
        self._checkpoints = checkpoints
        self._progress = progress
        self._stop = stop
        self._saved_step = progress.step if saved else None
        self.profiler: Profiler = Unprofiled()
        """Told of every phase and step."""
        self.outcome = Outcome(steps=progress.step)

    @property
    def _device(self) -> torch.device:
        return self._built.world.device

    def train(self) -> Outcome:
        """Train, evaluate and save.

        Raises:
            StoppedError: a signal came; the run has saved.
            NothingMatchedError: a rule of the policy matched no operator, on any rank.
        """
        steps, start = self._config.training.steps, self._progress.step
        batches = self._built.data.batches(self._progress.samples // self._built.samples_per_batch)
        self._built.model.train()
        self._stop_if_asked()
        with self.profiler:
            self._steps(start, steps, batches)
        self._evaluate(steps)
        self._save()
        return self.outcome

    def _steps(self, start: int, steps: int, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        accumulation = self._config.training.grad_accumulation
        for step in range(start + 1, steps + 1):
            with during(f"step {step}"):
                self._train_step(step, step - start, batches)
            self.profiler.step()
            tokens = self._progress.tokens + self._built.tokens_per_batch * accumulation
            samples = self._progress.samples + self._built.samples_per_batch * accumulation
            self._progress = Progress(step, tokens, samples)
            self.outcome.steps = step
            if step < steps and _due(step, self._config.evaluation.every):
                self._evaluate(step)
            if _due(step, self._config.checkpoint.every):
                self._save()
            self._stop_if_asked()

    def _train_step(self, step: int, nth: int, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Carry out one optimizer step, the nth of this attempt, and tell of it."""
        clock = _Clock(self._device)
        results: list[tuple[Tensor, Tensor]] = []

        def act() -> None:
            results.append(self.optimize(step, batches))

        if nth == _MEASURED_STEP:
            self._measure(step, act)
        else:
            act()
        step_ms = clock.stop_ms()
        loss, norm = results[0]
        if nth > _UNTIMED_STEPS:
            self.outcome.timed_ms.append(step_ms)
        is_last = step == self._config.training.steps
        if nth == 1 or is_last or _due(step, self._config.logging.every):
            self._tell(step, self._mean_over_ranks(loss), norm, step_ms)

    def optimize(self, step: int, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Run forward and backward for each micro-batch, then the optimizer; return loss and gradient norm."""
        built, accumulation = self._built, self._config.training.grad_accumulation
        total = torch.zeros((), device=self._device)
        phase = self.profiler.phase
        for micro in range(accumulation):
            with phase("data"):
                inputs, targets = (t.to(self._device, non_blocking=True) for t in next(batches))
            with gradient_sync(built.model, enabled=micro == accumulation - 1):
                with phase("forward"):
                    loss = next_token_loss(forward_logits(built.model, inputs), targets) / accumulation
                    built.parallelized.applied.check()
                with phase("backward"):
                    loss.backward()
            total += loss.detach()
        with phase("optimizer"):
            norm = clip_gradients(built.model, max_norm=self._config.training.max_grad_norm)
            factor = self._config.schedule.factor(step - 1, steps=self._config.training.steps)
            set_learning_rate(built.optimizer, self._peak_rate() * factor)
            built.optimizer.step()
            built.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _peak_rate(self) -> float:
        return float(getattr(self._config.optimizer, "lr", 1.0))

    def _measure(self, step: int, act: Callable[[], None]) -> None:
        static = (self._built.model, self._built.optimizer)
        self.outcome.peak = measure_peak(act, static=static, device=self._device, compiled=self._config.compile)
        self.outcome.peak_step = step

    def _tell(self, step: int, loss: float, norm: Tensor, step_ms: float) -> None:
        outcome, config = self.outcome, self._config
        outcome.loss_first = loss if outcome.loss_first is None else outcome.loss_first
        outcome.loss_last = loss
        outcome.tokens_per_s = self._tokens_per_s()
        median_ms = _median(outcome.timed_ms)
        self._bus.publish(
            StepDone(
                step=step,
                loss=loss,
                tokens_per_s=outcome.tokens_per_s,
                learning_rate=self._built.optimizer.param_groups[0]["lr"],
                grad_norm=norm,
                peak_bytes=None if outcome.peak is None else outcome.peak.bytes,
                step_ms=step_ms,
                eta_s=None if median_ms is None else (config.training.steps - step) * median_ms / 1000,
            )
        )

    def _tokens_per_s(self) -> float | None:
        """Tokens of all ranks for each second of a median step."""
        median_ms = _median(self.outcome.timed_ms)
        if not median_ms:
            return None
        return self._built.tokens_per_batch * self._config.training.grad_accumulation / median_ms * 1000

    def _mean_over_ranks(self, value: Tensor) -> float:
        mean = value.detach().float().clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return float(mean)

    @torch.no_grad()
    def _evaluate(self, step: int) -> None:
        model, total, count = self._built.model, torch.zeros((), device=self._device), 0
        model.eval()
        with during(f"the evaluation after step {step}"):
            for inputs, targets in self._built.data.evaluation_batches():
                if count == self._config.evaluation.batches:
                    break
                logits = forward_logits(model, inputs.to(self._device))
                total += next_token_loss(logits, targets.to(self._device))
                count += 1
        model.train()
        loss = self._mean_over_ranks(total / max(1, count))
        self.outcome.loss_held_out = loss
        tokens = count * self._built.tokens_per_batch
        self._bus.publish(EvaluationDone(step=step, loss=loss, batches=count, tokens=tokens))

    def _save(self) -> None:
        if self._saved_step == self._progress.step:
            return
        started = time.monotonic()
        info = save(
            self._checkpoints,
            model=self._built.model,
            optimizer=self._built.optimizer,
            progress=self._progress,
            keep_last=self._config.checkpoint.keep_last,
            notes={"policy": self._config.policy.kind},
        )
        self._saved_step = self._progress.step
        save_ms = (time.monotonic() - started) * 1000
        self._bus.publish(CheckpointSaved(step=self._progress.step, path=str(info.path), save_ms=save_ms))

    def _stop_if_asked(self) -> None:
        signal_name = self._stop.agreed()
        if signal_name is None:
            return
        if self._progress.step == 0:
            raise StoppedError(f"stopped by {signal_name} before the first step; go on with --resume auto")
        self._save()
        raise StoppedError(
            f"stopped by {signal_name} after step {self._progress.step}, saved; go on with --resume auto"
        )


class _Clock:
    """Milliseconds of a step: CUDA events on a GPU, the monotonic clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = time.monotonic()
        if self._cuda:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()

    def stop_ms(self) -> float:
        """Return the time since the clock was made."""
        if not self._cuda:
            return (time.monotonic() - self._start) * 1000
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return self._begin.elapsed_time(end)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _median(values: list[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None
