"""The grid on one CUDA device: `python -m benchmarks.estimate.gpu [--cells N] [--out PATH]`, offline, a few minutes.

Predicted: the whole fake step for this device, made on its CPU. Measured: the caching allocator's own maximum in the
second step. cuBLAS' workspaces, which torch keeps for each thread and stream and which no operator shows, are switched
off in both variables that torch reads, so that what is compared is the step; the page says so.
"""

from __future__ import annotations

import os

# Before CUDA starts.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
os.environ["CUBLASLT_WORKSPACE_SIZE"] = os.environ["TORCH_CUBLASLT_UNIFIED_WORKSPACE"] = "0"

import argparse
import json
import statistics
from pathlib import Path

import torch

from benchmarks.estimate.grid import Cell, slice_of, whole_grid
from benchmarks.estimate.truth import measure_here
from lowtide.prediction import Device, find_device, match_device
from lowtide.training.estimate import estimate_config
from lowtide.units import format_bytes

_SEED = 20261201


def this_device() -> Device:
    """Return the table's entry; for a GPU that it lacks, one with its capability and no true speeds."""
    name = torch.cuda.get_device_name()
    known = match_device(name)
    if known is not None:
        return find_device(known)
    return Device(name, "cuda", torch.cuda.get_device_capability(), None, 1e14, 1e13, 1e12)


def rows(cells: list[Cell]) -> list[dict[str, object]]:
    """Predict and measure cells of one process."""
    device = this_device()
    found: list[dict[str, object]] = []
    for cell in cells:
        predicted = estimate_config(cell.config(), device=device).peak_bytes
        measured = measure_here(cell, "cuda").bytes
        assert measured is not None
        torch.cuda.empty_cache()
        row = {"cell": str(cell), "predicted": predicted, "measured": measured, "error": predicted / measured - 1}
        found.append(row)
    return found


def page(found: list[dict[str, object]]) -> str:
    """Return the accuracy table as Markdown."""
    errors = [abs(float(str(row["error"]))) for row in found]
    lines = [
        "# How close estimates of peak memory come on a GPU",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; cuBLAS' workspaces switched off. "
        f"{len(found)} cells: median {statistics.median(errors):.2%}, largest {max(errors):.2%}.",
        "",
        "| cell | predicted | measured | error |",
        "|---|---:|---:|---:|",
    ]
    for row in found:
        sizes = (format_bytes(int(str(row[name]))) for name in ("predicted", "measured"))
        lines.append(f"| {row['cell']} | {' | '.join(sizes)} | {float(str(row['error'])):+.2%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=None, help="a seeded slice of the grid instead of all of it")
    parser.add_argument("--out", type=Path, default=Path("accuracy-gpu.md"))
    options = parser.parse_args()
    cells = [cell for cell in whole_grid() if cell.processes == 1]
    if options.cells is not None:
        cells = slice_of(cells, _SEED, options.cells)
    found = rows(cells)
    options.out.write_text(page(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
