"""A block that stands at several places is one block everywhere (field case 11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.training import batch, loss_of, prepare


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.inner(self.norm(x)))


class _Repeated(nn.Module):
    """ModuleList([b, b, c]), as in recursive transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        shared = _Layer()
        self.layers = nn.ModuleList([shared, shared, _Layer()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _TwoTowers(nn.Module):
    """One block under two parents."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        shared = _Layer()
        self.left = nn.ModuleDict({"layers": nn.ModuleList([_Layer(), shared])})
        self.right = nn.ModuleDict({"layers": nn.ModuleList([shared, _Layer()])})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        left = right = self.embed(tokens)
        for a, b in zip(self.left["layers"], self.right["layers"], strict=True):
            left, right = a(left), b(right)
        return self.head(left + right)


MODELS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "repeated": (_Repeated, ("layers.0", "layers.1"), ("layers.0", "layers.2")),
    "two towers": (
        _TwoTowers,
        ("left.layers.1", "right.layers.0"),
        ("left.layers.0", "left.layers.1", "right.layers.1"),
    ),
}


def _made(kind: str) -> nn.Module:
    torch.manual_seed(11)
    return MODELS[kind][0]()


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_all_places_hold_one_compiled_block_and_gradients_are_summed_once(kind, policy):
    torch._dynamo.reset()
    reference = _made(kind)
    loss_of(reference, batch(0)).backward()
    _, places, once = MODELS[kind]
    model = _made(kind)
    names = [n for n, _ in model.named_parameters()]
    fires: list[int] = []
    model.get_submodule(places[0]).inner.weight.register_post_accumulate_grad_hook(lambda p: fires.append(1))
    prepared = prepare(
        model,
        sharding="none",
        policy=policy,
        compile_blocks=True,
        compile_options={"backend": "aot_eager", "fullgraph": True},
    )
    assert prepared.compiled == once
    blocks = [model.get_submodule(place) for place in places]
    assert all(block is blocks[0] for block in blocks)
    assert blocks[0]._compiled_call_impl is not None
    assert type(blocks[0]) is _Layer
    assert [n for n, _ in model.named_parameters()] == names
    loss_of(prepared.model, batch(0)).backward()
    assert fires == [1]
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_region_is_one_for_all_places(kind):
    prepared = prepare(_made(kind), sharding="none", policy="full")
    assert tuple(r.fqn for r in prepared.applied.regions) == MODELS[kind][2]
    assert prepared.applied.blocks == len(MODELS[kind][2])
