"""Which layers are chosen depends on their index and on nothing that happened before in the process."""

from __future__ import annotations

import pytest
from torch import nn

import lowtide
from lowtide.errors import NothingMatchedError
from tests.helpers import models
from tests.helpers.models import Spec


def _chosen(model: nn.Module, policy: object) -> list[str]:
    return [r.fqn for r in lowtide.apply(model, policy).regions]


def test_a_second_model_gets_the_same_layers():
    policy = lowtide.EveryNthLayer(n=2)
    assert _chosen(models.build(), policy) == ["layers.0", "layers.2"]
    assert _chosen(models.build(), policy) == ["layers.0", "layers.2"]


def test_a_second_call_changes_nothing():
    model = models.build(Spec(layers=4))
    for _ in range(3):
        assert _chosen(model, lowtide.EveryNthLayer(n=3)) == ["layers.0", "layers.3"]


def test_a_policy_applied_removed_and_applied_chooses_the_same():
    model = models.build(Spec(layers=4))
    applied = lowtide.apply(model, lowtide.EveryNthLayer(n=2))
    applied.remove()
    assert _chosen(model, lowtide.EveryNthLayer(n=2)) == ["layers.0", "layers.2"]


@pytest.mark.parametrize(
    ("n", "expected"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (4, [0, 4]), (5, [0]), (99, [0])]
)
def test_layer_0_counts(n, expected):
    assert _chosen(models.build(Spec(layers=5)), lowtide.EveryNthLayer(n=n)) == [f"layers.{i}" for i in expected]


def test_stages_keep_the_global_indices():
    """Layers 4, 5 and 7 in a ModuleDict, as a pipeline split leaves them."""
    assert _chosen(models.build(Spec(stack="gaps")), lowtide.EveryNthLayer(n=2)) == ["layers.4"]
    assert _chosen(models.build(Spec(stack="gaps")), lowtide.SomeLayers(checkpoint=[5, 7])) == ["layers.5", "layers.7"]
    assert _chosen(models.build(Spec(stack="gaps")), lowtide.SomeLayers(checkpoint="2/4")) == ["layers.4", "layers.5"]


def test_two_stacks_count_alike():
    model = models.EncoderDecoder(Spec(layers=3))
    assert _chosen(model, lowtide.EveryNthLayer(n=2)) == ["encoder.0", "encoder.2", "decoder.0", "decoder.2"]


def test_choosing_nothing_is_an_error_that_lists_the_blocks():
    with pytest.raises(NothingMatchedError, match=r"layers\.5, layers\.7"):
        lowtide.apply(_odd_only(), lowtide.EveryNthLayer(n=2))


def _odd_only() -> nn.Module:
    model = models.build(Spec(stack="gaps"))
    del model.layers["4"]
    return model


def test_the_choice_is_said():
    applied = lowtide.apply(models.build(Spec(layers=5)), lowtide.EveryNthLayer(n=2))
    assert str(applied) == "every_nth_layer: 3 of 5 blocks checkpointed (layers.{0,2,4}), executor recompute"
    assert [(r.index, r.executor) for r in applied.regions] == [(0, "recompute"), (2, "recompute"), (4, "recompute")]
    assert all(r.reason for r in applied.regions)
