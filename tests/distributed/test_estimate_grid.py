"""Predicted against measured peak bytes: a seeded slice of the accuracy grid; all of it under `full`."""

from __future__ import annotations

import pytest
from benchmarks.estimate.grid import Cell, drawn_grid, slice_of, whole_grid

from lowtide.training.estimate import estimate_config

SEED = 20261201
GRID, DRAWN = whole_grid(), drawn_grid(SEED, 24)
QUICK = {
    *slice_of(GRID, SEED, 4),
    DRAWN[0],
    Cell("gpt2", "selective_op", 2, 160, "bf16 mixed", 1),
    Cell("qwen3_moe", "selective_op", 4, 128, "fp32", 1),
    Cell("t5", "selective_op", 4, 128, "fp32", 1),
}


def measured(cell: Cell) -> tuple[int | None, str]:
    """On one rank of as many as the cell has: the peak of its second step."""
    from benchmarks.estimate.truth import measure_cell

    from lowtide.training.mesh import process_group

    with process_group(device="cpu") as world:
        peak = measure_cell(cell, world)
    return peak.bytes, f"{peak.method}: {peak.note}"


def _cells() -> list[object]:
    cells = dict.fromkeys([*QUICK, *GRID, *DRAWN])
    return [pytest.param(c, id=str(c), marks=() if c in QUICK else pytest.mark.full) for c in cells]


@pytest.mark.parametrize("cell", _cells())
def test_the_prediction_is_within_one_percent(run_on, cell):
    predicted = [
        estimate_config(cell.config(), world_size=cell.processes, rank=rank).peak_bytes
        for rank in range(cell.processes)
    ]
    told = run_on(cell.processes, measured, cell, preload=("lowtide.training.build",))
    for expected, (nbytes, how) in zip(predicted, told, strict=True):
        assert nbytes is not None, how
        assert abs(expected - nbytes) <= 0.01 * nbytes, how


def test_the_slice_meets_one_and_two_processes():
    assert {cell.processes for cell in QUICK} == {1, 2}
