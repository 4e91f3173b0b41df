"""A model of three blocks around one function, and the law under executor ``replay``, with no fallback allowed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.helpers import law, models

SAVES = ["matmul", "sdpa", "aten.exp", "aten.mul", "aten.tanh", "aten.relu", "aten.add", "aten.clone", "aten.bernoulli",
         "aten.native_layer_norm", "aten.empty_like", "aten.sigmoid", "aten.rand_like", "aten._to_copy"]  # fmt: skip
POLICIES: dict[str, dict[str, Any]] = {
    "inputs": {"kind": "full", "executor": "replay"},
    "products": {"kind": "selective_op", "executor": "replay", "save": [{"op": "matmul", "keep": "1/2"}]},
    "all": {"kind": "selective_op", "executor": "replay", "save": [{"op": op, "optional": True} for op in SAVES]},
}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Function(nn.Module):
    """Three blocks; each adds ``function(block, x)`` to x."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], *, residual: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(FunctionBlock(function) for _ in range(3))
        self.head = nn.Linear(32, 64)
        self.residual = residual

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + 0.1 * layer(x).tanh() if self.residual else layer(x)
        return self.head(x)


class FunctionBlock(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("mean", torch.zeros(64))
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def build(function: Callable[[Any, Tensor], Tensor], **options: Any) -> Function:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4_256_233)
        return Function(function, **options)


def step(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss


def assert_replayed(function: Any, policy: Any, *, step: Any = step, **options: Any) -> law.Outcome:
    """Gradients, losses, buffers and random state as without a policy, and every region replayed."""
    built = function if isinstance(function, partial) else partial(build, function, **options)
    found = law.assert_law(built, step, policy)
    assert {(r.executor, r.reason) for r in found.applied.regions} == {("replay", "asked for")}
    return found


def one(function: Callable[[Any, Tensor], Any], policy: Any = None) -> tuple[nn.Module, nn.Module]:
    """A bare block and one under a policy, with equal weights, both in training."""
    bare, replayed = build(function), build(function)
    lowtide.apply(replayed, policy or POLICIES["inputs"])
    for block in (bare.layers[0], replayed.layers[0]):
        with torch.no_grad():
            block(torch.zeros(2, 16, 32))
    return bare.layers[0], replayed.layers[0]


def hidden(*, seed: int = 5, requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 16, 32, generator=generator).requires_grad_(requires_grad)
