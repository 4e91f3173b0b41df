"""What is shown while a sweep runs: one line for each cell, or a table that is drawn over and over."""

from __future__ import annotations

import io

from rich.console import Console

from lowtide.run_record import AttemptRecord, PeakOfRank, RunRecord, RunResult
from lowtide.sweeps import Cell, LiveProgress, PlainProgress, Tally


def _cell(number: int) -> Cell:
    return Cell(number, f"key-{number}", f"batch_size={number}", {}, {}, "", {})


def _record(number: int, status: str, wall_s: float = 10.0) -> RunRecord:
    peaks = (PeakOfRank(rank=0, peak_bytes=2**20, method="allocator events"),)
    attempt = AttemptRecord(status=status, exit_code=0, started_at="2026-01-01T00:00:00Z", wall_s=wall_s)
    return RunRecord(
        id=f"key-{number}",
        label=f"batch_size={number}",
        status=status,
        reason=None if status == "ok" else "because\nof that",
        attempts=() if status == "skipped" else (attempt,),
        result=RunResult(steps=1, tokens_per_s=1234.5, peaks=peaks) if status == "ok" else None,
    )


def test_a_line_for_each_cell_with_its_numbers_or_its_reason():
    stream = io.StringIO()
    progress = PlainProgress(Tally(3, {}, 1), stream)
    for number, status in enumerate(("ok", "error", "skipped")):
        progress.started(_cell(number), 1)
        progress.ended(_cell(number), _record(number, status))
    assert stream.getvalue().splitlines() == [
        "[1/3] batch_size=0: ok  peak 1.00 MiB  1,234 tokens/s  10 s",
        "[2/3] batch_size=1: error: because of that",
        "[3/3] batch_size=2: skipped: because of that",
    ]


def test_a_reader_that_has_gone_does_not_end_the_sweep():
    stream = io.StringIO()
    progress = PlainProgress(Tally(1, {}, 1), stream)
    stream.close()
    progress.ended(_cell(0), _record(0, "ok"))


def test_the_tally_counts_each_cell_once_and_guesses_what_is_left():
    tally = Tally(4, {"key-3": _record(3, "error")}, at_once=2)
    assert (tally.done, tally.eta_s()) == (1, None)
    tally.started(_cell(3))  # it runs again
    assert (tally.done, list(tally.running)) == (0, ["key-3"])
    tally.ended(_cell(3), _record(3, "ok", wall_s=30.0))
    tally.ended(_cell(0), _record(0, "skipped"))
    assert tally.text() == "2 of 4 done, 0 running, 1 ok, 1 skipped, about 0:30 left"


def test_on_a_terminal_it_is_a_table():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with LiveProgress(Tally(2, {}, 1), console) as progress:
        progress.started(_cell(0), 1)
        progress.ended(_cell(0), _record(0, "out_of_memory"))
        progress.started(_cell(1), 1)
    shown = stream.getvalue()
    assert "[1/2] batch_size=0: out of memory: because of that" in shown
    assert "running 0:00  batch_size=1" in shown
    assert "1 of 2 done, 1 running, 1 out of memory" in shown
