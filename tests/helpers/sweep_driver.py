"""A sweep of stub cells as a process of its own, which may kill itself at its n-th moment.

A moment is a change on the disk or a new process: before each file that is opened to write, each rename, removal and
start, and once more in the middle of each write, with half of the text on the disk. ``python -m
tests.helpers.sweep_driver FOLDER CELLS [KIND:N]`` resumes what is there, logs its moments to ``FOLDER/moments``, and
dies at the n-th of a kind: ``any``, or the beginning of a logged line (``write``, ``rename``, ``start``).
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.run_record import RunRecord
from lowtide.sweeps import Cell, PlainProgress, Resolved, SweepConfig, Tally, plan_cells, run_sweep
from lowtide.training.config import config_hash, to_yaml

COMMAND = (sys.executable, "-m", "tests.helpers.cell_program", "train")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT


class Moments:
    """Counts moments, logs each, and kills this process at one of them."""

    def __init__(self, folder: Path, fatal: str | None) -> None:
        self._folder = str(folder)
        kind, _, number = (fatal or "none:0").partition(":")
        self._kind, self._left = kind, int(number)
        self._log = os.open(folder / "moments", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._fsync = os.fsync
        os.fsync = self._half
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, str) and path.startswith(self._folder) and flags & _WRITES:
                self._note(f"open {path}")
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            if str(args[0]).startswith(self._folder):
                self._note(f"{event.removeprefix('os.')} {args[0]}")
        elif event == "subprocess.Popen":
            self._note("start of a process")

    def _half(self, handle: int) -> None:
        info = os.fstat(handle)
        if stat.S_ISREG(info.st_mode):
            size = info.st_size
            if self._kind in ("any", "write") and self._left == 1:
                os.ftruncate(handle, size // 2)
            self._note("write, half of it done")
        self._fsync(handle)

    def _note(self, what: str) -> None:
        os.write(self._log, f"{what}\n".encode())
        if self._kind == "any" or what.startswith(self._kind):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def sweep_of(cells: list[dict[str, Any]], **fields: Any) -> SweepConfig:
    return SweepConfig(name="stubs", base="none", points=cells, **{"timeout_s": 60.0, "grace_s": 0.1, **fields})


def plan(sweep: SweepConfig, folder: Path) -> list[Cell]:
    """Plan cells whose config is what they set, and where to note processes."""
    pids = folder / "pids"
    pids.mkdir(exist_ok=True)

    def resolve(own: Mapping[str, Any]) -> Resolved:
        config = {"size": 1, **own, "pids": str(pids)}
        return Resolved(config, to_yaml(config), config_hash({**config, "pids": ""}))

    return plan_cells(sweep, {}, resolve)


CELLS = [
    {"do": do, "size": size}
    for size in (1, 2, 3)
    for do in ("ok", "raise", "out_of_memory", "hang", "killed", "nothing", "cannot_write", "no_numbers")
]
"""24 of them."""


def main() -> int:
    folder = Path(sys.argv[1])
    count = int(sys.argv[2])
    fatal = sys.argv[3] if len(sys.argv) > 3 else None
    # Long enough for a stub to be where it hangs, short enough to wait for three of them.
    sweep = sweep_of(CELLS[:count], timeout_s=2.0, prune_fields=["size"], at_once=2)
    cells = plan(sweep, folder)
    Moments(folder, fatal)
    tally = Tally(len(cells), {}, sweep.at_once)
    watcher = PlainProgress(tally, sys.stdout)
    done = run_sweep(sweep, cells, folder / "sweep", command=COMMAND, watcher=watcher, resume=True)
    return done.exit_code


def facts(record: RunRecord) -> dict[str, Any]:
    """Return what two runs of the same sweep must agree on: all but times and process ids."""
    told = record.model_dump()
    for name in ("started_at", "ended_at"):
        told.pop(name)
    told["config"] = {k: v for k, v in told["config"].items() if k != "pids"}
    for attempt in told["attempts"]:
        for name in ("started_at", "wall_s", "pids"):
            attempt.pop(name)
    return told


if __name__ == "__main__":
    sys.exit(main())
