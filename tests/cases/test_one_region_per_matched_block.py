"""A region is the block itself: never its children, never the container that holds it and is never called."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import NothingMatchedError, PolicyError
from lowtide.regions import Region, find_blocks
from tests.helpers import law, models, ops
from tests.helpers.models import Spec


def _regions(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), Region)]


@pytest.mark.parametrize("layers", [None, "layers.*", "layers.{0-3}", ["layers.{0-1}", "layers.{2-3}"], "*.*"])
def test_one_region_per_block_and_none_inside_another(layers):
    spec = Spec(layers=4)
    model = models.build(spec)
    policy = {"kind": "full"} if layers is None else {"kind": "full", "layers": layers}
    applied = lowtide.apply(model, policy)
    assert _regions(model) == [f"layers.{i}" for i in range(4)]
    assert [r.fqn for r in applied.regions] == _regions(model)
    assert str(applied).startswith("full: 4 of 4 blocks checkpointed (layers.{0-3})")


def test_the_bytes_alive_are_near_one_block_input_a_layer():
    def held(layers: int, policy: object) -> int:
        spec = Spec(layers=layers)
        model, tokens = models.build(spec), models.tokens(spec)
        if policy is not None:
            lowtide.apply(model, policy)
        return ops.saved_bytes(lambda: models.loss_of(model(tokens), tokens))

    one_input = 2 * 16 * 32 * 4
    assert held(5, {"kind": "full"}) - held(4, {"kind": "full"}) == one_input
    assert held(5, None) - held(4, None) > 10 * one_input


@pytest.mark.parametrize("children", ["layers.*.*", "**.attention", "layers.*.feed"])
def test_children_become_regions_only_where_a_pattern_names_them(children):
    model = models.build(Spec(layers=2))
    lowtide.apply(model, {"kind": "full", "layers": children})
    assert all(name.count(".") == 2 for name in _regions(model))


@pytest.mark.parametrize("layers", ["**", ["layers.*", "layers.*.attention"], ["layers.0", "layers.0.feed.up"]])
def test_overlapping_matches_are_refused(layers):
    with pytest.raises(PolicyError):
        lowtide.apply(models.build(), {"kind": "full", "layers": layers})


@pytest.mark.parametrize("stack", ["list", "gaps"])
def test_a_container_is_an_error_that_names_it_and_its_layers(stack):
    model = models.build(Spec(stack=stack))
    with pytest.raises(PolicyError, match=r"'layers' is a Module(List|Dict), which is never called") as caught:
        lowtide.apply(model, {"kind": "full", "layers": "layers"})
    assert "layers.*" in str(caught.value)
    assert _regions(model) == []


def test_the_effect_is_there_each_block_runs_twice():
    spec = Spec()
    calls: list[int] = []
    model = models.build(spec)
    for i, block in enumerate(model.layers):
        block.feed.register_forward_pre_hook(lambda m, a, i=i: calls.append(i))
    lowtide.apply(model, {"kind": "full"})
    tokens = models.tokens(spec)
    models.loss_of(model(tokens), tokens).backward()
    assert calls == [0, 1, 2, 2, 1, 0]


class _Deep(nn.Module):
    """Stacks in stacks, an embedding list that is no stack, experts inside layers, an adapter registry."""

    def __init__(self) -> None:
        super().__init__()
        spec = Spec(feed="moe")
        self.embeddings = nn.ModuleList(nn.Embedding(8, 32) for _ in range(2))
        self.groups = nn.ModuleList(nn.ModuleList(models.Block(spec) for _ in range(2)) for _ in range(2))
        self.stages = nn.ModuleDict({"4": models.Block(spec), "7": models.Block(spec)})
        self.adapters = nn.ModuleDict({"first": models.SwiGLU(spec), "second": models.SwiGLU(spec)})
        self.frozen = nn.ModuleList(models.Block(spec) for _ in range(2)).requires_grad_(False)
        self.trunk = nn.Sequential(OrderedDict(a=models.Block(spec), b=models.Block(spec), norm=nn.LayerNorm(32)))


def test_only_repeated_trainable_stacks_of_layers_are_found():
    assert [b.fqn for b in find_blocks(_Deep())] == [
        "groups.0.0", "groups.0.1", "groups.1.0", "groups.1.1", "stages.4", "stages.7", "trunk.a", "trunk.b",
    ]  # fmt: skip


def test_a_stack_with_a_placeholder_is_a_stack_and_its_experts_are_none():
    model = models.build(Spec(feed="moe"))
    model.layers[1] = nn.Identity()
    assert [b.fqn for b in find_blocks(model)] == ["layers.0", "layers.2"]
    model.layers[2] = nn.Identity()
    assert [b.fqn for b in find_blocks(model)] == ["layers.0"]


def test_a_model_without_a_stack_is_an_error_that_says_what_was_seen():
    with pytest.raises(NothingMatchedError, match="no repeated trainable stack"):
        lowtide.apply(nn.Sequential(nn.Linear(2, 2)), {"kind": "full"})
    with pytest.raises(NothingMatchedError, match="no repeated trainable stack"):
        lowtide.apply(nn.Linear(2, 2), {"kind": "full"})


def test_deleted_layers_are_skipped():
    def build() -> nn.Module:
        model = models.build(Spec(layers=4))
        del model.layers[1]
        return model

    def step(model: nn.Module, i: int) -> torch.Tensor:
        tokens = models.tokens(step=i)
        loss = models.loss_of(model(tokens), tokens)
        loss.backward()
        return loss

    found = law.assert_law(build, step, {"kind": "full"})
    assert len(found.applied.regions) == 3


def test_a_stack_whose_entry_is_none_is_handled():
    model = models.build(Spec(stack="gaps"))
    model.layers._modules["5"] = None
    assert [b.fqn for b in find_blocks(model)] == ["layers.4", "layers.7"]


def test_find_blocks_changes_nothing():
    model = models.build()
    find_blocks(model)
    assert _regions(model) == []
