"""Which rank's error began it, where no launcher of ours can tell.

    rank 1 fails ──► logs/rank1.error.json          rank 0 loses its neighbour ──► reads it ──► run.json

When one rank fails, the others only lose their connection to it, and rank 0, which writes ``run.json``, would write
just that. lowtide's own launcher corrects it from what each rank reported; under a foreign ``torchrun`` there is
nobody, and ``run.json`` is the truth. So a rank leaves its error beside its log, and rank 0 looks there when its own
error is such a consequence. A rank that was killed leaves nothing; then the lost connection is all that is known.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import InputError, LowtideError, RankError
from lowtide.system.files import read_json, write_json
from lowtide.system.run_state import Status, error_record, status_of
from lowtide.training.ranks import raised_elsewhere
from lowtide.training.verdict import tells_of_a_lost_neighbour

__all__ = ["Cause", "find_cause", "leave_error"]

_WAIT_S = 3.0
_POLL_S = 0.05

Cause = tuple[Status, int, Mapping[str, Any]]
"""Status and exit code of the run, and the error as run.json keeps it."""


def leave_error(folder: Path, error: BaseException, *, rank: int) -> None:
    """Write this rank's error beside its log, unless it began elsewhere."""
    if raised_elsewhere(error) is not None or _is_a_consequence(error):
        return
    record = {
        "at": time.time(),
        "status": status_of(error),
        "exit_code": getattr(error, "exit_code", 1),
        "error": error_record(error, rank=rank),
    }
    with contextlib.suppress(OSError):
        write_json(_file(folder, rank), record)


def find_cause(folder: Path, error: BaseException, *, world_size: int, since: float) -> Cause | None:
    """Find what another rank left since a wall-clock time, if this rank's own error is a mere consequence."""
    if world_size == 1 or not _is_a_consequence(error):
        return None
    until = time.monotonic() + _WAIT_S
    while True:
        left = [record for rank in range(1, world_size) if (record := _read(_file(folder, rank), since))]
        if left:
            first = min(left, key=lambda record: record["at"])
            return first["status"], first["exit_code"], first["error"]
        if time.monotonic() >= until:
            return None
        time.sleep(_POLL_S)


def _is_a_consequence(error: BaseException) -> bool:
    ours = isinstance(error, LowtideError) and not isinstance(error, RankError)
    return not ours and tells_of_a_lost_neighbour(str(error))


def _file(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank{rank}.error.json"


def _read(file: Path, since: float) -> dict[str, Any] | None:
    try:
        record = read_json(file)
    except InputError:
        return None
    return record if record.get("at", 0.0) >= since else None
