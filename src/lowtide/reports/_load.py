"""Find the records of all runs below a folder: cells of sweeps, and runs that stand alone.

A cell's record is the file that its sweep wrote. A run outside a sweep has none: it is read from its run folder, as
it is now. The run folders inside a cell are that cell's attempts, and no runs of their own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import InputError
from lowtide.run_record import RunRecord
from lowtide.system.run_report import RECORD_FILE, describe_run
from lowtide.system.run_state import RUN_FILE

__all__ = ["Found", "find_records"]

_CELL = "cell.yaml"


@dataclass(frozen=True)
class Found:
    """What lies below a folder."""

    records: tuple[RunRecord, ...]
    folders: tuple[str, ...]
    """Where each record lies, relative to the folder."""

    unread: tuple[str, ...]
    """What looks like a run and cannot be read, each with the reason."""

    unfinished: int
    """Cells of sweeps without a record: they did not end."""


def find_records(directory: str | Path) -> Found:
    """Return every record below ``directory``, those of a sweep in the order of its cells.

    Raises:
        InputError: there is no such folder, or no run in it.
    """
    root = Path(directory)
    if not root.is_dir():
        raise InputError(f"{root} is no folder; name the one that holds runs or sweeps, such as runs/")
    found: list[tuple[str, RunRecord]] = []
    unread: list[str] = []
    unfinished = 0
    for place, folders, files in os.walk(root):
        path = Path(place)
        is_cell = RECORD_FILE in files or _CELL in files
        if not is_cell and RUN_FILE not in files:
            continue
        folders.clear()
        if is_cell and RECORD_FILE not in files:
            unfinished += 1
            continue
        try:
            record = RunRecord.from_json((path / RECORD_FILE).read_bytes()) if is_cell else describe_run(path)
            found.append((str(path.relative_to(root)), record))
        except (InputError, OSError) as error:
            unread.append(f"{path}: {error}")
    if not found and not unread:
        raise InputError(
            f"{root} holds no run that has ended" + (f", and {unfinished} that have not" if unfinished else "")
        )
    found.sort(key=lambda pair: (pair[1].sweep or "", pair[1].number or 0, pair[1].started_at or "", pair[0]))
    return Found(tuple(r for _, r in found), tuple(f for f, _ in found), tuple(sorted(unread)), unfinished)
