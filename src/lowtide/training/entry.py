"""One run from its config to its summary, on every rank.

    config ─► process group ─► run folder ─► build ─► (resume) ─► loop ─► summary
                                  └── run.json: running ─► done | failed | out_of_memory | stopped

``run`` is what each rank executes, under ``torchrun`` or as a single process. Whatever happens, the process group is
destroyed and ``run.json`` says how the run ended, also where the error began on another rank (``cause``).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowtide.api import saved_bytes
from lowtide.errors import ConfigError, InputError, LowtideError
from lowtide.plan_record import Plan
from lowtide.planning import policy_of, write_plan
from lowtide.system.run_state import Status, finish_run, status_of
from lowtide.training.build import Built, build, build_bare
from lowtide.training.cause import find_cause, leave_error
from lowtide.training.checkpoint import CheckpointInfo, Progress, latest_complete, load
from lowtide.training.config import LoadedConfig, TrainConfig, load_config, to_yaml
from lowtide.training.events import Bus, RunEnded, RunStarted
from lowtide.training.forecast import Forecast, compare, forecast
from lowtide.training.ids import agree_on_id
from lowtide.training.loop import Outcome, Trainer, next_token_loss
from lowtide.training.mesh import World, during, on_main, process_group, read_place
from lowtide.training.model.forward import forward_logits
from lowtide.training.out_of_memory import explain_out_of_memory
from lowtide.training.planned import Prepared, prepare, told
from lowtide.training.profiling import profiler_of, write_operators
from lowtide.training.run_folder import RunFolder, find_latest
from lowtide.training.stopping import StopRequest, stop_on_signals
from lowtide.training.summary import ForecastRow, PeakRow, SavedRow, Summary, print_summary
from lowtide.training.tracking.build import build_bus

__all__ = ["run"]

_LOG = logging.getLogger(__name__)
_CHECKPOINTS = "checkpoints"
_PLAN = "plan.yaml"


def run(
    config: LoadedConfig[TrainConfig] | TrainConfig | str | Path,
    experiment_id: str | None = None,
    *,
    resume: str | None = None,
    json_output: bool = False,
) -> Summary:
    """Train as ``config`` says, on this rank, and return the summary.

    Every rank of the run calls this: under ``torchrun`` as it is, else the run is one process.

    Args:
        config: what ``load_config`` returned, a ``TrainConfig``, or the path of a YAML file.
        experiment_id: name of the run's folder; left out, rank 0 makes one and all ranks get it.
        resume: ``auto`` (the newest run of the same ``run.name``, or a fresh one) or the path of a run folder.
        json_output: keep stdout free; progress and summary go to stderr.

    Raises:
        UserError: config, data, model or policy do not fit; nothing was lost.
        RunOutOfMemoryError: an allocation failed.
        StoppedError: a signal came and the run has saved.
    """
    loaded = _load(config)
    started = time.time()
    prepared = prepare(loaded.config, read_place())
    expected = _expected(loaded.config, prepared)
    with (
        stop_on_signals() as stop,
        process_group(loaded.config.launch.timeout_s) as world,
        _switches(loaded.config),
    ):
        _check_processes(loaded.config, world)
        folder, note = _open_folder(loaded, experiment_id, resume)
        with folder.logging():
            attempt = _Attempt(loaded, world, folder, stop, started, prepared, expected)
            try:
                summary = attempt.go(note, json_output=json_output)
            except BaseException as error:
                cause = attempt.end(error)
                if cause is error:
                    raise
                raise cause from error
    if world.is_main:
        from rich.console import Console

        # Whoever reads may have seen enough (`| head`), which rich answers by SystemExit; the run is done and recorded.
        with contextlib.suppress(BrokenPipeError, SystemExit):
            print_summary(summary, Console(file=sys.stderr if json_output else sys.stdout))
    return summary


def _expected(config: TrainConfig, prepared: Prepared) -> Forecast | None:
    """Estimate the step on rank 0, where the config asks for it; others have none."""
    place = read_place()
    if prepared.plan is not None:
        config = config.model_copy(update={"policy": policy_of(prepared.plan)})
    return forecast(config, place) if config.estimate and place.rank == 0 and not dist.is_initialized() else None


def _load(config: LoadedConfig[TrainConfig] | TrainConfig | str | Path) -> LoadedConfig[TrainConfig]:
    if isinstance(config, str | Path):
        return load_config(config)
    if isinstance(config, TrainConfig):
        resolved = config.model_dump(mode="json")
        return LoadedConfig(config, to_yaml(resolved), resolved, Path("config.yaml"))
    return config


@contextlib.contextmanager
def _switches(config: TrainConfig) -> Generator[None]:
    """Set torch's process-wide switches for the run, and put them back; warnings go to the log of their rank."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


def _check_processes(config: TrainConfig, world: World) -> None:
    """Refuse several processes that share nothing, however they were started."""
    if config.sharding.kind == "none" and world.world_size > 1:
        raise ConfigError(
            f"sharding.kind is none and there are {world.world_size} processes, each of which would train a model of "
            "its own: start one (--nproc 1), or set sharding.kind to fsdp2, fsdp1 or ddp"
        )


def _open_folder(
    loaded: LoadedConfig[TrainConfig], experiment_id: str | None, resume: str | None
) -> tuple[RunFolder, str]:
    """Make or reopen the run's folder; also return what to say when there was nothing to resume."""
    runs_dir, name = Path(loaded.config.run.directory), loaded.config.run.name
    note = ""
    if resume is not None:
        found = on_main(lambda: _find(runs_dir, name, resume))
        if found:
            if experiment_id is not None and experiment_id != Path(found).name:
                raise InputError(
                    f"--resume continues {found} under its own id, and the id {experiment_id!r} was given: "
                    "leave one of them out"
                )
            folder = RunFolder.resume(Path(found), given=loaded.given, resolved=loaded.resolved)
            # What the attempt before summed up is not how this one ends.
            folder.update(summary=None)
            return folder, ""
        note = f"no run named {name!r} in {runs_dir}: starting fresh"
    chosen = agree_on_id(loaded.resolved, experiment_id=experiment_id)
    folder = RunFolder.create(runs_dir, experiment_id=chosen, name=name, given=loaded.given, resolved=loaded.resolved)
    return folder, note


def _find(runs_dir: Path, name: str, resume: str) -> str:
    if resume == "auto":
        state = find_latest(runs_dir, name)
        return "" if state is None else str(state.folder)
    # Resolved, so that `.` and `runs/a/../b` have a last part, which is the run's id.
    return str(Path(resume).resolve())


@dataclass
class _Attempt:
    """One attempt at a run: fresh, or going on."""

    loaded: LoadedConfig[TrainConfig]
    world: World
    folder: RunFolder
    stop: StopRequest
    started: float
    """Wall-clock time; what other ranks left before it is of an earlier attempt."""
    prepared: Prepared = field(default_factory=Prepared)
    expected: Forecast | None = None
    """What rank 0 estimated."""
    bus: Bus = field(default_factory=Bus)
    outcome: Outcome = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        self.clock = time.monotonic()

    def go(self, note: str, *, json_output: bool) -> Summary:
        """Train from where the run is to its end, and write that it is done."""
        config = self.loaded.config
        # Rank 0's alone, and first: a tracker that cannot be meant is an error on every rank.
        on_main(lambda: self._watch(json_output=json_output))
        checkpoints = self.folder.path / _CHECKPOINTS
        policy = told(config, self.prepared)
        if isinstance(policy, Plan) and self.world.is_main:
            write_plan(policy, self.folder.path / _PLAN)
        built = build(config, self.world, policy=policy)
        found = latest_complete(checkpoints) if self.folder.resumed else None
        progress = self._resume(built, found) if found is not None else Progress(0, 0, 0)
        self._announce(built, progress, note)
        saved, saved_note = self._saved_bytes(built, policy)
        trainer = Trainer(built, self.bus, checkpoints, progress=progress, saved=found is not None, stop=self.stop)
        self.outcome = trainer.outcome
        profiler = profiler_of(config, built, self.folder.path, rank=self.world.rank)
        if profiler is not None:
            trainer.profiler = profiler
        summary = self._summary(built, trainer.train(), saved, saved_note)
        if profiler is not None and self.world.is_main:
            write_operators(profiler, self.folder.path)
        self.folder.update(summary=summary.as_json())
        self.folder.finish()
        self.bus.publish(RunEnded(status="done", steps=summary.steps, wall_s=summary.wall_s, summary=summary.as_json()))
        self.bus.close()
        return summary

    def end(self, error: BaseException) -> BaseException:
        """Write and tell how the run ended; return what to raise."""
        where = f"{self.world.device} (rank {self.world.rank} of {self.world.world_size})"
        cause = explain_out_of_memory(error, where=where) or error
        if self.world.is_main:
            status = self._write_end(cause)
            text = str(cause) or type(cause).__name__
            self.bus.publish(RunEnded(status=status, steps=self.outcome.steps, error=text))
            self.bus.close()
        else:
            leave_error(self.folder.path, cause, rank=self.world.rank)
        return cause

    def _write_end(self, cause: BaseException) -> Status:
        path, size = self.folder.path, self.world.world_size
        began = find_cause(path, cause, world_size=size, since=self.started)
        try:
            if began is None:
                self.folder.finish(cause)
                return status_of(cause)
            status, exit_code, record = began
            finish_run(path, status=status, exit_code=exit_code, error=record)
            return status
        except OSError as lost:
            # A full disk, say: the run's own error is what counts, and a launcher of ours tries once more.
            _LOG.warning("how the run ended could not be written: %s", lost)
            return status_of(cause)

    def _watch(self, *, json_output: bool) -> None:
        trackers = self.loaded.config.logging.trackers
        self.bus = build_bus(trackers, run_folder=self.folder.path, json_output=json_output)

    def _resume(self, built: Built, found: CheckpointInfo) -> Progress:
        with during("loading the checkpoint"):
            return load(found, model=built.model, optimizer=built.optimizer).progress

    def _announce(self, built: Built, progress: Progress, note: str) -> None:
        config = self.loaded.config
        self.bus.publish(
            RunStarted(
                experiment_id=self.folder.experiment_id,
                name=config.run.name,
                folder=str(self.folder.path),
                world_size=self.world.world_size,
                device=str(self.world.device),
                total_steps=config.training.steps,
                start_step=progress.step,
                policy=str(built.parallelized.applied),
                resolved=self.loaded.resolved,
            )
        )
        for text in self._news(progress, note):
            self.bus.say(text)

    def _news(self, progress: Progress, note: str) -> list[str]:
        found = [note] if note else []
        if self.folder.resumed and progress.step == 0:
            found.append(f"{self.folder.path} has no complete checkpoint: starting at step 0 in the same folder")
        if self.folder.changed:
            found.append(f"config fields changed since the last attempt: {', '.join(self.folder.changed)}")
        if self.folder.resumed and progress.step >= self.loaded.config.training.steps:
            found.append(f"step {progress.step} of {self.loaded.config.training.steps} is done already")
        return found

    def _saved_bytes(self, built: Built, policy: object) -> tuple[tuple[SavedRow, ...], str]:
        """Count what one forward saves under the policy, none and full; on rank 0, told to all."""
        config = self.loaded.config
        like = [(t.shape, t.dtype) for t in next(iter(built.data.batches()))]

        def count() -> dict[str, Any]:
            try:
                result = saved_bytes(
                    lambda: build_bare(config),
                    lambda: tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in like),
                    policies=[policy],
                    forward=lambda model, batch: next_token_loss(forward_logits(model, batch[0]), batch[1]),
                )
            except Exception as error:
                # Told beside the training, never instead of it: a custom model may know no fake tensors.
                kind = "" if isinstance(error, LowtideError) else f"{type(error).__name__}: "
                return {"rows": [], "note": f"saved bytes are not available: {kind}{error}"}
            rows = [
                {"policy": c.policy, "block": list(c.block_bytes), "rest": c.rest_bytes, "checkpointed": c.checkpointed}
                for c in result.columns
            ]
            return {"rows": rows, "note": ""}

        told = on_main(count)
        rows = tuple(SavedRow(r["policy"], tuple(r["block"]), r["rest"], r["checkpointed"]) for r in told["rows"])
        return rows, told["note"]

    def _summary(self, built: Built, outcome: Outcome, saved: tuple[SavedRow, ...], saved_note: str) -> Summary:
        applied = built.parallelized.applied
        return Summary(
            experiment_id=self.folder.experiment_id,
            folder=str(self.folder.path),
            steps=outcome.steps,
            loss_first=outcome.loss_first,
            loss_last=outcome.loss_last,
            loss_held_out=outcome.loss_held_out,
            tokens_per_s=outcome.tokens_per_s,
            model_flops_per_s=None if outcome.tokens_per_s is None else outcome.tokens_per_s * built.flops_per_token,
            applied=str(applied),
            blocks=tuple(r.fqn for r in applied.regions),
            saved=saved,
            saved_note=saved_note,
            peaks=_peaks_of_all(outcome),
            peak_step=outcome.peak_step,
            wall_s=time.monotonic() - self.clock,
            forecast=self._compare(built, outcome),
        )

    def _compare(self, built: Built, outcome: Outcome) -> ForecastRow | None:
        if self.expected is None:
            return None
        return compare(self.expected, None if outcome.peak is None else outcome.peak.bytes, built)


def _peaks_of_all(outcome: Outcome) -> tuple[PeakRow, ...]:
    """Collect the peak of every rank, on every rank."""
    peak = outcome.peak
    mine = None if peak is None else (peak.bytes, peak.method, peak.note)
    told: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
    return tuple(PeakRow(r, *entry) for r, entry in enumerate(told) if entry is not None)
