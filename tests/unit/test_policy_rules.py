"""Kind ``rules`` as a value: what may be said, what it comes to in each block, and that short kinds are rules too."""

from __future__ import annotations

import pytest

from lowtide.errors import NothingMatchedError, PolicyError
from lowtide.policy import (
    Block,
    EveryNthLayer,
    Full,
    Keep,
    Rule,
    Rules,
    SelectiveOp,
    SomeLayers,
    expand,
    named_policy,
    parse_policy,
    preset_names,
    resolve,
)

BLOCKS = [Block(f"model.layers.{i}", "model.layers", i) for i in range(6)]
INSIDE = ["attn", "attn.q", "attn.o", "mlp", "mlp.up", "mlp.down", "norm"]


def inside(block: Block) -> list[str]:
    return INSIDE


def resolved(default: str, *rules: dict) -> dict[str, tuple[str, list[tuple[int, str]]]]:
    """Region -> (default, [(number, rule)])."""
    policy = parse_policy({"kind": "rules", "default": default, "rules": list(rules)})
    found = resolve(policy, BLOCKS, inside)
    return {r.fqn: (r.default, [(n, str(rule)) for n, rule in r.rules]) for r in found.regions}


REFUSED = [
    ({"action": "save"}, "everything"),
    ({"action": "none"}, "needs `layers`"),
    ({"action": "none", "layers": "a.*", "op": "aten.mm"}, "takes no `modules`, `op` or `name`"),
    ({"action": "recompute", "op": "aten.mm", "keep": "1/2"}, "no meaning with `action: recompute`"),
    ({"action": "save", "op": "aten.mm", "name": "x"}, "not both"),
    ({"action": "save", "name": "x", "keep": [1]}, "write a share for names"),
    ({"action": "save", "name": "  "}, "empty name"),
    ({"action": "save", "op": "aten mm"}, "not an operator name"),
    ({"action": "save", "op": "aten.mm", "keep": []}, "different numbers"),
    ({"action": "save", "op": "aten.mm", "keep": [1, 1]}, "different numbers"),
    ({"action": "save", "op": "aten.mm", "keep": [-1]}, "different numbers"),
    ({"action": "save", "op": "aten.mm", "keep": [0.0]}, "whole number"),
    ({"action": "save", "modules": []}, "matches nothing"),
    ({"action": "save", "modules": "a..b"}, "a..b"),
    ({"action": "keep", "op": "aten.mm"}, "'save', 'recompute'"),
    ({"action": "save", "operator": "aten.mm"}, "unknown key"),
    ({"op": "aten.mm"}, "action"),
]


@pytest.mark.parametrize(("rule", "says"), REFUSED)
def test_what_cannot_be_meant_is_refused_with_its_place(rule, says):
    with pytest.raises(PolicyError) as error:
        parse_policy({"kind": "rules", "default": "recompute", "rules": [rule]})
    assert says in str(error.value)
    assert "policy.rules.0" in str(error.value)


def test_a_default_is_required_and_save_alone_does_nothing():
    with pytest.raises(PolicyError, match=r"policy\.default"):
        parse_policy({"kind": "rules", "rules": []})
    with pytest.raises(PolicyError, match="does nothing; write `kind: none`"):
        parse_policy({"kind": "rules", "default": "save", "rules": [{"op": "aten.mm", "action": "save"}]})


def test_the_first_rule_decides_and_what_stands_behind_everything_goes():
    found = resolved(
        "recompute",
        {"layers": "**.{0-1}", "action": "recompute"},
        {"layers": "**.{2-4}", "op": "sdpa", "action": "save"},
        {"op": "aten.mm", "action": "save", "keep": "1/2"},
        {"layers": "**.{-1}", "action": "none"},
    )
    half = (2, "save 1/2: op aten.mm")
    assert found == {
        "model.layers.0": ("recompute", []),
        "model.layers.1": ("recompute", []),
        **{f"model.layers.{i}": ("recompute", [(1, "save: op sdpa"), half]) for i in (2, 3, 4)},
    }


def test_under_default_save_a_region_shrinks_to_the_modules_that_recompute():
    assert resolved("save", {"modules": "mlp", "layers": "**.{0}", "action": "recompute"}) == {
        "model.layers.0.mlp": ("recompute", [])
    }
    found = resolved(
        "save",
        {"modules": "mlp.up", "op": "aten.mm", "action": "save"},
        {"modules": ["mlp", "mlp.up"], "action": "recompute", "layers": "**.{0}"},
    )
    assert found == {
        "model.layers.0.mlp": ("recompute", [(0, "save: op aten.mm in modules mlp.up")]),
    }


def test_under_default_save_a_rule_on_operators_takes_the_whole_block():
    found = resolved("save", {"op": "aten.silu", "action": "recompute"}, {"modules": "mlp", "action": "recompute"})
    assert found["model.layers.0"] == (
        "save",
        [(0, "recompute: op aten.silu"), (1, "recompute: in modules mlp")],
    )


def test_blocks_in_which_all_is_saved_become_no_regions():
    found = resolved(
        "recompute",
        {"layers": "**.{0-3}", "action": "save"},
        {"op": "aten.mm", "action": "save"},
    )
    assert list(found) == ["model.layers.4", "model.layers.5"]


def test_patterns_that_match_nothing_say_what_there_is():
    with pytest.raises(NothingMatchedError, match=r"rules\.0\.layers: 'layers\.\*' matches no block.*model\.layers\.5"):
        resolved("recompute", {"layers": "layers.*", "op": "aten.mm", "action": "save"})
    with pytest.raises(NothingMatchedError, match=r"rules\.0\.modules: 'mpl' matches no module.*mlp"):
        resolved("save", {"modules": "mpl", "action": "recompute"})
    assert resolved(
        "recompute",
        {"layers": "layers.*", "action": "none", "optional": True},
        {"modules": "mpl", "action": "save", "optional": True},
    )["model.layers.0"] == ("recompute", [])


@pytest.mark.parametrize(
    "policy",
    [
        Full(),
        EveryNthLayer(n=2),
        SomeLayers(checkpoint="2/3"),
        SomeLayers(checkpoint=(0, 5)),
        SelectiveOp(save=({"op": "aten.mm", "keep": "1/2"}, "sdpa"), preserve_rng=False),
    ],
    ids=str,
)
def test_every_kind_is_short_for_rules(policy):
    written = expand(policy, BLOCKS)
    assert isinstance(written, Rules)
    short, long = resolve(policy, BLOCKS, inside), resolve(written, BLOCKS, inside)
    assert [r.fqn for r in long.regions] == [r.fqn for r in short.regions]
    assert [[rule for _, rule in r.rules] for r in long.regions] == [
        [rule for _, rule in r.rules] for r in short.regions
    ]
    assert [r.default for r in long.regions] == [r.default for r in short.regions]
    assert long.untouched == short.untouched
    assert parse_policy(written.model_dump(mode="python")) == written


def test_a_list_of_calls_keeps_those_and_no_others():
    keep = Keep.model_validate([3, 0])
    assert [keep.keeps(i) for i in range(6)] == [True, False, False, True, False, False]
    assert keep.written() == [0, 3]
    assert not keep.always
    assert str(Rule(op="aten.mm", action="save", keep=keep)) == "save calls 0, 3: op aten.mm"


def test_presets_are_ordinary_policies():
    assert preset_names() == ("megatron_selective", "pointwise_only", "save_attention", "torchtitan")
    for name in preset_names():
        assert parse_policy(name) == parse_policy(named_policy(name))
        assert isinstance(parse_policy(name), Rules)
    with pytest.raises(PolicyError, match=r"got 'torchtiran'.*Presets: .*torchtitan.*Did you mean 'torchtitan'"):
        parse_policy("torchtiran")
