"""Rules of every sort on blocks that write in place, draw, name, sort and cast: exact with both executors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
from tests.helpers import law, replayed


def in_place(block: Any, x: Tensor) -> Tensor:
    return block.down(block.up(x).relu_().mul(2.0))


def in_place_on_a_view(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    h[:, :3].mul_(2.0)
    return block.down(h.tanh())


def batch_norm_and_dropout(block: Any, x: Tensor) -> Tensor:
    h = block.norm(block.up(x).reshape(-1, 64)).view(*x.shape[:-1], 64)
    return block.down(F.dropout(h, 0.3, block.training))


def one_module_twice(block: Any, x: Tensor) -> Tensor:
    return block.down(block.up(block.down(block.up(x).relu())).tanh())


def sorting(block: Any, x: Tensor) -> Tensor:
    values, places = block.up(x).sort(-1)
    return block.down(values * places.float().cos())


def names_on_views(block: Any, x: Tensor) -> Tensor:
    h = lowtide.checkpoint_name(block.up(x), "h")
    g = lowtide.checkpoint_name(h.transpose(-1, -2), "g")
    return block.down(h.tanh() + g.transpose(-1, -2))


def a_named_half(block: Any, x: Tensor) -> Tensor:
    a, c = block.up(x).chunk(2, -1)
    a = lowtide.checkpoint_name(a, "a")
    return block.down(torch.cat([a.sigmoid(), c.exp().clamp(max=3)], -1))


def a_part_without_gradient(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block.up(x).abs().mean()
    return block.down(block.up(x) * scale)


def autocast(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block.down(F.silu(block.up(x))).float()


BLOCKS = [
    in_place,
    in_place_on_a_view,
    batch_norm_and_dropout,
    one_module_twice,
    sorting,
    names_on_views,
    a_named_half,
    a_part_without_gradient,
    autocast,
]


def rules(default: str, *items: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "rules", "default": default, "rules": [{"optional": True, **item} for item in items]}


POLICIES = [
    rules("save", {"op": "aten.tanh", "action": "recompute"}, {"op": "aten.mul", "action": "recompute"}),
    rules("save", {"modules": "up", "action": "recompute"}),
    rules("save", {"modules": "norm", "action": "recompute"}, {"op": "aten.add", "action": "recompute"}),
    rules("recompute", {"modules": "up", "action": "save"}),
    rules(
        "recompute",
        {"name": "h", "action": "save"},
        {"name": "a", "action": "save"},
        {"op": "matmul", "action": "save", "keep": "1/2"},
    ),
    rules(
        "save",
        {"name": "h", "action": "recompute"},
        {"name": "g", "action": "save"},
        {"op": "aten.sigmoid", "action": "recompute"},
    ),
    rules("recompute", {"modules": "*", "action": "offload"}),
]


@pytest.mark.parametrize("executor", ["recompute", "replay"])
@pytest.mark.parametrize("function", BLOCKS, ids=lambda f: f.__name__)
def test_the_law(function, executor):
    control = law.check_control(partial(replayed.build, function), replayed.step, steps=3)
    for policy in POLICIES:
        law.assert_law(
            partial(replayed.build, function), replayed.step, {**policy, "executor": executor}, control=control, steps=3
        )
