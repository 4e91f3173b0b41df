"""Parameter groups, the rate of every step, clipping."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

import lowtide
from lowtide.training.model.kinds import DecoderConfig
from lowtide.training.optim import clip_gradients, matrix_names, parameter_groups, set_learning_rate
from lowtide.training.optim_kinds import AdamWConfig, ScheduleConfig, learning_rate_factor


def _decoder() -> nn.Module:
    return DecoderConfig(vocab_size=32, dim=16, layers=2, heads=2, tie_weights=True).build()


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[float, list[str]]]:
    by_id = {id(p): n for n, p in model.named_parameters()}
    return [(g["weight_decay"], [by_id[id(p)] for p in g["params"]]) for g in optimizer.param_groups]


def test_only_matrices_decay():
    model = _decoder()
    optimizer = AdamWConfig(weight_decay=0.2).build(model=model, matrices=matrix_names(model))
    (decay, matrices), (none, vectors) = _names(model, optimizer)
    assert (decay, none) == (0.2, 0.0)
    assert vectors == [
        "layers.0.attention_norm.weight",
        "layers.0.mlp_norm.weight",
        "layers.1.attention_norm.weight",
        "layers.1.mlp_norm.weight",
        "norm.weight",
    ]
    assert matrices == [n for n, p in model.named_parameters() if p.ndim == 2]
    assert matrices[0] == "embed.weight"


def test_groups_are_the_same_with_a_policy_and_compiled():
    plain = _decoder()
    expected = _names(plain, AdamWConfig().build(model=plain, matrices=matrix_names(plain)))
    model = _decoder()
    lowtide.apply(model, {"kind": "full"})
    assert _names(model, AdamWConfig().build(model=model, matrices=matrix_names(model))) == expected
    wrapped = torch.compile(model, backend="eager")
    assert matrix_names(wrapped) == matrix_names(plain)
    assert _names(model, AdamWConfig().build(model=wrapped, matrices=matrix_names(wrapped))) == expected


def test_frozen_parameters_are_left_out_and_no_group_is_empty():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].requires_grad_(False)
    groups = parameter_groups(model, matrices=matrix_names(model), weight_decay=0.1)
    assert [(g["weight_decay"], len(g["params"])) for g in groups] == [(0.0, 2)]


def test_a_flattened_matrix_still_decays():
    """FSDP1 shows a matrix as a vector: the names seen before decide."""
    model = nn.Linear(4, 4)
    matrices = matrix_names(model)
    model.weight = nn.Parameter(torch.zeros(16))
    first, second = parameter_groups(model, matrices=matrices, weight_decay=0.1)
    assert first["params"][0] is model.weight
    assert second["params"][0] is model.bias


def test_the_cosine_goes_from_peak_to_the_final_share_in_the_last_step():
    schedule = ScheduleConfig(warmup_steps=4, final_ratio=0.1)
    rates = [schedule.factor(s, steps=24) for s in range(24)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[23] == pytest.approx(0.1)
    middle = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 9 / 19))
    assert rates[13] == pytest.approx(middle)
    assert schedule.factor(1000, steps=24) == pytest.approx(0.1)


def test_constant_stays_at_the_peak():
    schedule = ScheduleConfig(kind="constant", warmup_steps=2)
    assert [schedule.factor(s, steps=5) for s in range(5)] == [0.5, 1.0, 1.0, 1.0, 1.0]


@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    final=st.floats(0, 1),
    kind=st.sampled_from(["cosine", "constant"]),
)
def test_rates_rise_then_fall_within_their_range(steps, warmup, final, kind):
    rates = [
        learning_rate_factor(s, steps=steps, warmup_steps=warmup, kind=kind, final_ratio=final)
        for s in range(steps + 3)
    ]
    assert all(0.0 < r <= 1.0 or (r == 0.0 == final) or r >= final for r in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    after = rates[warmup:]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(after))
    assert all(final - 1e-12 <= r <= 1.0 for r in after)


def test_the_rate_reaches_every_group():
    model = _decoder()
    optimizer = AdamWConfig(lr=1.0).build(model=model, matrices=matrix_names(model))
    set_learning_rate(optimizer, 0.125)
    assert [g["lr"] for g in optimizer.param_groups] == [0.125, 0.125]


def _with_gradients(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)).to(dtype)
    for parameter, value in zip(model.parameters(), (2.0, 5.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    return model


def test_clipping_returns_the_norm_before_and_scales_to_the_limit():
    model = _with_gradients()
    assert clip_gradients(model, max_norm=1.0).item() == pytest.approx(math.sqrt(6 * 4 + 2 * 25))
    assert clip_gradients(model, max_norm=None).item() == pytest.approx(1.0, rel=1e-5)
    ratio = model[1].weight.grad[0, 0] / model[0].weight.grad[0, 0]
    assert ratio.item() == pytest.approx(2.5)


@pytest.mark.parametrize("max_norm", [None, 1000.0])
def test_gradients_within_the_limit_are_left_bit_by_bit(max_norm):
    model = _with_gradients()
    clip_gradients(model, max_norm=max_norm)
    assert [p.grad.unique().tolist() for p in model.parameters()] == [[2.0], [5.0]]


def test_low_precision_gradients_are_summed_up_in_float32():
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    model.weight.grad = torch.full_like(model.weight, 0.01)
    exact = math.sqrt(64 * 64) * torch.tensor(0.01, dtype=torch.bfloat16).item()
    found = clip_gradients(model, max_norm=None)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact, rel=1e-5)


def test_a_norm_that_is_not_finite_is_told():
    model = _with_gradients()
    model[0].weight.grad[0, 0] = math.inf
    assert math.isinf(clip_gradients(model, max_norm=1.0).item())
    model[0].weight.grad[0, 0] = math.nan
    assert math.isnan(clip_gradients(model, max_norm=None).item())


def test_without_gradients_the_norm_is_zero():
    assert clip_gradients(nn.Linear(2, 2), max_norm=1.0).item() == 0.0


@pytest.mark.parametrize("fields", [{"lr": 0}, {"betas": [0.9, 1.0]}, {"weight_decay": -1}, {"learning_rate": 1}])
def test_values_out_of_range_are_refused(fields):
    with pytest.raises(ValidationError):
        AdamWConfig(**fields)


def test_every_field_of_the_config_reaches_the_optimizer():
    model = nn.Linear(2, 2)
    config = AdamWConfig(lr=0.5, betas=(0.1, 0.2), eps=0.3, weight_decay=0.4)
    optimizer = config.build(model=model, matrices=matrix_names(model))
    first = optimizer.param_groups[0]
    assert (first["lr"], first["betas"], first["eps"], first["weight_decay"]) == (0.5, (0.1, 0.2), 0.3, 0.4)
