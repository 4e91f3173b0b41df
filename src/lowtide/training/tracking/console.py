"""Progress for a person: a live view on a terminal, one plain line now and then elsewhere.

On a terminal rich's Live holds one table at the bottom and messages scroll above it; it is refreshed from
here and starts no thread (a thread would be in the way of whoever forks data workers). Elsewhere, in a log or
a pipe, a line comes for the first step, the last, and otherwise at most every ``every_s`` seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from lowtide.training.events import (
    CheckpointSaved,
    EvaluationDone,
    Event,
    Message,
    RunEnded,
    RunStarted,
    StepDone,
)
from lowtide.training.tracking.scalars import as_number
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from lowtide.training.tracking.kinds import ConsoleConfig

__all__ = ["Console", "duration_text"]

_REFRESH_S = 0.1


class Console:
    """The subscriber; ``stream`` and ``clock`` default to what the config names and the monotonic clock."""

    def __init__(
        self,
        config: ConsoleConfig,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or (sys.stderr if config.stream == "stderr" else sys.stdout)
        self._every_s = config.every_s
        self._clock = clock
        self._total = 0
        self._shown_at: float | None = None
        self._latest: StepDone | None = None
        self._live: Live | None = None

    def handle(self, event: Event) -> None:
        """Show what a person would want to see."""
        if isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, RunEnded):
            self._end(event)
        else:
            text = _line_of(event)
            if text is not None:
                self._say(text)

    def close(self) -> None:
        """Put the terminal back as it was."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _start(self, event: RunStarted) -> None:
        self._total = event.total_steps
        where = f"{event.world_size} process{'es' if event.world_size > 1 else ''} on {event.device}"
        begun = f", from step {event.start_step}" if event.start_step else ""
        policy = f", policy {event.policy}" if event.policy else ""
        self._say(f"run {event.experiment_id}: {event.total_steps} steps{begun}, {where}{policy}")
        self._say(f"folder {event.folder}")
        if self._stream.isatty():
            self._live = _new_live(self._stream)
            self._live.start()

    def _step(self, event: StepDone) -> None:
        self._latest = event
        now = self._clock()
        wait_s = _REFRESH_S if self._live is not None else self._every_s
        due = self._shown_at is None or now - self._shown_at >= wait_s
        if not due and event.step != self._total:
            return
        self._shown_at = now
        if self._live is not None:
            self._live.update(_table(event, self._total), refresh=True)
        else:
            self._say("  ".join(f"{name} {text}" for name, text in _cells(event, self._total)))

    def _end(self, event: RunEnded) -> None:
        if self._live is not None and self._latest is not None:
            self._live.update(_table(self._latest, self._total), refresh=True)
        self.close()
        took = f" in {duration_text(event.wall_s)}" if event.wall_s is not None else ""
        self._say(f"{event.status} after {event.steps} steps{took}{f': {event.error}' if event.error else ''}")

    def _say(self, text: str) -> None:
        if self._live is not None:
            # markup off: a message may hold brackets of its own
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        try:
            self._stream.write(text + "\n")
        except UnicodeEncodeError:
            encoding = getattr(self._stream, "encoding", None) or "ascii"
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


def duration_text(seconds: float) -> str:
    """Write a duration as 9.5s, 1:05 or 2:03:04."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _line_of(event: Event) -> str | None:
    if isinstance(event, EvaluationDone):
        return f"step {event.step}: held-out loss {_number(event.loss, '.4f')}"
    if isinstance(event, CheckpointSaved):
        return f"step {event.step}: checkpoint {event.path}"
    if isinstance(event, Message):
        return f"warning: {event.text}" if event.level == "warning" else event.text
    return None


def _cells(event: StepDone, total: int) -> list[tuple[str, str]]:
    cells = [
        ("step", f"{event.step}/{total}" if total else str(event.step)),
        ("loss", _number(event.loss, ".4f")),
    ]
    if event.tokens_per_s is not None:
        cells.append(("tokens/s", _number(event.tokens_per_s, ",.0f")))
    if event.peak_bytes is not None:
        cells.append(("peak", format_bytes(event.peak_bytes)))
    if event.eta_s is not None:
        cells.append(("eta", duration_text(event.eta_s)))
    return cells


def _number(value: Any, form: str) -> str:
    number = as_number(value)
    return "?" if number is None else format(number, form)


def _new_live(stream: TextIO) -> Live:
    from rich.console import Console as RichConsole
    from rich.live import Live

    console = RichConsole(file=stream, force_terminal=True)
    return Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


def _table(event: StepDone, total: int) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    names, texts = zip(*_cells(event, total), strict=True)
    table.add_row(*(f"[dim]{name}[/dim]" for name in names))
    table.add_row(*texts, ProgressBar(total=max(total, 1), completed=event.step, width=24))
    return table
