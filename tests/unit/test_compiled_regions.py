"""Policies under torch.compile: they take effect in the compiler's partitioner, and rules that match nothing tell."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import NothingMatchedError, RefusedError, find_error
from tests.helpers import families, law
from tests.helpers.compiled import graphs_of
from tests.helpers.families import FULL, both
from tests.helpers.models import Spec


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _graphs(policy: Any, spec: Spec) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """The operators of the compiled forward and backward graphs of one block."""
    forward, backward = graphs_of(policy, spec)
    return [graph.counts for graph in forward], [graph.counts for graph in backward]


MM = "aten.mm.default"
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@pytest.mark.parametrize(
    ("save", "again"),
    [
        (None, 6),
        ([{"op": "aten.mm", "keep": "1/2"}], 3),
        ([{"op": "aten.mm", "keep": "2/3"}], 2),
        (["aten.mm"], 0),
        (["matmul", "sdpa"], 0),
    ],
    ids=str,
)
def test_the_partitioner_runs_again_what_the_policy_leaves_out(save, again):
    spec = Spec()
    _, bare = _graphs(None, spec)
    torch._dynamo.reset()
    policy = FULL if save is None else {"kind": "selective_op", "save": save}
    _, backward = _graphs(policy, spec)
    assert len(backward) == len(bare) == 1
    assert backward[0][MM] - 2 * 7 == again
    # A kernel that can draw random numbers runs again inside an operator that puts their state back.
    attention = backward[0]["run_with_rng_state"] + backward[0][SDPA]
    assert attention == (0 if save is not None and "sdpa" in save else 1)


def test_a_rule_that_matches_nothing_is_found_by_check_after_the_first_forward():
    model = families.models.build()
    applied = lowtide.apply(model, lowtide.SelectiveOp(save=["aten.addmm"]))
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    model(families.models.tokens())
    with pytest.raises(NothingMatchedError, match=r"aten\.addmm") as caught:
        applied.check()
    assert "aten.mm" in str(caught.value)


def test_check_is_content_where_every_rule_matched():
    model = families.models.build()
    applied = lowtide.apply(model, lowtide.SelectiveOp(save=["aten.mm"]))
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    model(families.models.tokens())
    applied.check()


@both
def test_dropout_under_compile_is_exact(policy):
    def wrap(model: nn.Module) -> nn.Module:
        for block in families.blocks(model):
            block.compile(backend="aot_eager", fullgraph=True)
        return model

    build = partial(families.models.build, Spec(dropout=0.2))
    step = partial(families.spec_step, spec=Spec(dropout=0.2))
    law.assert_law(build, step, policy, wrap=wrap, steps=2)


@pytest.mark.compiler
@pytest.mark.full
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_default_backend_is_exact(policy, dtype):
    def wrap(model: nn.Module) -> nn.Module:
        for block in families.blocks(model):
            # Fusing keeps or drops roundings below float32 as it likes, unless told to round as eager code does.
            block.compile(fullgraph=True, options={"emulate_precision_casts": True})
        return model

    spec = Spec(dtype=dtype)
    build, step = partial(families.models.build, spec), partial(families.spec_step, spec=spec)
    law.assert_law(build, step, policy, wrap=wrap, steps=2)


@pytest.mark.compiler
@both
def test_dropout_that_the_default_backend_would_round_otherwise_is_refused(policy):
    spec = Spec(dropout=0.2)
    model = families.models.build(spec)
    lowtide.apply(model, policy)
    model.layers[0].compile(fullgraph=True)
    with pytest.raises(Exception, match="allow_inexact") as caught:
        families.spec_step(model, 0, spec=spec)
    assert isinstance(find_error(caught.value), RefusedError)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.compiler
def test_the_default_backend_trains_a_selective_policy_exactly():
    def wrap(model: nn.Module) -> nn.Module:
        for block in families.blocks(model):
            block.compile(fullgraph=True)
        return model

    build = families.builder("decoder", torch.float32, False)
    law.assert_law(build, families.step, families.SELECTIVE, wrap=wrap, steps=2)
