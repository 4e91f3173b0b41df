"""Collectives are measured between the ranks that there are."""

from __future__ import annotations


def measured() -> list[tuple[str, int, int]]:
    from lowtide.measurement._calibrate import _Bench
    from lowtide.training.mesh import process_group

    with process_group(device="cpu") as world:
        points = list(_Bench(world.device).collectives())
    assert all(point.ms > 0 for point in points)
    return [(point.collective, point.ranks, point.nbytes) for point in points]


def test_each_collective_in_three_sizes(run_on):
    expected = [
        (kind, 2, nbytes) for nbytes in (2**16, 2**20, 2**24) for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    assert run_on(2, measured, preload=("lowtide.measurement",)) == [expected, expected]
