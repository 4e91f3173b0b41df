"""What became of a run: ``run.json`` read truthfully, and written.

    running ──► done | failed | out_of_memory | stopped          written by rank 0, or by the launcher for it
       └──► lost                                                 never written: found when reading

A process that is killed cannot write its own end. So ``running`` is believed only while the process that
wrote it is alive (its id and start time, on the same machine and boot); else the run is ``lost``. On another
machine nobody can tell, and ``verified`` is False. Torch-free: launchers, sweeps and reports read this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from lowtide.errors import InputError, RunOutOfMemoryError, StoppedError
from lowtide.system.files import read_json, write_json
from lowtide.system.processes import is_alive

__all__ = [
    "RUN_FILE",
    "RunState",
    "Status",
    "error_record",
    "find_latest",
    "finish_run",
    "now_text",
    "read_run",
    "status_of",
]

RUN_FILE = "run.json"
Status = Literal["running", "done", "failed", "out_of_memory", "stopped", "lost"]
_WRITTEN = ("running", "done", "failed", "out_of_memory", "stopped")


@dataclass(frozen=True)
class RunState:
    """A run as it is now."""

    experiment_id: str
    name: str
    folder: Path
    status: Status
    verified: bool
    """False where the run says it is running and nobody here can know."""
    error_type: str | None
    error_message: str | None
    exit_code: int | None
    started_at: str
    ended_at: str | None
    record: Mapping[str, Any]
    """All of run.json."""


def read_run(folder: Path) -> RunState:
    """Read a run folder and say what is true about it now.

    Raises:
        InputError: no run.json, or a damaged one.
    """
    record = read_json(folder / RUN_FILE)
    status, told = record.get("status"), record.get("process")
    if status not in _WRITTEN:
        raise InputError(f"{folder / RUN_FILE} has the status {status!r}, legal are {', '.join(_WRITTEN)}")
    error = record.get("error") or {}
    kind, message, verified = error.get("type"), error.get("message"), True
    if status == "running":
        alive = is_alive(told) if isinstance(told, dict) else None
        verified = alive is not None
        if alive is False and told is not None:
            status, kind = "lost", "ProcessLost"
            message = f"process {told.get('pid')} on {told.get('hostname')} is gone and wrote no end of the run"
    return RunState(
        experiment_id=str(record.get("experiment_id", folder.name)),
        name=str(record.get("name", "")),
        folder=folder,
        status=status,
        verified=verified,
        error_type=kind,
        error_message=message,
        exit_code=record.get("exit_code"),
        started_at=str(record.get("started_at", "")),
        ended_at=record.get("ended_at"),
        record=record,
    )


def find_latest(runs_dir: Path, name: str) -> RunState | None:
    """Find the newest run with this name; None where there is none. Folders without a sound run.json are no runs."""
    newest: RunState | None = None
    for file in sorted(runs_dir.glob(f"*/{RUN_FILE}")):
        try:
            state = read_run(file.parent)
        except InputError:
            continue
        if state.name == name and (newest is None or state.started_at >= newest.started_at):
            newest = state
    return newest


def finish_run(folder: Path, *, status: Status, exit_code: int, error: Mapping[str, Any] | None = None) -> None:
    """Write how a run ended into its run.json, keeping everything else."""
    assert status in _WRITTEN, status
    record = read_json(folder / RUN_FILE)
    record |= {"status": status, "exit_code": exit_code, "error": dict(error) if error else None}
    record["ended_at"] = now_text()
    write_json(folder / RUN_FILE, record)


def status_of(error: BaseException | None) -> Status:
    """Return the status that an error means for the run."""
    if error is None:
        return "done"
    if isinstance(error, RunOutOfMemoryError):
        return "out_of_memory"
    return "stopped" if isinstance(error, StoppedError) else "failed"


def error_record(error: BaseException, *, rank: int) -> dict[str, Any]:
    """Return what run.json keeps of an error."""
    return {"type": type(error).__name__, "message": str(error) or repr(error), "rank": rank}


def now_text() -> str:
    """Return the present in UTC, to the microsecond."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
