"""The law in one process: five families, two precisions, dropout on and off, every kind of policy."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import lowtide
from lowtide.errors import NothingMatchedError
from tests.helpers import families, law
from tests.helpers.families import POLICIES


@cache
def _control(family: str, dtype: str, dropout: bool) -> law.Outcome:
    return law.check_control(families.builder(family, getattr(torch, dtype), dropout), families.step)


@pytest.mark.parametrize("cell", families.matrix(seed=11))
def test_gradients_are_bitwise_those_without_a_policy(cell):
    found = law.assert_law(
        families.builder(cell.family, getattr(torch, cell.dtype), cell.dropout),
        families.step,
        POLICIES[cell.policy],
        control=_control(cell.family, cell.dtype, cell.dropout),
    )
    expected = {
        "every second layer": 2,
        "every third layer": 1,
        "two layers in three": 2,
        "layers 0 and 2": 2,
    }
    assert len(found.applied.regions) == expected.get(cell.policy, 3)
    assert found.applied.blocks == 3


@pytest.mark.parametrize("family", families.FAMILIES)
def test_strict_determinism_changes_nothing(family):
    law.assert_law(
        families.builder(family, torch.float32, True),
        families.step,
        lowtide.SelectiveOp(save=[{"op": "matmul", "keep": "1/2"}], determinism="strict"),
        control=_control(family, "float32", True),
    )


def test_a_list_of_mm_on_gpt2_is_an_error_before_backward_that_names_addmm():
    model = families.build("gpt2")
    lowtide.apply(model, lowtide.SelectiveOp(save=["aten.mm"]))
    tokens = torch.arange(16)[None]
    with pytest.raises(NothingMatchedError, match=r"aten\.mm") as caught:
        families.logits_of(model, tokens)
    assert "aten.addmm" in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", ["decoder", "llama", "qwen3", "gemma"])
def test_a_list_of_addmm_on_models_without_biases_names_mm(family):
    model = families.build(family)
    lowtide.apply(model, lowtide.SelectiveOp(save=["aten.addmm"]))
    with pytest.raises(NothingMatchedError, match=r"aten\.addmm") as caught:
        families.logits_of(model, torch.arange(16)[None])
    assert "aten.mm" in str(caught.value)


def test_attention_with_dropout_has_no_kernel_here_and_the_rule_for_it_says_so():
    model = families.build("decoder", dropout=True)
    lowtide.apply(model, lowtide.SelectiveOp(save=["sdpa"]))
    with pytest.raises(NothingMatchedError, match="sdpa"):
        families.logits_of(model, torch.arange(16)[None])
