"""Kind ``memory_budget``: the compiler's own choice under a fraction, for one model; refused where wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import PolicyError, RefusedError, find_error
from lowtide.policy import expand, parse_policy
from tests.helpers import families, law
from tests.helpers.compiled import graphs_of
from tests.helpers.models import Spec

HAS_BUDGET = hasattr(torch.autograd.graph, "region_activation_memory_budget")
needs_budget = pytest.mark.skipif(not HAS_BUDGET, reason="a budget for one graph came with torch 2.13")
FIFTH = {"kind": "memory_budget", "fraction": 0.2}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _saved_and_again(policy: Any) -> tuple[int, int]:
    """How many values forward hands to backward, and how many products backward runs."""
    _, backward = graphs_of(policy, Spec())
    return len(backward[0].inputs), backward[0].counts["aten.mm.default"]


@needs_budget
def test_the_partitioner_saves_less_and_runs_more_again():
    plain_saved, plain_products = _saved_and_again(None)
    torch._dynamo.reset()
    saved, products = _saved_and_again({**FIFTH, "layers": "layers.{0}"})
    assert saved < plain_saved
    assert products > plain_products
    assert torch._functorch.config.activation_memory_budget == 1.0
    torch._dynamo.reset()
    assert _saved_and_again(None) == (plain_saved, plain_products), "another model is not reached"


@needs_budget
@pytest.mark.compiler
def test_gradients_are_those_of_the_same_compiled_model_without_it():
    def wrap(model: nn.Module) -> nn.Module:
        for block in families.blocks(model):
            block.compile(fullgraph=True)
        return model

    law.assert_law(families.builder("decoder", torch.float32, False), families.step, FIFTH, wrap=wrap, steps=2)


@needs_budget
def test_blocks_that_run_eagerly_are_an_error():
    model = families.models.build(Spec())
    applied = lowtide.apply(model, FIFTH)
    assert "executor compile" in str(applied)
    assert {r.reason for r in applied.regions} == {"the compiler chooses"}
    with pytest.raises(
        RefusedError, match=r"layers\.0: a memory budget is for compiled blocks, and this one runs eagerly"
    ):
        families.spec_step(model, 0, spec=Spec())
    with torch.no_grad():
        model(families.models.tokens(Spec()))


@needs_budget
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (Spec(dropout=0.1, attention="plain"), r"draws random numbers, and under a memory budget"),
    ],
)
def test_what_pytorch_would_get_wrong_is_refused(spec, says):
    model = families.models.build(spec)
    lowtide.apply(model, FIFTH)
    model.layers[0].compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=says) as caught:
        families.spec_step(model, 0, spec=spec)
    assert isinstance(find_error(caught.value), RefusedError)
    assert all(p.grad is None for p in model.parameters())


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 8)
        self.layers = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, _ = self.score(x).topk(2, dim=-1)
        return x * weights.sum(-1, keepdim=True)


@needs_budget
def test_routing_is_refused():
    model = nn.Sequential(Router(), Router())
    lowtide.apply(model, {**FIFTH, "layers": "*"})
    model[0].compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="could decide twice") as caught:
        model(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert isinstance(find_error(caught.value), RefusedError)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fraction": 1.0}, "less than 1"),
        ({"fraction": 0}, "greater than 0"),
        ({"fraction": float("nan")}, "policy.fraction"),
        ({"executor": "replay"}, "`executor` has no meaning here"),
        ({"preserve_rng": False}, "`preserve_rng` has no meaning here"),
        ({"fractoin": 0.5}, "Did you mean 'fraction'?"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, says):
    with pytest.raises(PolicyError) as error:
        parse_policy({**FIFTH, **change})
    assert says in str(error.value)


def test_it_cannot_be_written_as_rules():
    with pytest.raises(PolicyError, match="the compiler chooses"):
        expand(parse_policy(FIFTH), [])


@pytest.mark.skipif(HAS_BUDGET, reason="this torch has it")
def test_a_torch_without_it_refuses_at_apply():
    with pytest.raises(RefusedError, match=r"no budget for one graph \(it came with 2\.13\)"):
        lowtide.apply(families.models.build(Spec()), FIFTH)
