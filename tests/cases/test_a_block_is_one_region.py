"""Field case 01: checkpointing saves far less than expected when a layer's children are wrapped, not the layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.measurement import SavedMeasurement, measure_saved_bytes
from tests.helpers import models

SPEC = models.Spec(layers=4)
BLOCK_INPUT = 4 * SPEC.batch * SPEC.length * SPEC.d


def _saved(prepare: Callable[[models.Decoder], object]) -> SavedMeasurement:
    model, tokens = models.build(SPEC), models.tokens(SPEC)
    prepare(model)
    # The step before settles what regions need.
    models.loss_of(model(tokens), tokens).backward()
    names = [f"layers.{i}" for i in range(SPEC.layers)]
    return measure_saved_bytes(model, lambda: models.loss_of(model(tokens), tokens), names)


def _wrap_children(model: models.Decoder) -> None:
    for block in model.blocks():
        for child in block.children():
            child.forward = functools.partial(checkpoint, child.forward, use_reentrant=False)


def test_a_matched_block_keeps_one_block_input() -> None:
    none = _saved(lambda model: None)
    children = _saved(_wrap_children)
    blocks = _saved(lambda model: lowtide.apply(model, lowtide.Full(layers="layers.*")))

    assert [b.saved_bytes for b in blocks.blocks] == [BLOCK_INPUT] * SPEC.layers
    assert blocks.rest_bytes == children.rest_bytes == none.rest_bytes
    # The residual stream, the norms' results and the attention's result stay alive between the children's regions.
    assert all(b.saved_bytes >= 3 * BLOCK_INPUT for b in children.blocks)
    assert blocks.total_bytes < children.total_bytes < none.total_bytes


def test_one_region_a_block_and_none_inside_another() -> None:
    model = models.build(SPEC)
    applied = lowtide.apply(model, lowtide.Full(layers="layers.*"))
    assert [r.fqn for r in applied.regions] == [f"layers.{i}" for i in range(SPEC.layers)]
    assert applied.blocks == SPEC.layers
    inside = [m for block in model.blocks() for m in block.modules() if m is not block and "forward" in m.__dict__]
    assert inside == []


def test_children_can_be_meant() -> None:
    model = models.build(SPEC)
    applied = lowtide.apply(model, lowtide.Full(layers="layers.*.feed"))
    assert [r.fqn for r in applied.regions] == [f"layers.{i}.feed" for i in range(SPEC.layers)]
    assert isinstance(model.layers[0].feed, nn.Module)
    assert torch.is_tensor(model(models.tokens(SPEC)))
