"""Sharding sees the blocks through a policy and a compile, in either order (field case 15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import lowtide
from tests.helpers.training import POLICIES, batch, build, full_gradients, loss_of, mean_gradients, prepare


def _units_and_differences(order: str, policy: str) -> tuple[list[str], list[str]]:
    models = [build() for _ in range(dist.get_world_size())]
    for rank, reference in enumerate(models):
        loss_of(reference, batch(rank)).backward()
    expected = mean_gradients(*models)
    model: Any
    if order == "sharded, policy":
        model = prepare(build(), sharding="fsdp2").model
        lowtide.apply(model, POLICIES[policy])
    elif order == "policy, sharded":
        model = build()
        lowtide.apply(model, POLICIES[policy])
        model = prepare(model, sharding="fsdp2", policy=policy).model
    else:
        torch._dynamo.reset()
        options = {"backend": "aot_eager", "fullgraph": True}
        model = prepare(build(), sharding="fsdp2", policy=policy, compile_blocks=True, compile_options=options).model
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    loss_of(model, batch(dist.get_rank())).backward()
    found = full_gradients(model)
    return units, [n for n in expected if not torch.equal(found[n], expected[n])]


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("order", ["policy, sharded", "sharded, policy", "policy, compiled, sharded"])
def test_units_are_the_blocks_and_the_root_in_every_order(run_on, order, policy):
    units = ["", "layers.0", "layers.1", "layers.2"]
    assert run_on(2, _units_and_differences, order, policy) == [(units, [])] * 2
