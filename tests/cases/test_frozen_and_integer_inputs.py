"""Regions whose inputs need no gradient: parameters inside still get theirs, without warnings."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.helpers import families, law, models
from tests.helpers.families import FULL, both, spec_step
from tests.helpers.models import Spec

SPEC = Spec(dropout=0.1)


def _frozen(*parts: str) -> nn.Module:
    model = models.build(SPEC)
    for part in parts:
        model.get_submodule(part).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "parts", [("embed",), ("embed", "layers.0"), ("layers.1.attention",), ("embed", "head", "norm")], ids=str
)
@both
def test_frozen_parts(policy, parts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = law.assert_law(partial(_frozen, *parts), partial(spec_step, spec=SPEC), policy)
    assert all(g is not None for n, g in found.gradients[0].items() if n.startswith("layers.2"))


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank addition."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _adapted() -> nn.Module:
    model = models.build(SPEC).requires_grad_(False)
    torch.manual_seed(3)
    for block in model.layers:
        block.attention.q = Adapted(block.attention.q)
        block.feed.up = Adapted(block.feed.up)
    return model


@both
def test_low_rank_adapters_on_a_frozen_model(policy):
    found = law.assert_law(_adapted, partial(spec_step, spec=SPEC), policy)
    trained = [n for n, g in found.gradients[0].items() if g is not None]
    assert len(trained) == 3 * 2 * 2
    assert all("down" in n or "up" in n for n in trained)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(64, 32), nn.RMSNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.table(tokens))


class WithEmbeddingRegion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embed = Embedding()
        self.layers = nn.ModuleList(models.Block(SPEC) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.table.weight.t()


def test_the_embedding_itself_as_a_region_with_integer_inputs():
    found = law.assert_law(WithEmbeddingRegion, spec_step, {"kind": "full", "layers": ["embed", "layers.*"]})
    assert [r.fqn for r in found.applied.regions] == ["embed", "layers.0", "layers.1"]
    assert found.gradients[0]["embed.norm.weight"] is not None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@both
def test_hugging_face_models_with_frozen_embeddings(family, policy):
    def build() -> nn.Module:
        model = families.build(family, dropout=True)
        model.get_input_embeddings().requires_grad_(False)
        return model

    law.assert_law(build, families.step, policy)


def test_a_region_of_which_nothing_needs_a_gradient_costs_nothing():
    model = models.build().requires_grad_(False)
    model.head.requires_grad_(True)
    calls: list[int] = []
    model.layers[0].feed.register_forward_pre_hook(lambda m, a: calls.append(1))
    lowtide.apply(model, {**FULL, "layers": "layers.*"})
    spec_step(model, 0)
    assert calls == [1]
    assert model.head.weight.grad is not None
