"""Estimate and measure every cell, and write docs/reference/accuracy.md.

python -m benchmarks.estimate [--cells N] [--drawn N] [--seed N] [--out PATH] [--keep results.jsonl]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.estimate import large
from benchmarks.estimate.grid import Cell, drawn_grid, slice_of, whole_grid
from lowtide.training.estimate import estimate_config
from lowtide.units import format_bytes

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "accuracy.md"


@dataclass(frozen=True)
class Result:
    cell: Cell
    rank: int
    predicted: int
    measured: int | None
    method: str
    note: str

    @property
    def error(self) -> float | None:
        return None if self.measured is None else (self.predicted - self.measured) / self.measured


def main() -> None:
    _commit()
    options = _options()
    started = time.monotonic()
    cells = whole_grid()
    if options.cells is not None:
        cells = slice_of(cells, options.seed, options.cells)
    grids = {"The grid": cells, f"Drawn at random (seed {options.seed})": drawn_grid(options.seed, options.drawn)}
    results = {title: _run(grid) for title, grid in grids.items()}
    if options.keep:
        lines = [
            json.dumps({**r.cell.as_dict(), **vars(r), "cell": str(r.cell)}) for rs in results.values() for r in rs
        ]
        Path(options.keep).write_text("\n".join(lines) + "\n")
    page = _page(results, seconds=time.monotonic() - started)
    if options.large:
        rows = [large.in_fresh_process(name) for name in large.SHAPES]
        page += "\n".join(["", "## Large models", "", *large.table(rows)]) + "\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page)
    print(_summary([r for rs in results.values() for r in rs]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=None, help="a seeded slice of the grid instead of all of it")
    parser.add_argument("--drawn", type=int, default=24, help="cells of the second grid")
    parser.add_argument("--seed", type=int, default=20261201)
    parser.add_argument("--out", type=Path, default=_PAGE)
    parser.add_argument("--large", action="store_true", help="also estimate Llama-3 8B, 70B and 405B")
    parser.add_argument("--keep", default=None, help="also write every result as a line of JSON")
    return parser.parse_args()


def _run(cells: list[Cell]) -> list[Result]:
    """Predict every cell first, in this process, then measure each in fresh ones."""
    estimates = {
        (cell, rank): estimate_config(cell.config(), world_size=cell.processes, rank=rank).peak_bytes
        for cell in cells
        for rank in range(cell.processes)
    }
    found: list[Result] = []
    for processes in sorted({cell.processes for cell in cells}):
        for cell, peaks in _measure([c for c in cells if c.processes == processes], processes):
            for rank, (nbytes, method, note) in enumerate(peaks):
                found.append(Result(cell, rank, estimates[cell, rank], nbytes, method, note))
    return found


def _measure(cells: list[Cell], processes: int) -> Iterable[tuple[Cell, list[tuple[int | None, str, str]]]]:
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "cells.json"), Path(folder, "out.jsonl")
        given.write_text(json.dumps([cell.as_dict() for cell in cells]))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command += ["-m", "benchmarks.estimate.truth", str(given), str(out)]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"measuring failed:\n{done.stderr[-4000:]}")
        for line in out.read_text().splitlines():
            told = json.loads(line)
            yield Cell(**told["cell"]), [tuple(peak) for peak in told["peaks"]]


def _summary(results: list[Result]) -> str:
    errors = [abs(r.error) for r in results if r.error is not None]
    missing = len(results) - len(errors)
    text = (
        f"{len(results)} ranks of cells: median {statistics.median(errors):.4%}, largest {max(errors):.4%}, "
        f"{sum(e > 0.03 for e in errors)} above 3%"
    )
    return f"{text}, {missing} not measurable" if missing else text


def _page(results: dict[str, list[Result]], *, seconds: float) -> str:
    lines = [
        "# How close estimates of peak memory come",
        "",
        "Made by `python -m benchmarks.estimate`; do not edit. The error is (predicted - measured) / measured of the "
        "peak bytes of the second optimizer step, for each rank.",
        "",
        f"Commit {_commit()}, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, transformers "
        f"{_version('transformers')}, Python {platform.python_version()}, {platform.machine()}, one CPU thread a "
        f"process, {seconds / 60:.0f} minutes.",
        "",
        "**Predicted**: the trainer's own step under fake tensors and a fake process group (`lowtide estimate`), "
        "in a process of its own before anything is measured. No constant is fitted to any cell: sizes of kernels' "
        "workspaces are those that torch's source states.",
        "",
        "**Measured**: in one process by the host allocator's events, which share no code with the prediction. In two "
        "gloo processes with FSDP2 by the storage tracker on the real tensors, where the allocator's events confirm "
        "it: the tracker counts storages as the prediction does, so these cells show that the fake step does what the "
        "real one does, and they are blind to memory that a kernel allocates inside (where the events show more, the "
        "events count).",
        "",
        "Nothing here was measured on a GPU.",
        "",
        "| grid | ranks of cells | median error | largest | above 3% | not measurable |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for title, rows in results.items():
        for processes in (1, 2):
            lines.append(
                _summary_row(f"{title}, {processes} process(es)", [r for r in rows if r.cell.processes == processes])
            )
    for title, rows in results.items():
        lines += ["", f"## {title}", "", *_table(rows)]
    return "\n".join(lines) + "\n"


def _summary_row(title: str, rows: list[Result]) -> str:
    errors = [abs(r.error) for r in rows if r.error is not None]
    if not errors:
        return f"| {title} | {len(rows)} | - | - | - | {len(rows)} |"
    return (
        f"| {title} | {len(rows)} | {statistics.median(errors):.4%} | {max(errors):.4%} | "
        f"{sum(e > 0.03 for e in errors)} | {len(rows) - len(errors)} |"
    )


_COLUMNS = ("model", "policy", "batch x tokens", "precision", "processes", "accumulation", "rank")


def _table(rows: list[Result]) -> list[str]:
    lines = [_row(*_COLUMNS, "predicted", "measured", "error", "by"), _row(*["---"] * (len(_COLUMNS) + 4))]
    for r in rows:
        c = r.cell
        lines.append(
            _row(
                *(c.model, c.policy, f"{c.batch}x{c.length}", c.precision, c.processes, c.accumulation, r.rank),
                format_bytes(r.predicted),
                "not available" if r.measured is None else format_bytes(r.measured),
                "-" if r.error is None else f"{r.error:+.4%}",
                f"{r.method}: {r.note}" if r.note else r.method,
            )
        )
    return lines


def _row(*fields: object) -> str:
    return "| " + " | ".join(map(str, fields)) + " |"


@functools.cache
def _commit() -> str:
    """Return the commit of the tree when first asked: at the start of a run, since the tree may move on meanwhile."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
