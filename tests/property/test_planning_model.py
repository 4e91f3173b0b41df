"""A choice for each layer: as good as trying out every assignment, and never above the limit."""

from __future__ import annotations

import itertools
import random

from lowtide.planning import Choice, Kind, Step, assign, least_peak, peak_of


def random_step(seed: int) -> Step:
    """A few layers in runs of kinds; choices in no particular order, gradients that appear as backward goes."""
    rng = random.Random(seed)
    kinds = tuple(
        Kind(
            f"kind {k}",
            tuple(
                Choice(rng.randint(0, 40), rng.randint(0, 60), rng.choice((0, rng.randint(1, 60))))
                for _ in range(rng.randint(1, 4))
            ),
        )
        for k in range(rng.randint(1, 2))
    )
    layers = tuple(sorted(rng.randrange(len(kinds)) for _ in range(rng.randint(1, 5))))
    if rng.random() < 0.3:
        layers = tuple(rng.sample(layers, len(layers)))
    gradient = rng.choice((0, 0, 5, 30, 80))
    start = rng.randint(0, 50)
    bases = [start + gradient * (len(layers) - 1 - i) for i in range(len(layers))]
    if rng.random() < 0.3:
        bases = [b + rng.choice((0, 7)) for b in bases]
    return Step(kinds, layers, tuple(bases), rng.randint(0, 150), rng.randint(0, 100))


def every(step: Step):
    return itertools.product(*(range(len(step.kinds[kind].choices)) for kind in step.layers))


def time_of(step: Step, chosen) -> int:
    return sum(step.kinds[k].choices[c].recompute_ns for k, c in zip(step.layers, chosen, strict=True))


def highest(step: Step, chosen) -> int:
    """The peak in the words of the definition, written apart from the library's code."""
    picks = [step.kinds[k].choices[c] for k, c in zip(step.layers, chosen, strict=True)]
    moments = [step.fixed_bytes, step.head_bytes + sum(p.held_bytes for p in picks)]
    for i, pick in enumerate(picks):
        moments.append(step.base_bytes[i] + sum(p.held_bytes for p in picks[: i + 1]) + pick.transient_bytes)
    return max(moments)


def test_assignments_equal_trying_out_all():
    rng = random.Random(0)
    solved = 0
    for seed in range(120):
        step = random_step(seed)
        tried = [(highest(step, chosen), time_of(step, chosen)) for chosen in every(step)]
        low, high = min(p for p, _ in tried), max(p for p, _ in tried)
        for limit in {low - 1, low, rng.randint(low, high), high}:
            best = min((time for peak, time in tried if peak <= limit), default=None)
            found = assign(step, limit)
            assert (None if found is None else found.recompute_ns) == best, (seed, limit, step)
            if found is not None:
                solved += 1
                assert highest(step, found.chosen) == peak_of(step, found.chosen)[0] <= limit
                assert time_of(step, found.chosen) == found.recompute_ns >= found.bound_ns
    assert solved > 200


def test_the_least_peak_is_the_least():
    for seed in range(120):
        step = random_step(seed)
        assert highest(step, least_peak(step)) == min(highest(step, chosen) for chosen in every(step)), seed


def test_the_last_layers_keep_more_where_the_head_leaves_room():
    full, keep = Choice(1, 20, 5_000_000), Choice(10, 11, 0)
    step = Step((Kind("block", (full, keep)),), (0,) * 8, (100,) * 8, head_bytes=0)
    # Six that hold 1, two that hold 10, and 11 more for the last one's backward.
    for limit, kept in ((100 + 6 + 20 + 11, 2), (100 + 6 + 20 + 10, 1)):
        found = assign(step, limit)
        assert found is not None
        assert found.chosen == (0,) * (8 - kept) + (1,) * kept


def test_the_peak_says_where_it_is():
    block = Kind("block", (Choice(10, 5, 0),))
    assert peak_of(Step((block,), (0, 0), (0, 0), 100), (0, 0)) == (120, "head")
    assert peak_of(Step((block,), (0, 0), (200, 0), 100), (0, 0)) == (215, "0")
    assert peak_of(Step((block,), (0, 0), (0, 0), 0, fixed_bytes=70), (0, 0)) == (70, "fixed")
