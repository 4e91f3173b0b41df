"""The folder of a sweep: what was planned, and one record per cell, each whole or absent.

    <directory>/<name>/
      sweep.json                  what was planned: cells with keys and labels
      lock                        held by the one process that runs the sweep
      estimates.json              predicted peaks by key
      cells/<key>/
        cell.yaml                 the cell's config
        record.json               the RunRecord; there is none until the cell has ended
        running.json              mark and scratch folder of the child, while there is one
        attempt-1/                the run folder, as `lowtide train` writes it
        attempt-1.out  .err       what the child printed

A kill can come between any two of these writes. So the record is written last and by rename, and whatever has no record
did not happen: on resume its processes are ended by their mark, its folders removed, and the cell runs again. What a
kill leaves of a write itself (``.name.pid.tmp``) is removed too.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lowtide.errors import InputError
from lowtide.run_record import RunRecord
from lowtide.sweeps._child import SCRATCH, end_marked
from lowtide.sweeps._plan import Cell
from lowtide.system.files import lock, read_json, write_json, write_text
from lowtide.system.processes import identify, is_alive
from lowtide.system.run_report import RECORD_FILE

__all__ = ["CELL_FILE", "Store"]

CELL_FILE = "cell.yaml"
_PLAN, _ESTIMATES, _LOCK, _RUNNING = "sweep.json", "estimates.json", "lock", "running.json"


class Store:
    """The folder of one sweep, held by one process at a time."""

    def __init__(self, folder: Path, *, job: str | None = None) -> None:
        """``job`` names the job of a scheduler that runs a cell here, for those who look from elsewhere."""
        self.folder = folder
        self._job = job
        self._lock: IO[Any] | None = None

    def open(self, name: str, cells: Sequence[Cell], *, resume: bool) -> bool:
        """Take the folder and write the plan; return whether something was there before.

        Raises:
            InputError: another sweep runs there, or one is there and ``resume`` was not asked for.
        """
        before = (self.folder / _PLAN).exists()
        if before and not resume:
            raise InputError(
                f"{self.folder} holds a sweep already: go on with --resume, choose another name, or delete the folder"
            )
        try:
            (self.folder / "cells").mkdir(parents=True, exist_ok=True)
            # A kill after this open leaves an empty file, which is no lock.
            self._lock = (self.folder / _LOCK).open("ab")
        except OSError as error:
            raise InputError(f"the folder {self.folder} cannot be made: {error.strerror}") from error
        try:
            lock(self._lock, what=f"the sweep in {self.folder}")
            self._clear(cells)
        except InputError:
            self.close()
            raise
        rows = [{"number": c.number, "key": c.key, "label": c.label, "settings": c.settings} for c in cells]
        write_json(self.folder / _PLAN, {"schema_version": 1, "name": name, "cells": rows})
        return before

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def cell_folder(self, cell: Cell) -> Path:
        """Return where everything of a cell is."""
        return self.folder / "cells" / cell.key

    def records(self, cells: Sequence[Cell]) -> dict[str, RunRecord]:
        """Return the records of these cells that are there, by key."""
        found: dict[str, RunRecord] = {}
        for cell in cells:
            with contextlib.suppress(InputError, OSError):
                found[cell.key] = RunRecord.from_json((self.cell_folder(cell) / RECORD_FILE).read_bytes())
        return found

    def prepare(self, cell: Cell, attempt: int) -> Path:
        """Make room for an attempt; return its run folder, which is not there yet."""
        folder = self.cell_folder(cell)
        folder.mkdir(exist_ok=True)
        write_text(folder / CELL_FILE, cell.text)
        run = folder / f"attempt-{attempt}"
        shutil.rmtree(run, ignore_errors=True)
        return run

    def note_running(self, cell: Cell, mark: str, scratch: Path) -> None:
        """Write down how to find the child, before there is one."""
        told = {"mark": mark, "scratch": str(scratch), "job": self._job, "process": identify()}
        write_json(self.cell_folder(cell) / _RUNNING, told)

    def write(self, cell: Cell, record: RunRecord, *, keep_checkpoints: bool) -> None:
        """Write the record of a cell that has ended."""
        folder = self.cell_folder(cell)
        folder.mkdir(exist_ok=True)
        if not keep_checkpoints:
            for run in folder.glob("attempt-*"):
                shutil.rmtree(run / "checkpoints", ignore_errors=True)
        write_text(folder / RECORD_FILE, record.to_json(indent=2) + "\n")
        (folder / _RUNNING).unlink(missing_ok=True)

    def abandon(self, cell: Cell) -> None:
        """Forget an attempt that was ended with the sweep: its child is gone."""
        (self.cell_folder(cell) / _RUNNING).unlink(missing_ok=True)

    def estimates(self) -> dict[str, Any]:
        """Return what was estimated before, by key."""
        try:
            return dict(read_json(self.folder / _ESTIMATES)["cells"])
        except (InputError, KeyError, TypeError, ValueError):
            return {}

    def write_estimates(self, cells: Mapping[str, Any]) -> None:
        """Write all estimates."""
        write_json(self.folder / _ESTIMATES, {"schema_version": 1, "cells": dict(cells)})

    def _clear(self, cells: Sequence[Cell]) -> None:
        """End what a killed sweep left running, and remove what never came to a record."""
        for running in sorted(self.folder.glob(f"cells/*/{_RUNNING}")):
            left = _end_child(running)
            if left:
                raise InputError(f"processes of {running.parent} cannot be ended: {left}. End them, then resume")
            running.unlink(missing_ok=True)
        for unfinished in [*self.folder.glob(".*.tmp"), *self.folder.glob("cells/*/.*.tmp")]:
            unfinished.unlink(missing_ok=True)
        known = self.records(cells)
        for cell in cells:
            self._remove_unrecorded(self.cell_folder(cell), known.get(cell.key))

    @staticmethod
    def _remove_unrecorded(folder: Path, record: RunRecord | None) -> None:
        if not folder.is_dir():
            return
        # A damaged record is none; the cell runs again, and replaces it.
        kept = set() if record is None else {attempt.folder for attempt in record.attempts}
        for path in folder.glob("attempt-*"):
            if path.name.removesuffix(".out").removesuffix(".err") not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _end_child(running: Path) -> list[int]:
    """End what is left of the child that this file tells of; return who stays."""
    try:
        told = read_json(running)
    except InputError:
        return []
    process = told.get("process")
    if told.get("job") and isinstance(process, dict) and is_alive(process) is not False:
        raise InputError(
            f"the cell {running.parent.name} runs in {told['job']}: wait until that has ended, or cancel it. "
            f"If it is gone, delete {running}"
        )
    left = end_marked(str(told.get("mark") or "none"))
    scratch = Path(str(told.get("scratch", "")))
    # The file may come from anywhere: nothing is removed but what `Child` can have made.
    if scratch.parent == Path(tempfile.gettempdir()) and scratch.name.startswith(SCRATCH):
        shutil.rmtree(scratch, ignore_errors=True)
    return left
