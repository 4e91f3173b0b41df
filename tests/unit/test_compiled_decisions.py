"""Under torch.compile every kind of policy decides as in eager code: the same products and attention run again."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import lowtide
from tests.helpers import families, models, ops

MM = "aten.mm.default"
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def rules(default: str, *items: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "rules", "default": default, "rules": list(items)}


POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "every second layer": {"kind": "every_nth_layer", "n": 2},
    "one layer": {"kind": "some_layers", "checkpoint": [1]},
    "attention, half of the products": {"kind": "selective_op", "save": ["sdpa", {"op": "matmul", "keep": "1/2"}]},
    "products": {"kind": "selective_op", "save": ["matmul"]},
    "calls by number": rules("recompute", {"op": "aten.mm", "action": "save", "keep": [0, 4]}),
    "attention again": rules("save", {"op": "sdpa", "action": "recompute"}),
    "feed-forward again": rules("save", {"modules": "feed", "action": "recompute"}),
    "by layers": rules(
        "recompute",
        {"layers": "**.{0}", "action": "recompute"},
        {"layers": "**.{1}", "op": "matmul", "action": "save", "keep": "1/3"},
        {"layers": "**.{-1}", "action": "none"},
    ),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled_backward(policy: Any) -> Counter[str]:
    """The operators that the compiled backwards of all blocks run in one step."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    ran: Counter[str] = Counter()

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counts = Counter(str(n.target) for n in graph.graph.nodes if n.op == "call_function")

        def run(*args: Any) -> Any:
            ran.update(counts)
            return graph.forward(*args)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    model = models.build()
    if policy is not None:
        lowtide.apply(model, policy)
    for block in model.layers:
        block.compile(backend=backend, fullgraph=True)
    families.spec_step(model, 0)
    return ran


@cache
def _bare() -> Counter[str]:
    return _compiled_backward(None)


def _eager(policy: Any) -> Counter[str]:
    plain, model = models.build(), models.build()
    lowtide.apply(model, policy)
    for i in range(2):
        families.spec_step(model, i)
    tokens = models.tokens()
    return ops.ran_again(lambda: models.loss_of(plain(tokens), tokens), lambda: models.loss_of(model(tokens), tokens))


LONG = ("one layer", "products", "calls by number", "attention again")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in LONG)) for n in POLICIES])
def test_the_compiled_backward_runs_again_what_the_eager_one_does(name):
    policy = POLICIES[name]
    bare, found = _bare(), _compiled_backward(policy)
    assert bare[MM] == 3 * 2 * 7
    eager = _eager(policy)
    # A kernel that can draw random numbers runs again inside an operator that puts their state back.
    attention = found["run_with_rng_state"] + found[SDPA]
    assert {"mm": found[MM] - bare[MM], "attention": attention} == {"mm": eager[MM], "attention": eager[SDPA]}
