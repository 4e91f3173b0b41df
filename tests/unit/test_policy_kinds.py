"""What can be written as a policy, and what is said about what cannot."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lowtide.errors import PolicyError, UserError
from lowtide.policy import (
    ALIASES,
    ROUTING_OPS,
    Block,
    EveryNthLayer,
    Full,
    Keep,
    NoPolicy,
    SaveRule,
    SelectiveOp,
    SomeLayers,
    parse_policy,
    resolve,
)


def test_each_kind_is_told_apart_by_its_name():
    assert parse_policy({"kind": "none"}) == NoPolicy()
    assert parse_policy({"kind": "full", "layers": "model.layers.*"}) == Full(layers=("model.layers.*",))
    assert parse_policy({"kind": "every_nth_layer", "n": 2}) == EveryNthLayer(n=2)
    assert parse_policy({"kind": "some_layers", "checkpoint": "3/4"}) == SomeLayers(checkpoint="3/4")
    assert parse_policy({"kind": "some_layers", "checkpoint": [5, 0, 1]}) == SomeLayers(checkpoint=(0, 1, 5))
    assert parse_policy({"kind": "selective_op", "save": ["sdpa", {"op": "matmul", "keep": "1/2"}]}) == SelectiveOp(
        save=(SaveRule(op="sdpa"), SaveRule(op="matmul", keep=Keep(m=1, n=2)))
    )


def test_one_rule_or_pattern_may_stand_without_a_list():
    assert SelectiveOp(save="aten.mm").save == (SaveRule(op="aten.mm"),)
    assert Full(layers="h.*").layers == ("h.*",)


def test_every_second_matmul_is_no_special_case():
    rule = SelectiveOp(save=[{"op": "aten.mm", "keep": "1/2"}]).save[0]
    assert [rule.keep.keeps(i) for i in range(7)] == [True, False, True, False, True, False, True]
    assert str(rule) == "aten.mm 1/2"
    assert str(SaveRule(op="sdpa")) == "sdpa"


REFUSED = [
    ({}, ["None is not a kind", "every_nth_layer"]),
    ({"kind": "ful"}, ["'ful' is not a kind", "Did you mean 'full'?"]),
    ({"kind": "Full"}, ["'Full' is not a kind", "Did you mean 'full'?"]),
    ({"kind": "selective"}, ["Did you mean 'selective_op'?"]),
    ({"kind": ["full"]}, ["is not a kind", "selective_op"]),
    ({"kind": "full", "layer": "a.*"}, ["policy.layer: unknown key", "Did you mean 'layers'?"]),
    ({"kind": "full", "full": True}, ["policy.full: unknown key", "layers"]),
    ({"kind": "full", 3: 4}, ["policy"]),
    ({"kind": "full", "save": ["aten.mm"]}, ["policy.save: unknown key"]),
    ({"kind": "none", "layers": ["a.*"]}, ["policy.layers: unknown key"]),
    ({"kind": "full", "layers": []}, ["policy.layers", "leave `layers` out"]),
    ({"kind": "full", "layers": "a..b"}, ["policy.layers", "'a..b'"]),
    ({"kind": "full", "executor": "replai"}, ["policy.executor", "'auto'", "'recompute'"]),
    ({"kind": "full", "determinism": "none"}, ["policy.determinism", "'default' or 'strict'"]),
    ({"kind": "every_nth_layer"}, ["policy.n", "required"]),
    ({"kind": "every_nth_layer", "n": 0}, ["policy.n", "greater than or equal to 1", "got 0"]),
    ({"kind": "every_nth_layer", "n": -1}, ["policy.n", "greater than or equal to 1"]),
    ({"kind": "every_nth_layer", "n": "two"}, ["policy.n", "integer", "'two'"]),
    ({"kind": "every_nth_layer", "n": 1.5}, ["policy.n", "1.5"]),
    ({"kind": "every_nth_layer", "n": True}, ["policy.n", "True"]),
    ({"kind": "every_nth_layer", "N": 2}, ["policy.N: unknown key", "Did you mean 'n'?"]),
    ({"kind": "some_layers", "checkpoint": "0/2"}, ["policy.checkpoint", "1 <= m <= n"]),
    ({"kind": "some_layers", "checkpoint": "3/2"}, ["policy.checkpoint", "1 <= m <= n"]),
    ({"kind": "some_layers", "checkpoint": "half"}, ["policy.checkpoint", "'half' is not a share"]),
    ({"kind": "some_layers", "checkpoint": []}, ["policy.checkpoint", "kind: none"]),
    ({"kind": "some_layers", "checkpoint": [-1]}, ["policy.checkpoint", "count from 0"]),
    ({"kind": "some_layers", "checkpoint": [1, 1]}, ["policy.checkpoint", "twice"]),
    ({"kind": "some_layers", "checkpoint": [True, 3]}, ["policy.checkpoint", "True"]),
    ({"kind": "some_layers", "checkpoint": 3}, ["policy.checkpoint", "3/4", "[0, 1, 5]"]),
    ({"kind": "some_layers", "checkpoint": 0.75}, ["policy.checkpoint", "3/4"]),
    ({"kind": "selective_op"}, ["policy.save", "required"]),
    ({"kind": "selective_op", "save": []}, ["policy.save", "at least 1"]),
    (
        {"kind": "selective_op", "save": [{"op": "aten.mm", "keeps": "1/2"}]},
        ["unknown key", "Did you mean 'keep'?"],
    ),
    (
        {"kind": "selective_op", "save": [{"op": "aten.mm", "keep": "2/1"}]},
        ["policy.save.0.keep", "1 <= m <= n"],
    ),
    ({"kind": "selective_op", "save": [{"op": "aten.mm", "keep": 0.5}]}, ["policy.save.0.keep", "1/2"]),
    (
        {"kind": "selective_op", "save": [{"op": "aten.mm", "keep": "never"}]},
        ["policy.save.0.keep", "'never'"],
    ),
    ({"kind": "selective_op", "save": [{"op": "aten::mm"}]}, ["policy.save.0.op", "'aten::mm'"]),
    ({"kind": "selective_op", "save": [7]}, ["policy.save.0"]),
]


@pytest.mark.parametrize(("value", "told"), REFUSED, ids=lambda v: str(v)[:60] if isinstance(v, dict) else "")
def test_what_cannot_be_meant_is_refused_with_the_path_and_what_is_legal(value, told):
    with pytest.raises(PolicyError) as caught:
        parse_policy(value)
    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [None, "full", 3, ["full"], Full])
def test_what_is_no_mapping_is_refused_with_the_kinds(value):
    with pytest.raises(PolicyError, match="a policy is a mapping with `kind`") as caught:
        parse_policy(value)
    assert "every_nth_layer" in str(caught.value)
    assert isinstance(caught.value, UserError)
    assert caught.value.exit_code == 2


def test_a_typo_in_a_constructor_is_refused_too():
    with pytest.raises(ValidationError):
        EveryNthLayer(n=2, layer="a.*")
    with pytest.raises(ValidationError):
        EveryNthLayer()  # an untagged union with an empty member would make this `full`


def test_an_index_is_the_last_number_in_the_name_else_the_position():
    assert Block("model.layers.12", "model.layers", 0).index == 12
    assert Block("groups.1.3", "groups.1", 3).index == 3
    assert Block("encoder.first", "encoder", 2).index == 2
    assert Block("layers.4.attention", "layers.4", 0).index == 4


def test_aliases_are_packets_and_do_not_overlap():
    packets = [p for group in ALIASES.values() for p in group]
    assert len(packets) == len(set(packets))
    assert all(p.count(".") == 1 for p in packets)
    # Overloads where others of the packet give no index: aten.max of all elements routes nothing.
    assert {p for p in ROUTING_OPS if p.count(".") == 2} == {"aten.max.dim", "aten.min.dim", "aten.median.dim"}
    assert {"aten.mm", "aten.addmm", "aten.bmm", "aten.linear", "aten._grouped_mm"} <= set(ALIASES["matmul"])


def test_resolve_carries_the_common_keys_to_every_region():
    blocks = [Block(f"layers.{i}", "layers", i) for i in range(3)]
    policy = Full(preserve_rng=False, determinism="strict", allow_inexact=True)
    for region in resolve(policy, blocks).regions:
        assert (region.preserve_rng, region.strict, region.allow_inexact) == (False, True, True)


def test_an_error_about_blocks_lists_what_there_is():
    blocks = [Block(f"layers.{i}", "layers", i) for i in (4, 5, 7)]
    with pytest.raises(PolicyError, match=r"no block has index 6; indices here: 4, 5, 7"):
        resolve(SomeLayers(checkpoint=[5, 6]), blocks)
