"""Offload on the CPU: exact gradients, memory that goes back, the host counted apart; what stays, and why."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import PolicyError, RefusedError, find_error
from tests.helpers import law, models, ops
from tests.helpers.models import Spec

SPEC = Spec(d=128, hidden=256, length=128, layers=4)
STATE = SPEC.batch * SPEC.length * 4
"""Bytes of one number for each token."""


def rules(default: str, *items: dict[str, Any], **common: Any) -> dict[str, Any]:
    return {"kind": "rules", "default": default, "rules": list(items), **common}


POLICIES: dict[str, dict[str, Any]] = {
    "products": rules("recompute", {"op": "matmul", "action": "offload"}),
    "half of them, and attention": rules(
        "recompute",
        {"op": "matmul", "action": "offload", "keep": "1/2"},
        {"op": "sdpa", "action": "offload"},
    ),
    "all of a module": rules("save", {"modules": "feed", "action": "offload"}),
}


def step(model: nn.Module, i: int, spec: Spec = SPEC) -> Tensor:
    tokens = models.tokens(spec)
    loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_exact(name):
    law.assert_law(partial(models.build, SPEC), step, POLICIES[name])


def test_gradients_are_exact_with_dropout_and_bf16():
    spec = SPEC.but(dropout=0.1, dtype=torch.bfloat16)
    for name in ("products", "all of a module"):
        law.assert_law(partial(models.build, spec), partial(step, spec=spec), POLICIES[name])


def test_no_operator_runs_again_that_save_would_not_run():
    tokens = models.tokens(SPEC)

    def again(action: str) -> Any:
        plain, model = models.build(SPEC), models.build(SPEC)
        lowtide.apply(model, rules("recompute", {"op": "matmul", "action": action}))
        for i in range(2):
            step(model, i)
        _, behind = ops.count_ops(lambda: models.loss_of(model(tokens), tokens))
        _, plainly = ops.count_ops(lambda: models.loss_of(plain(tokens), tokens))
        counts = behind - plainly
        # What brings a value back is no operator of the block.
        return {op: n for op, n in counts.items() if not op.startswith("aten.empty.")}

    assert again("offload") == again("save")


def test_what_is_parked_leaves_the_device_and_the_host_counts_it():
    tokens = models.tokens(SPEC)

    def held(action: str) -> tuple[int, Any]:
        model = models.build(SPEC)
        applied = lowtide.apply(model, rules("recompute", {"op": "matmul", "action": action}))
        for i in range(2):
            step(model, i)
        return ops.saved_bytes(lambda: models.loss_of(model(tokens), tokens)), applied

    saved, _ = held("save")
    parked, applied = held("offload")
    pool = applied.regions[0].session.host_pool
    # Of six products that backward reaches, three blocks park q, k, v, o, gate and up; the last block stays.
    each = STATE * (2 * SPEC.d + 2 * SPEC.d // 2 + 2 * SPEC.hidden)
    assert saved - parked == 3 * each
    assert pool.nbytes == 0, "the graph of the measured forward is gone"
    assert pool.peak_bytes == 4 * (each + STATE * SPEC.d), "in the first step all four, and the last product too"
    assert f"offload (experimental): {3 * each / 2**20:.2f} MiB on the host" in str(applied)
    assert "the region is the last to run, and its backward follows at once" in str(applied)


def test_small_values_and_outputs_stay_and_the_report_says_so():
    model = models.build(SPEC)
    applied = lowtide.apply(model, POLICIES["all of a module"])
    step(model, 0)
    assert "its memory stays alive after the region: an output, or held by the model" in str(applied)
    small = Spec()
    model = models.build(small)
    applied = lowtide.apply(model, POLICIES["products"])
    step(model, 0, small)
    assert "offload (experimental): 0 B on the host" in str(applied)
    assert "it is smaller than 64 KiB" in str(applied)


def test_a_graph_kept_for_a_second_backward_and_a_graph_thrown_away():
    tokens = models.tokens(SPEC)
    model = models.build(SPEC)
    applied = lowtide.apply(model, POLICIES["products"])
    pool = applied.regions[0].session.host_pool
    loss = models.loss_of(model(tokens), tokens)
    loss.backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, first[n]) for n, p in model.named_parameters() if p.grad is not None)
    del loss
    assert pool.nbytes == 0
    thrown = models.loss_of(model(tokens), tokens)
    assert pool.nbytes > 0
    del thrown
    assert pool.nbytes == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(PolicyError, match="no meaning with `action: recompute`"):
        lowtide.apply(models.build(Spec()), rules("save", {"op": "aten.mm", "action": "recompute", "keep": "1/2"}))
    model = models.build(Spec())
    lowtide.apply(model, POLICIES["products"])
    for block in model.blocks():
        block.compile(backend="aot_eager")
    with pytest.raises(Exception, match="a rule of the policy offloads, which compiled code does not") as caught:
        step(model, 0, Spec())
    assert isinstance(find_error(caught.value), RefusedError)
    model = models.build(SPEC)
    applied = lowtide.apply(model, {**POLICIES["products"], "executor": "replay"})
    assert {(r.executor, r.reason) for r in applied.regions} == {
        ("recompute", "not replayed: the policy offloads, which recompute carries out")
    }
