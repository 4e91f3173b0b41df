"""How a sweep goes: a live table on a terminal, one plain line per cell elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from lowtide.run_record import RunRecord
from lowtide.sweeps._plan import Cell
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

__all__ = ["LiveProgress", "PlainProgress", "Tally", "line_of"]

_FAILED = ("out_of_memory", "error", "timeout", "skipped")
_ROWS = 12


def line_of(record: RunRecord, *, done: int, total: int) -> str:
    """Say in one line what became of a cell."""
    head = f"[{done}/{total}] {record.label}: {record.status.replace('_', ' ')}"
    if record.result is None:
        return f"{head}: {' '.join((record.reason or '').split())}"
    parts: list[str] = []
    if record.result.peak_bytes is not None:
        parts.append(f"peak {format_bytes(record.result.peak_bytes)}")
    if record.result.tokens_per_s is not None:
        parts.append(f"{record.result.tokens_per_s:,.0f} tokens/s")
    parts.append(f"{record.attempts[-1].wall_s:.0f} s" if record.attempts else "")
    return f"{head}  {'  '.join(filter(None, parts))}"


class Tally:
    """Counts cells and guesses when the last one ends."""

    def __init__(self, total: int, known: Mapping[str, RunRecord], at_once: int) -> None:
        self.total = total
        self.at_once = at_once
        self.counts: Counter[str] = Counter(record.status for record in known.values())
        self.running: dict[str, Cell] = {}
        self._walls: list[float] = []
        self._known = dict(known)

    @property
    def done(self) -> int:
        """Cells with a record."""
        return sum(self.counts.values())

    def started(self, cell: Cell) -> None:
        """Note that a cell runs; its record of before, if any, no longer counts."""
        self.running[cell.key] = cell
        before = self._known.pop(cell.key, None)
        if before is not None:
            self.counts[before.status] -= 1

    def ended(self, cell: Cell, record: RunRecord) -> None:
        """Note a record."""
        self.running.pop(cell.key, None)
        before = self._known.pop(cell.key, None)
        if before is not None:
            self.counts[before.status] -= 1
        self.counts[record.status] += 1
        self._walls += [record.attempts[-1].wall_s] if record.attempts and record.status != "skipped" else []

    def eta_s(self) -> float | None:
        """Return the seconds that the rest will take, if it takes as long as what ran; None before that."""
        if not self._walls:
            return None
        return (self.total - self.done) * sum(self._walls) / len(self._walls) / self.at_once

    def text(self) -> str:
        """Return all counts in one line."""
        parts = [f"{self.done} of {self.total} done", f"{len(self.running)} running"]
        parts += [f"{self.counts[s]} {s.replace('_', ' ')}" for s in ("ok", *_FAILED) if self.counts[s]]
        eta = self.eta_s()
        if eta is not None and self.done < self.total:
            parts.append(f"about {_duration(eta)} left")
        return ", ".join(parts)


class PlainProgress:
    """One line per cell."""

    def __init__(self, tally: Tally, stream: TextIO) -> None:
        self._tally, self._stream = tally, stream

    def started(self, cell: Cell, attempt: int) -> None:
        """Count it."""
        self._tally.started(cell)

    def ended(self, cell: Cell, record: RunRecord) -> None:
        """Print its line."""
        self._tally.ended(cell, record)
        # Whoever reads may have seen enough (`| head`); the sweep goes on.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line_of(record, done=self._tally.done, total=self._tally.total) + "\n")
            self._stream.flush()


class LiveProgress:
    """A table that is drawn over and over while the sweep runs. Use it as a context."""

    def __init__(self, tally: Tally, console: Console) -> None:
        from rich.live import Live

        self._tally, self._console = tally, console
        self._since: dict[str, float] = {}
        self._last: list[str] = []
        self._live: Live = Live(console=console, get_renderable=self._table, refresh_per_second=2)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def started(self, cell: Cell, attempt: int) -> None:
        """Show it as running."""
        self._tally.started(cell)
        self._since[cell.key] = time.monotonic()

    def ended(self, cell: Cell, record: RunRecord) -> None:
        """Show how it ended."""
        self._tally.ended(cell, record)
        self._last.append(line_of(record, done=self._tally.done, total=self._tally.total))

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid()
        for line in self._last[-_ROWS:]:
            table.add_row(Text(line, overflow="ellipsis", no_wrap=True))
        for key, cell in list(self._tally.running.items()):
            took = _duration(time.monotonic() - self._since.get(key, time.monotonic()))
            table.add_row(Text(f"running {took}  {cell.label}", style="cyan", overflow="ellipsis", no_wrap=True))
        table.add_row(Text(self._tally.text(), style="bold"))
        return table


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}"
