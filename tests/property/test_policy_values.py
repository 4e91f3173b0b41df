"""Policies as values: any input parses or is refused, shares are exact, everything survives a round trip."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from fractions import Fraction

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lowtide.errors import NothingMatchedError, PolicyError
from lowtide.policy import (
    Block,
    EveryNthLayer,
    Full,
    Keep,
    NoPolicy,
    Rule,
    Rules,
    SaveRule,
    SelectiveOp,
    SomeLayers,
    parse_policy,
    resolve,
)

KINDS = ("none", "full", "every_nth_layer", "some_layers", "selective_op", "rules")
KEYS = (
    "kind",
    "layers",
    "n",
    "checkpoint",
    "save",
    "default",
    "rules",
    "executor",
    "preserve_rng",
    "determinism",
    "allow_inexact",
)
INNER_KEYS = ("op", "keep", "optional", "m", "calls", "modules", "name", "action")
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3),
    st.sampled_from([*KINDS, *KEYS, "1/2", "2/1", "always", "aten.mm", "matmul", "layers.*", "auto"]),
)  # fmt: skip
JSONISH = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*KEYS, *KINDS, *INNER_KEYS]) | SCALARS,
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
MAPPINGS = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), JSONISH, max_size=6)

SHARES = st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda p: f"{min(p)}/{max(p)}")
COMMON = {
    "layers": st.none()
    | st.lists(st.sampled_from(["layers.*", "**.h.{0-3}", "a.{-1}"]), min_size=1, max_size=2).map(tuple),
    "executor": st.sampled_from(["auto", "recompute"]),
    "preserve_rng": st.booleans(),
    "determinism": st.sampled_from(["default", "strict"]),
    "allow_inexact": st.booleans(),
}
RULES = st.builds(
    SaveRule,
    op=st.sampled_from(["aten.mm", "aten.mm.default", "matmul", "sdpa", "lab.silu"]),
    keep=st.just(Keep()) | SHARES.map(Keep.model_validate),
    optional=st.booleans(),
)
GLOBS = st.none() | st.lists(st.sampled_from(["mlp", "**.router", "attn.*"]), min_size=1, max_size=2).map(tuple)
ACTIONS = st.sampled_from(["save", "recompute"])
FULL_RULES = st.one_of(
    st.builds(
        Rule,
        modules=GLOBS,
        op=st.sampled_from(["aten.mm", "sdpa", "lab.silu"]),
        action=st.just("save"),
        keep=st.just(Keep()) | SHARES.map(Keep.model_validate) | st.just(Keep(calls=(0, 3))),
        optional=st.booleans(),
    ),
    st.builds(
        Rule, modules=GLOBS, name=st.sampled_from(["ffn_in", "q"]), action=st.sampled_from(["save", "recompute"])
    ),
    st.builds(Rule, layers=st.just(("layers.{0-3}",)), action=st.sampled_from(["none", "save", "recompute"])),
)
POLICIES = st.one_of(
    st.builds(Rules, default=st.just("recompute"), rules=st.lists(FULL_RULES, max_size=3).map(tuple), **COMMON),
    st.builds(NoPolicy),
    st.builds(Full, **COMMON),
    st.builds(EveryNthLayer, n=st.integers(1, 100), **COMMON),
    st.builds(
        SomeLayers,
        checkpoint=SHARES | st.lists(st.integers(0, 99), min_size=1, unique=True).map(tuple),
        **COMMON,
    ),
    st.builds(SelectiveOp, save=st.lists(RULES, min_size=1, max_size=3).map(tuple), **COMMON),
)


@given(MAPPINGS | JSONISH)
def test_parsing_anything_gives_a_policy_or_a_policy_error(value):
    with contextlib.suppress(PolicyError):
        policy = parse_policy(value)
        assert parse_policy(policy) is policy


@given(st.sampled_from(KINDS), MAPPINGS)
def test_parsing_a_known_kind_with_any_other_keys_is_no_surprise(kind, value):
    with contextlib.suppress(PolicyError):
        assert parse_policy({**value, "kind": kind}).kind == kind


@given(JSONISH)
def test_constructing_from_anything_gives_a_policy_or_a_validation_error(value):
    for make in (lambda: SelectiveOp(save=value), lambda: EveryNthLayer(n=value),
                 lambda: SomeLayers(checkpoint=value),
                 lambda: Full(layers=value), lambda: Keep.model_validate(value)):  # fmt: skip
        with contextlib.suppress(ValidationError):
            make()


@given(POLICIES)
def test_every_policy_survives_json_yaml_pickle_and_copies(policy):
    data = policy.model_dump(mode="json")
    again = [
        parse_policy(data),
        parse_policy(json.loads(policy.model_dump_json())),
        parse_policy(yaml.safe_load(yaml.safe_dump(data))),
        parse_policy(policy.model_dump()),
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
    ]
    for other in again:
        assert other == policy
        assert hash(other) == hash(policy)
        assert type(other) is type(policy)


@given(POLICIES, POLICIES)
def test_equal_means_the_same_fields_and_the_same_hash(a, b):
    assert (a == b) == (a.model_dump() == b.model_dump())
    if a == b:
        assert hash(a) == hash(b)


@given(POLICIES)
def test_a_policy_cannot_be_changed(policy):
    with pytest.raises(ValidationError):
        policy.kind = "full"


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 300))
def test_keep_saves_the_first_m_of_every_n_calls_exactly(a, b, calls):
    m, n = min(a, b), max(a, b)
    keep = Keep(m=m, n=n)
    kept = [keep.keeps(i) for i in range(calls)]
    assert sum(kept) == (calls // n) * m + min(calls % n, m)
    for start in range(0, calls - n + 1, n):
        assert kept[start : start + n] == [True] * m + [False] * (n - m)
    assert abs(sum(kept) - calls * Fraction(m, n)) < n


@st.composite
def block_lists(draw: st.DrawFn) -> list[Block]:
    stacks = draw(
        st.lists(st.sampled_from(["layers", "model.layers", "encoder.h", "groups.0"]), min_size=1, unique=True)
    )
    blocks: list[Block] = []
    for stack in stacks:
        indices = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=8)))
        blocks += [Block(f"{stack}.{i}", stack, position) for position, i in enumerate(indices)]
    return blocks


@given(block_lists(), st.integers(1, 9))
def test_every_nth_layer_goes_by_the_index_and_nothing_else(blocks, n):
    expected = {b.fqn for b in blocks if int(b.fqn.rsplit(".", 1)[1]) % n == 0}
    policy = EveryNthLayer(n=n)
    if not expected:
        with pytest.raises(NothingMatchedError):
            resolve(policy, blocks)
        return
    for order in (blocks, blocks[::-1]):
        found = resolve(policy, order)
        assert {r.block.fqn for r in found.regions} == expected
        assert found.total == len(blocks)
        assert {b.fqn for b in found.untouched} == {b.fqn for b in blocks} - expected


@given(block_lists(), SHARES)
def test_a_share_of_layers_goes_by_the_index_modulo_q(blocks, share):
    p, q = map(int, share.split("/"))
    expected = [b.fqn for b in blocks if b.index % q < p]
    if not expected:
        with pytest.raises(NothingMatchedError):
            resolve(SomeLayers(checkpoint=share), blocks)
        return
    assert [r.block.fqn for r in resolve(SomeLayers(checkpoint=share), blocks).regions] == expected


@given(block_lists(), st.data())
def test_a_list_of_layers_is_met_exactly_or_refused(blocks, data):
    present = sorted({b.index for b in blocks})
    wanted = data.draw(st.lists(st.integers(0, 45), min_size=1, max_size=5, unique=True))
    policy = SomeLayers(checkpoint=tuple(wanted))
    if not set(wanted) <= set(present):
        with pytest.raises(PolicyError, match="no block has index"):
            resolve(policy, blocks)
        return
    assert [r.block.fqn for r in resolve(policy, blocks).regions] == [b.fqn for b in blocks if b.index in wanted]


@given(block_lists())
def test_full_and_selective_take_all_and_none_takes_nothing(blocks):
    rules = (SaveRule(op="aten.mm", keep=Keep(m=1, n=2)),)
    assert [r.rules for r in resolve(Full(), blocks).regions] == [()] * len(blocks)
    as_rules = ((0, Rule(op="aten.mm", action="save", keep=Keep(m=1, n=2))),)
    assert [r.rules for r in resolve(SelectiveOp(save=rules), blocks).regions] == [as_rules] * len(blocks)
    nothing = resolve(NoPolicy(), blocks)
    assert nothing.regions == ()
    assert nothing.total == len(blocks)
