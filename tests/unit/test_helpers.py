"""The check of the law can fail: what it must notice, it notices, on plain torch and without lowtide."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import law, models, ops
from tests.helpers.models import Spec

SPECS = {
    "plain": Spec(),
    "dropout": Spec(dropout=0.3),
    "bias": Spec(bias=True),
    "plain attention": Spec(attention="plain", dropout=0.2),
    "moe": Spec(feed="moe"),
    "batch norm": Spec(batch_norm=True),
    "dict": Spec(arguments="dict"),
    "kwargs": Spec(arguments="kwargs"),
    "tuple": Spec(outputs="tuple"),
    "dataclass": Spec(outputs="dataclass"),
    "named": Spec(outputs="named"),
    "gaps": Spec(stack="gaps"),
    "shared": Spec(stack="shared"),
    "nested": Spec(stack="nested"),
    "lazy table": Spec(table="lazy"),
    "buffer table": Spec(table="buffer"),
    "counter": Spec(counter=True),
    "bfloat16": Spec(dtype=torch.bfloat16, dropout=0.1),
}


def step(model: nn.Module, i: int, *, spec: Spec) -> torch.Tensor:
    tokens = models.tokens(spec, step=i)
    loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss


@pytest.mark.parametrize("name", SPECS)
def test_every_helper_model_trains_and_passes_its_control(name):
    spec = SPECS[name]
    law.check_control(partial(models.build, spec), partial(step, spec=spec), steps=2)


def _build_checkpointed(spec: Spec, **options: object) -> nn.Module:
    model = models.build(spec)
    for block in model.blocks():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return model


@pytest.mark.parametrize(
    ("name", "options", "notices"),
    [
        ("dropout", {"preserve_rng_state": False}, "gradient of"),
        ("counter", {}, "buffer layers.0.calls"),
        ("batch norm", {}, "buffer layers.0.batch_norm.running_mean"),
    ],
)
def test_the_check_notices_what_plain_checkpointing_gets_wrong(name, options, notices):
    spec = SPECS[name]
    run = partial(step, spec=spec)
    control = law.check_control(partial(models.build, spec), run)
    found = law.run_steps(partial(_build_checkpointed, spec, **options), run)
    assert any(notices in line for line in law.differences(control, found))


def test_the_check_passes_plain_full_checkpointing_with_dropout():
    spec = SPECS["dropout"]
    run = partial(step, spec=spec)
    control = law.check_control(partial(models.build, spec), run)
    assert law.differences(control, law.run_steps(partial(_build_checkpointed, spec), run)) == []


def test_a_negative_zero_is_a_difference_and_a_nan_is_none():
    zero, nan = torch.zeros(()), torch.full((), float("nan"))
    assert not law.same_bits(zero, -zero)
    assert law.same_bits(nan, nan.clone())
    assert not law.same_bits(zero, zero.double())


def test_bare_strips_wrappers_and_keeps_names_that_only_look_like_them():
    assert law.bare("module._orig_mod.layers.0._checkpoint_wrapped_module.attention.q.weight") == (
        "layers.0.attention.q.weight"
    )
    assert law.bare("layers.0.module.weight") == "layers.0.module.weight"


def test_operators_that_run_again_are_counted_by_name():
    spec = Spec(layers=2)
    tokens = models.tokens(spec)
    plain, checkpointed = models.build(spec), _build_checkpointed(spec)
    again = ops.ran_again(
        lambda: models.loss_of(plain(tokens), tokens), lambda: models.loss_of(checkpointed(tokens), tokens)
    )
    # Of 7 matrix products the last one is not needed: recompute stops early.
    assert ops.only(again, "aten.mm") == {"aten.mm.default": 12}
    assert ops.only(again, "aten._scaled_dot_product_flash_attention_for_cpu") == {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": 2
    }


def test_saved_bytes_counts_what_stays_and_each_storage_once():
    a = torch.randn(64, 64, requires_grad=True)

    def forward() -> torch.Tensor:
        b = a * 2  # needed by sin
        c = b.sin()  # the result, 1 view of it besides
        dead = torch.ones(1000)
        del dead
        return c.view(-1)

    assert ops.saved_bytes(forward) == 2 * 64 * 64 * 4
