"""The largest figures of all ranks come back to all."""

from __future__ import annotations


def measured() -> tuple[int | None, int | None, int, float]:
    import torch
    import torch.distributed as dist

    import lowtide
    from lowtide.training.mesh import process_group

    with process_group(device="cpu") as world:
        model = torch.nn.Linear(64, 64)
        rows = 1000 * (1 + dist.get_rank())

        def step() -> None:
            model(torch.zeros(rows, 64)).relu().sum().backward()
            model.zero_grad()

        found = lowtide.measure(step, static=model, warm_up=1, repeats=1, device=world.device)
    return found.peak_bytes, found.start_bytes, found.world_size, found.step_ms


def test_every_rank_learns_of_the_largest_peak_and_the_slowest_step(run_on):
    first, second = run_on(2, measured, preload=("lowtide.api",))
    assert first == second
    peak, start, size, _ = first
    assert (start, size) == ((64 * 64 + 64) * 4, 2)
    # The second rank's batch, its product, and one more of that size.
    assert peak is not None
    assert peak > start + 2 * 2000 * 64 * 4
