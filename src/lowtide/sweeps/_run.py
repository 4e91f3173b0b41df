"""Runs the cells of a sweep, one after another or several at once, to one record each.

    cells ─► (recorded already?) ─► (pruned?) ─► Child ─► judge_child ─► (retry?) ─► record ─► table

One thread: a child's death signal counts the death of the thread that started it, and nothing here has to wait for
anything but the clock.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from lowtide.errors import FailedError
from lowtide.run_record import AttemptRecord, Predicted, RunRecord
from lowtide.sweeps._child import Child, ChildSettings
from lowtide.sweeps._config import SweepConfig
from lowtide.sweeps._outcome import Outcome, judge_child
from lowtide.sweeps._plan import Cell, larger_than
from lowtide.sweeps._store import CELL_FILE, Store
from lowtide.system.run_state import now_text

__all__ = ["Finished", "SweepRun", "Watcher", "finished", "predict", "run_sweep"]

_POLL_S = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watcher(Protocol):
    """Who is told how a sweep goes."""

    def started(self, cell: Cell, attempt: int) -> None:
        """A cell begins."""
        ...

    def ended(self, cell: Cell, record: RunRecord) -> None:
        """A cell has its record."""
        ...


@dataclass(frozen=True)
class Finished:
    """What became of a sweep."""

    records: dict[str, RunRecord]
    """By key, in the order of the plan; a cell that is missing never ended."""

    missing: tuple[str, ...]
    """Keys of the cells without a record."""

    interrupted: str | None = None
    """The signal that ended it early."""

    @property
    def exit_code(self) -> int:
        """0 where every cell is ok, 75 where it was stopped and can be resumed, else 1."""
        if self.interrupted is not None:
            return 75
        return 0 if not self.missing and all(r.status == "ok" for r in self.records.values()) else 1


@dataclass
class _Running:
    cell: Cell
    child: Child
    place: int
    attempt: int
    folder: Path
    started_at: str
    before: list[AttemptRecord]
    first: int
    """How many attempts there were before this sweep process tried."""


@dataclass
class SweepRun:
    """Runs cells; knows which are due and which are pruned."""

    sweep: SweepConfig
    cells: Sequence[Cell]
    store: Store
    command: Sequence[str]
    watcher: Watcher | None
    predicted: Mapping[str, Predicted]
    records: dict[str, RunRecord]
    running: list[_Running] = field(default_factory=list[_Running])

    def go(self, asked: Sequence[int]) -> str | None:
        """Run what is missing; return the name of the signal that ended it early."""
        return self._run(deque(cell for cell in self.cells if self.is_due(cell)), asked)

    def go_alone(self, cell: Cell) -> None:
        """Run one cell to its record, in a process that has no other."""
        with _signals() as asked:
            try:
                self._run(deque([cell]), asked)
            finally:
                self.abandon()

    def _run(self, pending: deque[Cell], asked: Sequence[int]) -> str | None:
        free = list(range(self.sweep.at_once))
        while (pending or self.running) and not asked:
            while free and pending and not asked:
                cell = pending.popleft()
                if not self._prune(cell):
                    self._start(cell, free.pop(0), self._earlier(cell))
            for each in list(self.running):
                if self._advance(each):
                    free.append(each.place)
            if self.running:
                time.sleep(_POLL_S)
        if not asked:
            return None
        self._stop(asked)
        return signal.Signals(asked[0]).name

    def abandon(self) -> None:
        """End whatever runs; nothing of it is recorded."""
        for each in self.running:
            each.child.kill()
            self.store.abandon(each.cell)
        self.running.clear()

    def is_due(self, cell: Cell) -> bool:
        """Whether a cell has no record yet, or one that does not stay."""
        record = self.records.get(cell.key)
        if record is None:
            return True
        return record.status not in ("ok", "skipped", *self.sweep.skip)

    def _earlier(self, cell: Cell) -> list[AttemptRecord]:
        record = self.records.get(cell.key)
        return [] if record is None else list(record.attempts)

    def _prune(self, cell: Cell) -> bool:
        """Skip a cell that is larger than one that ran out of memory."""
        if not self.sweep.prune:
            return False
        for other in self.cells:
            record = self.records.get(other.key)
            if record is None or record.status != "out_of_memory":
                continue
            larger = larger_than(cell, other, self.sweep.prune_fields)
            if larger:
                reason = f"larger in {', '.join(larger)} than {other.label}, which ran out of memory"
                self._record(cell, self._describe(cell, Outcome("skipped", reason), self._earlier(cell)))
                return True
        return False

    def _start(self, cell: Cell, place: int, before: list[AttemptRecord], first: int | None = None) -> None:
        number = len(before) + 1
        folder = self.store.prepare(cell, number)
        mark, scratch = Child.new_mark()
        self.store.note_running(cell, mark, scratch)
        devices = None if self.sweep.devices is None else self.sweep.devices[place]
        settings = ChildSettings(self.sweep.timeout_s, self.sweep.grace_s, devices)
        directory = f"run.directory={json.dumps(str(folder.parent.resolve()))}"
        command = [*self.command, str(folder.parent / CELL_FILE)]
        command += ["--set", directory, "--experiment-id", folder.name, "--json"]
        if self.watcher is not None:
            self.watcher.started(cell, number)
        child = Child(command, folder, settings, mark, scratch)
        first = len(before) if first is None else first
        self.running.append(_Running(cell, child, place, number, folder, now_text(), before, first))

    def _advance(self, each: _Running) -> bool:
        """Look after one running cell; return whether its place is free."""
        ended = each.child.poll()
        if ended is None:
            return False
        self.running.remove(each)
        outcome = judge_child(ended, each.folder)
        attempt = AttemptRecord(
            status=outcome.status,
            reason=outcome.reason,
            exit_code=ended.exit_code,
            folder=each.folder.name,
            started_at=each.started_at,
            wall_s=round(time.monotonic() - each.child.started, 3),
            pids=tuple(sorted(each.child.pids)),
        )
        attempts = [*each.before, attempt]
        if self._tries_again(outcome, attempts[each.first :]):
            self._start(each.cell, each.place, attempts, each.first)
            return False
        self._record(each.cell, self._describe(each.cell, outcome, attempts))
        return True

    def _tries_again(self, outcome: Outcome, attempts: Sequence[AttemptRecord]) -> bool:
        if outcome.final or outcome.status not in ("out_of_memory", "error", "timeout"):
            return False
        ended_so = sum(1 for each in attempts if each.status == outcome.status)
        return ended_so <= self.sweep.retry.get(outcome.status, 0)

    def _describe(self, cell: Cell, outcome: Outcome, attempts: Sequence[AttemptRecord]) -> RunRecord:
        facts: dict[str, Any] = {"config": cell.config, **{k: v for k, v in outcome.facts.items() if v}}
        last = attempts[-1] if attempts and outcome.status != "skipped" else None
        return RunRecord(
            id=cell.key,
            label=cell.label,
            sweep=self.sweep.name,
            number=cell.number,
            status=outcome.status,
            reason=outcome.reason,
            error_type=outcome.error_type,
            error_rank=outcome.error_rank,
            settings=cell.settings,
            started_at=None if last is None else last.started_at,
            ended_at=None if last is None else now_text(),
            attempts=tuple(attempts),
            predicted=self.predicted.get(cell.key),
            result=outcome.result,
            **facts,
        )

    def _record(self, cell: Cell, record: RunRecord) -> None:
        self.store.write(cell, record, keep_checkpoints=self.sweep.keep_checkpoints)
        self.records[cell.key] = record
        if self.watcher is not None:
            self.watcher.ended(cell, record)

    def _stop(self, asked: Sequence[int]) -> None:
        """Let what runs save and end; a second Ctrl-C, or the end of the grace, kills it."""
        for each in self.running:
            each.child.ask()
        while self.running and asked.count(signal.SIGINT) < 2:
            for each in list(self.running):
                if each.child.poll() is not None:
                    self.running.remove(each)
                    self.store.abandon(each.cell)
            time.sleep(_POLL_S)
        self.abandon()


def run_sweep(
    sweep: SweepConfig,
    cells: Sequence[Cell],
    folder: Path,
    *,
    command: Sequence[str],
    watcher: Watcher,
    resume: bool = False,
    estimate: Callable[[Sequence[Cell], Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Finished:
    """Run a sweep's cells and return one record for each.

    Call it from the main thread, which is where signals arrive.

    Args:
        sweep: the file.
        cells: its cells, from ``plan_cells``.
        folder: where everything goes.
        command: what trains: a program that takes a config, ``--set run.directory=...``, ``--experiment-id ID`` and
            ``--json`` and writes a run folder.
        watcher: who is told.
        resume: whether to go on with a sweep that is there.
        estimate: predicts the peaks of cells, given what is known already; asked before the first cell runs.

    Raises:
        InputError: the folder is taken.
        FailedError: a record cannot be written, or a child cannot be started.
    """
    store = Store(folder)
    with _signals() as asked:
        store.open(sweep.name, cells, resume=resume)
        try:
            predicted = {} if estimate is None else predict(store, cells, estimate)
            known = store.records(cells)
            job = SweepRun(sweep, cells, store, command, watcher, predicted, known)
            try:
                interrupted = job.go(asked)
            except OSError as error:
                raise FailedError(
                    f"the sweep in {folder} cannot go on: {error}. What has a record stays; go on with --resume"
                ) from error
            finally:
                # Also when something here fails: nothing outlives the sweep.
                job.abandon()
        finally:
            store.close()
    return finished(cells, job.records, interrupted)


def finished(cells: Sequence[Cell], known: Mapping[str, RunRecord], interrupted: str | None) -> Finished:
    """Put records into the order of the plan, and say which are missing."""
    records = {cell.key: known[cell.key] for cell in cells if cell.key in known}
    missing = tuple(cell.key for cell in cells if cell.key not in records)
    return Finished(records, missing, interrupted)


def predict(
    store: Store,
    cells: Sequence[Cell],
    estimate: Callable[[Sequence[Cell], Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Predicted]:
    """Return the predicted peaks by key, and keep them in the store; what it has is not asked for again."""
    known = store.estimates()
    found = estimate(cells, known)
    if any(known.get(key) != told for key, told in found.items()):
        store.write_estimates({**known, **found})
    return {
        key: Predicted(peak_bytes=told["peak_bytes"], timeline=tuple((p, n) for p, n in told.get("timeline", ())))
        for key, told in found.items()
        if told.get("peak_bytes") is not None
    }


@contextlib.contextmanager
def _signals() -> Generator[list[int]]:
    """Collect the signals that ask for an end; put the handlers back afterwards."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
