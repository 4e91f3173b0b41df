"""The folder of one run, written by rank 0 alone.

    runs/<experiment id>/
      config.yaml            as given             config.resolved.yaml   as it was used
      run.json               status, error, exit code, process, every attempt with the fields changed since
      environment.json       versions, commit, devices
      metrics.jsonl  evaluation.jsonl             logs/rank0.log  logs/rank1.log ...

Why one rank: ranks that all make or clean the same path race each other. ``create`` and ``resume`` act on
rank 0, every rank waits for it, and an error there is the same error everywhere. Afterwards a rank touches
its own log and nothing else. On ranks other than 0 the methods that write do nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lowtide.errors import ConfigError, InputError
from lowtide.system.files import read_json, write_json, write_text
from lowtide.system.processes import identify
from lowtide.system.run_state import (
    RUN_FILE,
    RunState,
    error_record,
    find_latest,
    finish_run,
    now_text,
    read_run,
    status_of,
)
from lowtide.training.environment import describe_environment
from lowtide.training.ids import check_experiment_id
from lowtide.training.rank_status import note_run_folder
from lowtide.training.ranks import on_main, rank, world_size

__all__ = ["RunFolder", "RunState", "find_latest", "read_run"]

GIVEN = "config.yaml"
RESOLVED = "config.resolved.yaml"
ENVIRONMENT = "environment.json"
_LOG_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True)
class RunFolder:
    """An open run folder, on one rank."""

    path: Path
    rank: int
    resumed: bool = False
    changed: tuple[str, ...] = ()
    """Dotted paths of the config's fields that differ from the attempt before."""

    @classmethod
    def create(
        cls, runs_dir: Path, *, experiment_id: str, name: str, given: str, resolved: Mapping[str, Any]
    ) -> RunFolder:
        """Make the folder of a new run. Every rank calls this; rank 0 acts.

        Raises:
            ConfigError: the id is not legal, or there is a run of that id already.
            InputError: the folder cannot be made.
        """
        path = runs_dir / check_experiment_id(experiment_id)
        size = world_size()
        on_main(lambda: _create(path, name=name, given=given, resolved=resolved, size=size))
        return cls(path, rank())

    @classmethod
    def resume(cls, path: Path, *, given: str, resolved: Mapping[str, Any]) -> RunFolder:
        """Open the folder of a run that has ended, to go on under its id. Every rank calls this; rank 0 acts.

        Raises:
            InputError: there is no run, or its process still runs.
        """
        size = world_size()
        changed = on_main(lambda: _resume(path, given=given, resolved=resolved, size=size))
        return cls(path, rank(), resumed=True, changed=tuple(changed))

    @property
    def experiment_id(self) -> str:
        """The id, which is the folder's name."""
        return self.path.name

    def update(self, **fields: Any) -> None:
        """Write more fields into run.json (rank 0 only), such as what the summary says."""
        if self.rank == 0:
            write_json(self.path / RUN_FILE, {**read_json(self.path / RUN_FILE), **fields})

    def finish(self, error: BaseException | None = None, *, exit_code: int | None = None) -> None:
        """Write how the run ended (rank 0 only); the exit code is the error's own unless given."""
        if self.rank != 0:
            return
        default = 0 if error is None else getattr(error, "exit_code", 1)
        finish_run(
            self.path,
            status=status_of(error),
            exit_code=default if exit_code is None else exit_code,
            error=None if error is None else error_record(error, rank=self.rank),
        )

    @contextlib.contextmanager
    def logging(self, *, level: int = logging.INFO) -> Generator[Path]:
        """Send this rank's log records and warnings, and an error that passes, to logs/rank<r>.log."""
        file = self.path / "logs" / f"rank{self.rank}.log"
        # Only where ranks share no file system is the folder not there yet.
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter(_LOG_FORM))
        handler.setLevel(level)
        ours, warned = logging.getLogger("lowtide"), logging.getLogger("py.warnings")
        before = ours.level
        ours.setLevel(min(level, before) if before else level)
        for logger in (ours, warned):
            logger.addHandler(handler)
        try:
            yield file
        except BaseException as error:
            ours.error("the run ends with %s", type(error).__name__, exc_info=error)
            raise
        finally:
            for logger in (ours, warned):
                logger.removeHandler(handler)
            ours.setLevel(before)
            handler.close()


def _create(path: Path, *, name: str, given: str, resolved: Mapping[str, Any], size: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        taken = path.exists() or path.is_symlink()
        if not taken:
            path.mkdir()
            (path / "logs").mkdir()
    except OSError as error:
        raise InputError(
            f"the run folder {path} cannot be made: {error.strerror}; set run.directory to a folder that this "
            f"user may write"
        ) from error
    if taken:
        raise ConfigError(
            f"{path} exists already: an experiment id names one run. Leave the id out for a new one, or go on with "
            f"that run by --resume {path}"
        )
    started = now_text()
    record = {
        "schema_version": 1,
        "experiment_id": path.name,
        "name": name,
        "started_at": started,
        "attempts": [],
    }
    _begin(path, record, given=given, resolved=resolved, size=size, changed={})


def _resume(path: Path, *, given: str, resolved: Mapping[str, Any], size: int) -> list[str]:
    state = read_run(path)
    if state.status == "running" and state.verified:
        told = state.record.get("process", {})
        raise InputError(
            f"{path} is still being written by process {told.get('pid')}: wait for it to end, or stop it first"
        )
    before = yaml.safe_load((path / RESOLVED).read_text(encoding="utf-8"))
    changed = _differences(before or {}, _plain(resolved))
    (path / "logs").mkdir(exist_ok=True)
    if changed:
        _keep_configs(path, attempt=len(state.record.get("attempts", [])))
    _begin(path, dict(state.record), given=given, resolved=resolved, size=size, changed=changed)
    return sorted(changed)


def _keep_configs(path: Path, *, attempt: int) -> None:
    """Keep what the attempt before was given: this one may turn out not to fit the checkpoint."""
    for name in (GIVEN, RESOLVED):
        stem, _, rest = name.partition(".")
        write_text(path / f"{stem}.attempt{attempt}.{rest}", (path / name).read_text(encoding="utf-8"))


def _begin(
    path: Path,
    record: dict[str, Any],
    *,
    given: str,
    resolved: Mapping[str, Any],
    size: int,
    changed: dict[str, dict[str, Any]],
) -> None:
    """Write that an attempt runs, then what it runs: run.json first, so that no folder is without an owner."""
    me = identify()
    attempt = {"started_at": now_text(), "process": me, "world_size": size, "changed": changed}
    record |= {
        "status": "running",
        "error": None,
        "exit_code": None,
        "ended_at": None,
        "process": me,
        "world_size": size,
        "attempts": [*record.get("attempts", []), attempt],
    }
    write_json(path / RUN_FILE, record)
    note_run_folder(path)
    write_text(path / GIVEN, given)
    write_text(path / RESOLVED, yaml.safe_dump(_plain(resolved), sort_keys=False, allow_unicode=True))
    write_json(path / ENVIRONMENT, describe_environment(world_size=size))


def _plain(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as JSON and YAML both hold it: tuples as lists, paths as text."""
    return json.loads(json.dumps(resolved, default=str))


def _differences(before: Any, after: Any, path: str = "") -> dict[str, dict[str, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        found: dict[str, dict[str, Any]] = {}
        for key in [*before, *(k for k in after if k not in before)]:
            inner = f"{path}.{key}" if path else str(key)
            found |= _differences(before.get(key), after.get(key), inner)
        return found
    return {} if before == after else {path: {"before": before, "after": after}}
