"""Names, classes and places under DDP, FSDP2 and FSDP1, in every order: those of the same wrappers alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import RefusedError
from tests.helpers import families, law, ops
from tests.helpers.identity import identity
from tests.helpers.sharded import WRAPS, ddp, fsdp2, ranked_seed, ranked_step

FULL = {"kind": "full"}
SELECTIVE = {"kind": "selective_op", "save": [{"op": "matmul", "keep": "1/2"}]}
KINDS = {"full": FULL, "selective_op": SELECTIVE}


def _compile_blocks(model: nn.Module) -> nn.Module:
    for block in families.blocks(model):
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def _names(wrap: str, policy: str, last: bool, family: str) -> list[tuple[str, Any, Any]]:
    """What differs between wrappers alone and wrappers with a policy, before and after a step."""
    bare, model = families.build(family), families.build(family)
    plain = WRAPS[wrap](bare)
    if not last:
        lowtide.apply(model, KINDS[policy])
    wrapped = WRAPS[wrap](model)
    if last:
        applied = lowtide.apply(wrapped, KINDS[policy])
        assert len(applied.regions) == 3
        assert all(law.bare(r.fqn) == r.fqn for r in applied.regions)
    found: list[tuple[str, Any, Any]] = []
    for _ in range(2):
        a, b = identity(plain), identity(wrapped)
        found += [(key, a[key], b[key]) for key in a if a[key] != b[key]]
        ranked_step(plain, 0)
        ranked_step(wrapped, 0)
    return found


@pytest.mark.parametrize("last", [False, True], ids=["apply first", "apply last"])
@pytest.mark.parametrize(
    ("wrap", "policy"),
    [("ddp", "selective_op"), ("fsdp2", "full"), ("fsdp2", "selective_op"), ("fsdp1", "full")],
)
def test_names_are_those_of_the_wrappers_alone(run_on, wrap, policy, last):
    assert run_on(2, _names, wrap, policy, last, "decoder") == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("last", [False, True], ids=["apply first", "apply last"])
@pytest.mark.parametrize("policy", KINDS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp2-bfloat16"])
def test_names_of_hugging_face_models(run_on, wrap, policy, last, family):
    assert run_on(2, _names, wrap, policy, last, family, preload=("transformers",)) == [[], []]


# Orders of three: apply, compile each block, shard. Baseline: compile, then shard.

Stage = Callable[[nn.Module], nn.Module]


def _three(order: str, policy: str) -> list[str]:
    stages: dict[str, Stage] = {"compile": _compile_blocks, "shard": fsdp2, "ddp": ddp}
    names = order.split()

    def build(with_policy: bool) -> nn.Module:
        model: nn.Module = families.build("decoder")
        for name in names:
            if name != "apply":
                model = stages[name](model)
            elif with_policy:
                lowtide.apply(model, KINDS[policy])
        return model

    options = {"seed": ranked_seed(), "steps": 2}
    control = law.check_control(partial(build, False), ranked_step, **options)
    assert identity(build(False)) == identity(build(True))
    return law.differences(control, law.run_steps(partial(build, True), ranked_step, **options))


@pytest.mark.parametrize("policy", KINDS)
@pytest.mark.parametrize(
    "order",
    ["apply compile shard", "compile apply shard", "compile shard apply", "apply compile ddp", "compile ddp apply"],
)
def test_every_order_of_apply_compile_and_shard(run_on, order, policy):
    assert run_on(2, _three, order, policy) == [[], []]


def _refused_inside_compiled() -> str:
    model = families.build("decoder")
    for block in model.layers:
        block.feed.compile(backend="eager")
    fsdp2(model)
    with pytest.raises(RefusedError, match=r"lowtide\.apply first"):
        lowtide.apply(model, SELECTIVE)
    return "refused"


def test_compiled_code_inside_blocks_is_refused_after_sharding_too(run_on):
    assert run_on(2, _refused_inside_compiled) == ["refused"] * 2


def _again(wrap: str) -> None:
    model = families.build("decoder")
    first = lowtide.apply(model, SELECTIVE)
    wrapped = WRAPS[wrap](model)
    second = lowtide.apply(wrapped, SELECTIVE)
    assert [r.fqn for r in second.regions] == [r.fqn for r in first.regions]
    with pytest.raises(RefusedError, match=r"remove\(\)"):
        lowtide.apply(wrapped, FULL)
    second.remove()
    bare = WRAPS[wrap](families.build("decoder"))
    assert identity(bare) == identity(wrapped)
    assert all("forward" not in block.__dict__ for block in families.blocks(model))


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "fsdp1"])
def test_apply_again_and_remove_see_through_wrappers(run_on, wrap):
    run_on(2, _again, wrap)


# Operators and collectives


def _ran_again(last: bool, policy: str) -> tuple[dict[str, int], dict[str, int]]:
    plain, model = fsdp2(families.build("decoder")), families.build("decoder")
    if last:
        lowtide.apply(fsdp2(model), KINDS[policy])
    else:
        lowtide.apply(model, KINDS[policy])
        fsdp2(model)
    ranked_step(model, 0)
    ranked_step(plain, 0)

    def forward(m: nn.Module) -> torch.Tensor:
        tokens = families.models.tokens()
        return families.models.loss_of(m(tokens), tokens)

    again = ops.ran_again(partial(forward, plain), partial(forward, model))
    communication = {n: c for n, c in again.items() if n.split(".")[0] in ("fsdp", "c10d", "_c10d_functional")}
    return communication, ops.only(again, "aten.mm")


@pytest.mark.parametrize("last", [False, True], ids=["apply first", "apply last"])
@pytest.mark.parametrize(("policy", "products"), [("full", 6), ("selective_op", 3)])
def test_recompute_gathers_nothing_again_and_runs_what_the_policy_says(run_on, policy, products, last):
    for communication, matmuls in run_on(2, _ran_again, last, policy):
        assert communication == {}
        assert matmuls == {"aten.mm.default": products * 3}


# Ways to train that share a backward or a gradient


def _accumulated(last: bool, policy: str) -> list[str]:
    def step(model: Any, i: int) -> torch.Tensor:
        model.set_requires_gradient_sync(False)
        ranked_step(model, 10 * i)
        model.set_requires_gradient_sync(True)
        return ranked_step(model, 10 * i + 1)

    build = families.builder("decoder", torch.float32, True)
    options = {"seed": ranked_seed(), "steps": 2, "wrap": WRAPS["fsdp2-bfloat16"]}
    control = law.check_control(build, step, **options)
    return law.differences(control, law.run_steps(build, step, KINDS[policy], apply_last=last, **options))


def _two_forwards(last: bool, policy: str) -> list[str]:
    """Two forwards, one backward: regions of both calls are open at once."""

    def step(model: nn.Module, i: int) -> torch.Tensor:
        tokens = [families.models.tokens(step=2 * i + j) for j in range(2)]
        losses = [families.models.loss_of(model(t), t) for t in tokens]
        (losses[0] + 2 * losses[1]).backward()
        return losses[0] + losses[1]

    build = families.builder("decoder", torch.float32, True)
    options = {"seed": ranked_seed(), "steps": 2, "wrap": fsdp2}
    control = law.check_control(build, step, **options)
    return law.differences(control, law.run_steps(build, step, KINDS[policy], apply_last=last, **options))


@pytest.mark.parametrize("last", [False, True], ids=["apply first", "apply last"])
@pytest.mark.parametrize("policy", KINDS)
@pytest.mark.parametrize("way", [_accumulated, _two_forwards])
def test_gradients_that_several_forwards_share(run_on, way, policy, last):
    assert run_on(2, way, last, policy) == [[], []]


def _nested(policy: str, last: bool, prefetch: bool) -> list[str]:
    """Units inside a block, with prefetch: their gathers run inside the region."""
    from torch.distributed.fsdp import fully_shard

    def wrap(model: Any) -> nn.Module:
        for block in model.layers:
            fully_shard(block.attention)
            fully_shard(block.feed)
            if prefetch:
                block.attention.set_modules_to_forward_prefetch([block.feed])
            fully_shard(block)
        return fully_shard(model)

    build = families.builder("decoder", torch.float32, True)
    options = {"seed": ranked_seed(), "steps": 2, "wrap": wrap}
    control = law.check_control(build, ranked_step, **options)
    try:
        found = law.run_steps(build, ranked_step, KINDS[policy], apply_last=last, **options)
    except RefusedError as error:
        return [] if "fully_shard" in str(error) else [str(error)]
    return law.differences(control, found)


@pytest.mark.parametrize("prefetch", [False, True], ids=["no prefetch", "prefetch"])
@pytest.mark.parametrize("last", [False, True], ids=["apply first", "apply last"])
@pytest.mark.parametrize("policy", KINDS)
def test_sharded_units_inside_a_region_are_exact_or_refused_by_name(run_on, policy, last, prefetch):
    assert run_on(2, _nested, policy, last, prefetch) == [[], []]
