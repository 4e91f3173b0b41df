"""Expert parallel on two ranks: the all-to-alls of a region run again or are kept, and a router decides once."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

import lowtide
from tests.helpers import law, models, ops
from tests.helpers.models import Spec
from tests.helpers.sharded import ranked_seed

EXCHANGE = "_c10d_functional.all_to_all_single.default"


class Experts(nn.Module):
    """One expert a rank: tokens travel to the rank of the expert that the router chose, and back."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.router = nn.Linear(spec.d, dist.get_world_size(), bias=False)
        self.expert = models.SwiGLU(spec)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=dist.get_world_size())
        received = all_to_all_single(sent, None, None, dist.group.WORLD)
        away, here = sent.tolist(), received.tolist()
        tokens = all_to_all_single_autograd(flat[order], here, away, dist.group.WORLD)
        back = all_to_all_single_autograd(self.expert(tokens), away, here, dist.group.WORLD)
        out = torch.zeros_like(flat).index_copy(0, order, back)
        return (out * weight[:, None]).view_as(x)


def _build() -> nn.Module:
    torch.manual_seed(11)
    model = models.build(Spec(dropout=0.1))
    for block in model.layers:
        block.feed = Experts(model.spec)
    return model


def _step(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(seed=7919 + dist.get_rank(), step=i)
    loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss


def _forward(model: nn.Module) -> Tensor:
    torch.manual_seed(5 + dist.get_rank())
    tokens = models.tokens(seed=7919 + dist.get_rank())
    return models.loss_of(model(tokens), tokens)


POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "selective": {"kind": "selective_op", "save": [{"op": "matmul", "keep": "1/2"}]},
    "collectives": {"kind": "selective_op", "save": ["collective"]},
    "experts": {"kind": "rules", "default": "save", "rules": [{"modules": "feed", "action": "recompute"}]},
}


def _check(executor: str) -> dict[str, tuple[list[str], dict[str, int], int]]:
    """For each policy: what differed, the exchanges that backward ran again, and how often a router chose again."""
    control = law.check_control(_build, _step, seed=ranked_seed(), steps=2)
    found: dict[str, tuple[list[str], dict[str, int], int]] = {}
    for name, policy in POLICIES.items():
        policy = {**policy, "executor": executor}
        outcome = law.run_steps(_build, _step, policy, seed=ranked_seed(), steps=2)
        plain, model = _build(), _build()
        lowtide.apply(model, policy)
        for i in range(2):
            _step(model, i)
        again: Counter[str] = ops.ran_again(partial(_forward, plain), partial(_forward, model))
        chosen = sum(c for n, c in again.items() if n in ("aten.max.dim", "aten.sort.stable"))
        found[name] = law.differences(control, outcome), ops.only(again, EXCHANGE.rsplit(".", 1)[0]), chosen
    return found


def test_exact_and_routed_once_with_executor_recompute(run_on):
    """Three exchanges in each of three blocks: counts, there and back; no backward needs what came back last."""
    for found in run_on(2, _check, "recompute"):
        assert {name: differing for name, (differing, _, _) in found.items() if differing} == {}
        exchanges = {name: again.get(EXCHANGE, 0) for name, (_, again, _) in found.items()}
        assert exchanges == {"full": 9, "selective": 9, "collectives": 0, "experts": 9}
        assert {chosen for _, _, chosen in found.values()} == {0}


def test_exact_with_executor_replay(run_on):
    for found in run_on(2, _check, "replay"):
        assert {name: differing for name, (differing, _, _) in found.items() if differing} == {}
