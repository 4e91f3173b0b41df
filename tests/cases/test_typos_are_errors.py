"""A typo in a key, a block's name or a pattern: an error with what exists, never a policy that does nothing."""

from __future__ import annotations

import pytest

import lowtide
from lowtide.errors import NothingMatchedError, PolicyError
from lowtide.regions import find_blocks
from tests.helpers import families, models


@pytest.mark.parametrize(
    ("key", "meant"),
    [("layer", "layers"), ("preserve_rgn", "preserve_rng"), ("executer", "executor"), ("Layers", "layers")],
)
def test_an_unknown_key_names_the_nearest(key, meant):
    with pytest.raises(PolicyError, match=f"policy.{key}: unknown key.*Did you mean '{meant}'"):
        lowtide.apply(models.build(), {"kind": "full", key: "layers.*"})


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layer.*", "layers"),
        ("layrs.*", "layers"),
        ("model.layers.*", "layers"),
        ("layers.{3-7}", "layers"),
        ("layers.*.atention", "attention"),
        ("Block", "layers"),
        ("layers.3", "layers"),
    ],
)
def test_a_pattern_that_matches_nothing_lists_the_nearest_names(pattern, near):
    model = models.build()
    with pytest.raises(NothingMatchedError) as caught:
        lowtide.apply(model, {"kind": "full", "layers": pattern})
    assert repr(pattern) in str(caught.value)
    assert near in str(caught.value).replace(repr(pattern), "")
    assert all("forward" not in block.__dict__ for block in model.layers)


def test_one_pattern_of_several_that_matches_nothing_is_an_error_too():
    model = models.build()
    with pytest.raises(NothingMatchedError, match=r"layers\.\{5\}"):
        lowtide.apply(model, {"kind": "full", "layers": ["layers.{0-1}", "layers.{5}"]})
    assert all("forward" not in block.__dict__ for block in model.layers)


def test_the_summary_says_how_many_of_how_many():
    applied = lowtide.apply(models.build(), {"kind": "some_layers", "checkpoint": [1]})
    assert "1 of 3 blocks checkpointed (layers.1)" in str(applied)
    applied = lowtide.apply(models.build(), {"kind": "none"})
    assert "no block checkpointed" in str(applied)
    assert applied.regions == ()


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_blocks_of_every_family_are_found_by_themselves(family):
    prefix = {"decoder": "layers", "gpt2": "transformer.h"}.get(family, "model.layers")
    assert [b.fqn for b in find_blocks(families.build(family))] == [f"{prefix}.{i}" for i in range(3)]


def test_a_pattern_with_negative_indices_counts_from_the_end():
    applied = lowtide.apply(models.build(), {"kind": "full", "layers": "layers.{-1}"})
    assert [r.fqn for r in applied.regions] == ["layers.2"]
    assert applied.blocks == 1
