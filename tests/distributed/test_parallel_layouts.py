"""The law in parallel layouts: tensor and sequence parallel on two ranks, with FSDP2 on four, nested FSDP2 units."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product

import pytest

import lowtide
from tests.helpers import law, ops, parallel
from tests.helpers.parallel import FAMILIES, LAYOUTS
from tests.helpers.sharded import ranked_seed, ranked_step

RANKS = {"tensor": 2, "sequence": 2, "two-dimensional": 4, "nested units": 2}
ALL_REDUCE = "_c10d_functional.all_reduce.default"


def _check(layout: str, family: str, cells: list[tuple[str, str, bool]]) -> dict[str, list[str]]:
    """One control, then every cell (executor, policy, applied last); what differed, and who fell back, by cell."""
    shared = layout in ("tensor", "sequence")
    step = parallel.step if shared else ranked_step
    options = {"wrap": LAYOUTS[layout], "seed": 31 if shared else ranked_seed(), "steps": 2}
    if layout == "two-dimensional":
        # The ranks of a tensor-parallel pair must agree on their data.
        step, options["seed"] = parallel.step, 31
    build = partial(parallel.build, family, dropout=family == "decoder" and layout == "nested units")
    control = law.check_control(build, step, **options)
    found: dict[str, list[str]] = {}
    for executor, policy, last in cells:
        outcome = law.run_steps(build, step, parallel.policies(family, executor)[policy], apply_last=last, **options)
        assert outcome.applied is not None
        assert outcome.applied.regions
        found[f"{executor}, {policy}, applied {'after' if last else 'before'}"] = law.differences(control, outcome)
    return found


POLICIES = ("full", "selective", "feed-forward", "collectives")
ALL = list(product(("recompute", "replay"), POLICIES, (False, True)))
SLICE = {
    ("tensor", "decoder"): [("recompute", "full", False), ("recompute", "collectives", True), ("replay", "full", True)],
    ("tensor", "llama"): [("recompute", "selective", True), ("recompute", "feed-forward", False)],
    ("sequence", "qwen3"): [("recompute", "full", True), ("recompute", "collectives", False)],
    ("sequence", "gpt2"): [("recompute", "selective", False), ("recompute", "feed-forward", True)],
    ("two-dimensional", "decoder"): [("recompute", "full", False), ("recompute", "collectives", False)],
    ("nested units", "llama"): [("recompute", "selective", False), ("recompute", "feed-forward", True)],
}


@pytest.mark.parametrize(("layout", "family"), SLICE, ids=str)
def test_a_slice(run_on, layout, family):
    cells = SLICE[layout, family]
    for found in run_on(RANKS[layout], _check, layout, family, cells, preload=("transformers",)):
        assert len(found) == len(cells)
        assert {k: v for k, v in found.items() if v} == {}


def _legal(layout: str) -> list[tuple[str, str, bool]]:
    # FSDP's own collectives are none of the region's: under nested units there is nothing to save.
    return [c for c in ALL if not (layout == "nested units" and c[1] == "collectives")]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all(run_on, layout, family):
    cells = _legal(layout)
    for found in run_on(RANKS[layout], _check, layout, family, cells, preload=("transformers",), timeout_s=280):
        assert len(found) == len(cells)
        assert {k: v for k, v in found.items() if v} == {}


def _collectives(layout: str, policy: str, executor: str) -> tuple[dict[str, int], dict[str, int]]:
    """The collectives of forward, and those that backward runs more than without a policy."""
    plain = LAYOUTS[layout](parallel.build("decoder"))
    model = parallel.build("decoder")
    lowtide.apply(model, parallel.policies("decoder", executor)[policy])
    LAYOUTS[layout](model)
    for i in range(2):
        parallel.step(model, i)
    ahead, _ = ops.count_ops(partial(parallel.forward_loss, plain))
    again = ops.ran_again(partial(parallel.forward_loss, plain), partial(parallel.forward_loss, model))
    return _communicating(ahead), _communicating(again)


def _communicating(counts: Counter[str]) -> dict[str, int]:
    """What sends; waiting for it, and wrapping it for autograd, sends nothing."""
    found = {n.split(".")[1]: c for n, c in counts.items() if n.startswith("_c10d_functional.")}
    return {n: c for n, c in found.items() if n not in ("wait_tensor", "_wrap_tensor_autograd")}


# In each of three blocks, whose last collective no backward needs.
TENSOR = {"all_reduce": 6}
SEQUENCE = {"all_gather_into_tensor": 9, "reduce_scatter_tensor": 6}


@pytest.mark.parametrize(
    ("layout", "ahead", "policy", "again"),
    [
        ("tensor", TENSOR, "full", {"all_reduce": 3}),
        ("tensor", TENSOR, "selective", {"all_reduce": 3}),
        ("tensor", TENSOR, "feed-forward", {}),
        ("tensor", TENSOR, "collectives", {}),
        ("sequence", SEQUENCE, "full", {"all_gather_into_tensor": 6, "reduce_scatter_tensor": 3}),
        ("sequence", SEQUENCE, "feed-forward", {}),
        ("sequence", SEQUENCE, "collectives", {}),
    ],
    ids=str,
)
def test_collectives_run_again_or_are_kept_as_the_policy_says(run_on, layout, ahead, policy, again):
    assert run_on(2, _collectives, layout, policy, "recompute") == [(ahead, again)] * 2
