"""A run folder as a ``RunRecord``: what run.json says, with the config and the versions beside it.

The folder is the truth and the record is read from it, so the two cannot differ. A run whose process is gone and
which never wrote its end is an error here, and one that says "done" without its numbers is too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lowtide.errors import InputError
from lowtide.run_record import OpRow, PeakOfRank, RunRecord, RunResult, RunStatus, SavedBytesOf
from lowtide.system.files import read_json
from lowtide.system.run_state import RunState, read_run

__all__ = ["RECORD_FILE", "describe_run", "outcome_of", "result_of"]

RECORD_FILE = "record.json"
PROFILE_FILE = "profile.json"
_MOST_OPERATORS = 50
_STATUSES: dict[str, RunStatus] = {
    "done": "ok",
    "failed": "error",
    "lost": "error",
    "out_of_memory": "out_of_memory",
    "stopped": "stopped",
    "running": "running",
}


def describe_run(folder: Path) -> RunRecord:
    """Read the record of a run that is no cell of a sweep.

    Raises:
        InputError: the folder has no run.json, or a damaged one.
    """
    state = read_run(folder)
    status, reason, result = outcome_of(state)
    error = state.record.get("error") or {}
    return RunRecord(
        id=state.experiment_id,
        label=state.name or state.experiment_id,
        status=status,
        reason=reason,
        error_type=None if status == "ok" else state.error_type,
        error_rank=error.get("rank"),
        started_at=state.started_at or None,
        ended_at=state.ended_at,
        result=result,
        **facts_of(folder, state),
    )


def facts_of(folder: Path, state: RunState) -> dict[str, Any]:
    """Return the fields of a record that say what ran, and on what."""
    config: Any = None
    with contextlib.suppress(OSError, yaml.YAMLError, UnicodeDecodeError):
        config = yaml.safe_load((folder / "config.resolved.yaml").read_text(encoding="utf-8"))
    environment: dict[str, Any] = {}
    with contextlib.suppress(InputError):
        environment = read_json(folder / "environment.json")
    torch = environment.get("torch") or {}
    devices = torch.get("devices") or []
    packages = environment.get("packages") or {}
    versions = {
        "torch": torch.get("version") or packages.get("torch"),
        "python": environment.get("python"),
        "lowtide": packages.get("lowtide"),
    }
    return {
        "config": config if isinstance(config, dict) else {},
        "world_size": state.record.get("world_size"),
        "device": devices[0].get("name") if devices else None,
        "versions": {name: str(version) for name, version in versions.items() if version},
        "operators": _operators(folder),
    }


def outcome_of(state: RunState) -> tuple[RunStatus, str | None, RunResult | None]:
    """Return status, reason and numbers of a run; a reason exactly where it is not ok."""
    status = _STATUSES[state.status]
    if status == "ok":
        result = result_of(state.record.get("summary"))
        if result is None:
            return "error", "run.json says that the run is done, and holds no summary of it", None
        return "ok", None, result
    if status == "running":
        return status, "it had not ended when it was looked at", None
    said = state.error_message or f"run.json has the status {state.status} and no error"
    named = state.error_type not in (None, "RunOutOfMemoryError", "StoppedError") and status == "error"
    return status, f"{state.error_type}: {said}" if named else said, None


def result_of(summary: Any) -> RunResult | None:
    """Return the numbers of a run's summary; None where it is none."""
    if not isinstance(summary, Mapping) or not isinstance(summary.get("steps"), int):
        return None
    names = ("loss_first", "loss_last", "loss_held_out", "tokens_per_s", "model_flops_per_s", "mfu", "hfu", "wall_s")
    numbers = {name: _number(summary.get(name)) for name in names}
    return RunResult(
        steps=summary["steps"],
        policy=str(summary.get("applied", "")),
        peaks=tuple(
            PeakOfRank(rank=p["rank"], peak_bytes=p["peak_bytes"], method=p["method"], note=p["note"])
            for p in summary.get("peaks") or ()
        ),
        saved=tuple(
            SavedBytesOf(policy=s["policy"], checkpointed=s["checkpointed"], total_bytes=s["total_bytes"])
            for s in summary.get("saved") or ()
        ),
        **numbers,
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _operators(folder: Path) -> tuple[OpRow, ...]:
    try:
        rows = read_json(folder / PROFILE_FILE).get("operators", [])[:_MOST_OPERATORS]
        names = OpRow.model_fields
        return tuple(OpRow(**{name: row[name] for name in names}) for row in rows)
    except (InputError, KeyError, TypeError, ValueError):
        return ()
