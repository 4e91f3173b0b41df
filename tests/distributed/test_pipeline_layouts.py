"""The law in pipelines of two ranks: schedules with one backward and with a split one, layers in dicts with gaps."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers import law, parallel, stages
from tests.helpers.stages import SCHEDULES

POLICIES = ("full", "selective", "feed-forward")


def _check(schedule: str, family: str, dropout: bool, cells: list[tuple[str, str]]) -> dict[str, list[str]]:
    """One control, then every (executor, policy); what differed, by cell."""
    control = stages.run(schedule, family, None, dropout=dropout)
    twice = stages.run(schedule, family, None, dropout=dropout)
    assert _differing(control, twice) == [], "two runs without a policy differ"
    assert control.gradients
    found: dict[str, list[str]] = {}
    for executor, policy in cells:
        ran = stages.run(schedule, family, parallel.policies(family, executor)[policy], dropout=dropout)
        found[f"{executor}, {policy}"] = _differing(control, ran)
        assert len(ran.regions) == 2 * len({r.split(":")[0] for r in ran.regions}), "both layers of each stage"
    return found


def _differing(a: stages.Ran, b: stages.Ran) -> list[str]:
    assert list(a.gradients) == list(b.gradients)
    found = [n for n in a.gradients if not law.same_bits(a.gradients[n], b.gradients[n])]
    return found if a.loss == b.loss else [*found, "loss"]


SLICE = {
    ("1F1B", "llama", True): [("recompute", "full"), ("recompute", "feed-forward"), ("replay", "selective")],
    ("ZBVZeroBubble", "gpt2", False): [("recompute", "selective"), ("replay", "feed-forward"), ("replay", "full")],
    ("InterleavedZeroBubble", "decoder", True): [("recompute", "feed-forward"), ("replay", "selective")],
    ("1F1B", "qwen3", False): [("replay", "feed-forward"), ("recompute", "selective")],
}


@pytest.mark.parametrize(("schedule", "family", "dropout"), SLICE, ids=str)
def test_a_slice(run_on, schedule, family, dropout):
    cells = SLICE[schedule, family, dropout]
    for found in run_on(2, _check, schedule, family, dropout, cells, preload=("transformers",)):
        assert len(found) == len(cells)
        assert {k: v for k, v in found.items() if v} == {}


@pytest.mark.full
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("family", parallel.FAMILIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all(run_on, schedule, family, dropout):
    cells = list(product(("recompute", "replay"), POLICIES))
    for found in run_on(2, _check, schedule, family, dropout, cells, preload=("transformers",), timeout_s=250):
        assert len(found) == len(cells)
        assert {k: v for k, v in found.items() if v} == {}


def _regions(policy: dict[str, object]) -> list[str]:
    return stages.run("InterleavedZeroBubble", "decoder", policy).regions


def test_layers_count_by_their_names_not_by_their_places_in_a_stage(run_on):
    """Of eight layers the stages hold 0, 4 and 2, 6 on one rank, 1, 5 and 3, 7 on the other."""
    first, second = run_on(2, _regions, {"kind": "some_layers", "checkpoint": "3/5"})
    assert first == ["0: layers.0", "2: layers.2", "2: layers.6"]
    assert second == ["1: layers.1", "1: layers.5", "3: layers.7"]
