"""Context parallel on two ranks, each with a part of the sequence: keys and values are gathered, or passed round."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

import lowtide
from tests.helpers import law, models, ops
from tests.helpers.models import Spec

FULL = {"kind": "full"}
POLICIES: dict[str, dict[str, Any]] = {
    "full": FULL,
    "selective": {"kind": "selective_op", "save": ["sdpa", {"op": "matmul", "keep": "1/2"}]},
    "collectives": {"kind": "selective_op", "save": ["collective"]},
    "attention": {"kind": "rules", "default": "save", "rules": [{"modules": "attention", "action": "recompute"}]},
}
GATHER = "_c10d_functional.all_gather_into_tensor"


class Gathering(models.Attention):
    """Queries stay; keys and values of all ranks are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        batch, part, _ = x.shape
        q, k, v = (f(x).view(batch, part, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (all_gather_tensor_autograd(t.contiguous(), 2, dist.group.WORLD) for t in (k, v))
        rows = torch.arange(part) + dist.get_rank() * part
        mask = rows[:, None] >= torch.arange(k.shape[2])[None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).reshape(batch, part, -1))


def _build() -> nn.Module:
    torch.manual_seed(11)
    model = models.build(Spec(kv_heads=4))
    for block in model.layers:
        attention = Gathering(model.spec)
        attention.load_state_dict(block.attention.state_dict())
        block.attention = attention
    return model


def _forward(model: nn.Module, i: int = 0) -> Tensor:
    tokens = models.tokens(step=i).chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    return models.loss_of(model(tokens), tokens)


def _step(model: nn.Module, i: int) -> Tensor:
    loss = _forward(model, i)
    loss.backward()
    return loss


def _check(executor: str) -> dict[str, tuple[list[str], int]]:
    """For each policy: what differed, and how many gathers backward ran again."""
    control = law.check_control(_build, _step, steps=2)
    found: dict[str, tuple[list[str], int]] = {}
    for name, policy in POLICIES.items():
        policy = {**policy, "executor": executor}
        outcome = law.run_steps(_build, _step, policy, steps=2)
        plain, model = _build(), _build()
        lowtide.apply(model, policy)
        for i in range(2):
            _step(model, i)
        again = ops.only(ops.ran_again(partial(_forward, plain), partial(_forward, model)), GATHER)
        found[name] = law.differences(control, outcome), sum(again.values())
    return found


@pytest.mark.parametrize("executor", ["recompute", "replay"])
def test_gathered_keys_and_values_are_exact(run_on, executor):
    for found in run_on(2, _check, executor):
        assert {name: differing for name, (differing, _) in found.items() if differing} == {}
        # Keys and values, in three blocks.
        assert {name: again for name, (_, again) in found.items()} == {
            "full": 6,
            "selective": 6,
            "collectives": 0,
            "attention": 6,
        }


def _ring() -> str:
    """Torch's ring attention in a region, with backward inside of the context, as its users write it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def run(policy: Any) -> dict[str, Tensor]:
        model = models.build(Spec(kv_heads=4))
        if policy is not None:
            lowtide.apply(model, policy)
        tokens = models.tokens()
        targets = tokens.clone()
        with context_parallel(mesh, buffers=[tokens, targets], buffer_seq_dims=[1, 1]):
            models.loss_of(model(tokens), targets).backward()
        return {n: law.local(p.grad) for n, p in model.named_parameters() if p.grad is not None}

    try:
        control, twice = run(None), run(None)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    assert all(law.same_bits(control[n], twice[n]) for n in control)
    for executor in ("recompute", "replay"):
        for policy in (FULL, POLICIES["selective"]):
            found = run({**policy, "executor": executor})
            assert [n for n in control if not law.same_bits(control[n], found[n])] == []
    return "exact"


def test_ring_attention_is_exact_where_torch_has_it(run_on):
    said = run_on(2, _ring)
    if said[0] != "exact":
        pytest.skip(f"torch's ring attention does not run on a CPU here, without a policy either: {said[0]}")
    assert said == ["exact", "exact"]
