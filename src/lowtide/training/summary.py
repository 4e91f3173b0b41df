"""What a run says at its end: a record that goes into ``run.json``, and a table for a person. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lowtide.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ForecastRow", "PeakRow", "SavedRow", "Summary", "print_summary"]


@dataclass(frozen=True)
class PeakRow:
    """The true peak of one rank in the measured step."""

    rank: int
    peak_bytes: int | None
    method: str
    note: str


@dataclass(frozen=True)
class SavedRow:
    """Saved bytes of one forward under one policy, on one rank."""

    policy: str
    block_bytes: tuple[int, ...]
    rest_bytes: int
    checkpointed: int

    @property
    def total_bytes(self) -> int:
        """All that backward needs."""
        return sum(self.block_bytes) + self.rest_bytes


@dataclass(frozen=True)
class ForecastRow:
    """The estimate made before the run beside what rank 0 measured, in bytes."""

    predicted_bytes: int | None
    measured_bytes: int | None
    error: float | None
    """(predicted - measured) / measured."""
    off: str
    """What the estimate was wrong about most, where it was off by more than 5%."""
    phase: str
    """In which pass the peak was expected."""
    predicted_parts: Mapping[str, int]
    measured_parts: Mapping[str, int]
    seconds: float
    """How long the estimate took."""
    note: str
    """Why there is none."""


@dataclass(frozen=True)
class Summary:
    """The end of a run."""

    experiment_id: str
    folder: str
    steps: int
    loss_first: float | None
    loss_last: float | None
    loss_held_out: float | None
    tokens_per_s: float | None
    model_flops_per_s: float | None
    """Of all ranks together; what is recomputed is not counted."""
    applied: str
    blocks: tuple[str, ...]
    saved: tuple[SavedRow, ...]
    saved_note: str
    peaks: tuple[PeakRow, ...]
    peak_step: int | None
    wall_s: float
    forecast: ForecastRow | None = None
    """None where the config has ``estimate: false``."""

    def as_json(self) -> dict[str, Any]:
        """Return plain data; a number that is not finite, such as a diverged loss, becomes None."""
        data = asdict(self)
        for name, value in data.items():
            if isinstance(value, float) and not math.isfinite(value):
                data[name] = None
        for row, saved in zip(data["saved"], self.saved, strict=True):
            row["total_bytes"] = saved.total_bytes
        return data


def print_summary(summary: Summary, console: Console) -> None:
    """Print the table at the end of a run."""
    from rich import box
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(summary):
        facts.add_row(f"[bold]{name}[/bold]", value)
    console.print()
    console.print(facts, highlight=False)
    if summary.saved:
        table = Table(
            title="Saved for backward, each rank (one forward on fake tensors)",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("policy")
        for head in ("checkpointed", "a block", "all blocks", "rest", "total"):
            table.add_column(head, justify="right")
        for row in summary.saved:
            table.add_row(*_saved_cells(row))
        console.print(table)
    if summary.saved_note:
        console.print(summary.saved_note, markup=False, highlight=False)
    console.print(f"run folder: {summary.folder}", markup=False, highlight=False, soft_wrap=True)


def _facts(summary: Summary) -> list[tuple[str, str]]:
    first, last, held_out = (_loss(v) for v in (summary.loss_first, summary.loss_last, summary.loss_held_out))
    speed = "not measured" if summary.tokens_per_s is None else f"{summary.tokens_per_s:,.0f}"
    if summary.model_flops_per_s is not None:
        speed += f"   ({summary.model_flops_per_s / 1e9:,.1f} model GFLOP/s, recompute not counted)"
    facts = [
        ("steps", str(summary.steps)),
        ("loss", f"first {first}   last {last}   held out {held_out}"),
        ("tokens/s", speed),
        ("policy", summary.applied),
    ]
    if not summary.peaks:
        facts.append(("peak", "not measured: it is taken in the second step of an attempt"))
    step = "" if summary.peak_step is None else f", step {summary.peak_step}"
    for row in summary.peaks:
        text = "not available" if row.peak_bytes is None else f"{format_bytes(row.peak_bytes)} ({row.method}{step})"
        facts.append((f"peak, rank {row.rank}", text + (f": {row.note}" if row.note else "")))
    if summary.forecast is not None:
        facts.append(("estimate", _forecast(summary.forecast)))
    return facts


def _forecast(row: ForecastRow) -> str:
    if row.predicted_bytes is None:
        return f"not available: {row.note}"
    text = f"{format_bytes(row.predicted_bytes)} in {row.phase} (rank 0, made in {row.seconds:.1f} s)"
    if row.error is None:
        return f"{text}; nothing was measured"
    return f"{text}, {row.error:+.2%}" + (f": off in {row.off.replace('_', ' ')}" if row.off else "")


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _saved_cells(row: SavedRow) -> list[str]:
    low, high = min(row.block_bytes, default=0), max(row.block_bytes, default=0)
    block = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    return [
        row.policy,
        f"{row.checkpointed} of {len(row.block_bytes)}",
        block,
        format_bytes(sum(row.block_bytes)),
        format_bytes(row.rest_bytes),
        format_bytes(row.total_bytes),
    ]
