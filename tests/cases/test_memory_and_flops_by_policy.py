"""Bytes kept fall and work done twice rises from none over every_nth and selective to full, by exact counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from tests.helpers import models, ops
from tests.helpers.models import Spec

SPEC = Spec(layers=4)
MATMUL = {"kind": "selective_op", "save": ["sdpa", "matmul"]}
HALF = {"kind": "selective_op", "save": ["sdpa", {"op": "matmul", "keep": "1/2"}]}
ORDER: list[tuple[str, Any]] = [
    ("none", None),
    ("every second layer", {"kind": "every_nth_layer", "n": 2}),
    ("matmul", MATMUL),
    ("half", HALF),
    ("full", {"kind": "full"}),
]


def _model(policy: Any) -> Any:
    model = models.build(SPEC)
    if policy is not None:
        lowtide.apply(model, policy)
    _loss(model).backward()
    model.zero_grad()
    return model


def _loss(model: Any) -> torch.Tensor:
    tokens = models.tokens(SPEC)
    return models.loss_of(model(tokens), tokens)


def test_bytes_kept_fall_in_this_order():
    models_in_order = [_model(policy) for _, policy in ORDER]
    held = [ops.saved_bytes(partial(_loss, model)) for model in models_in_order]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)


def _flops(policy: Any) -> int:
    model = _model(policy)
    with FlopCounterMode(display=False) as counter:
        _loss(model).backward()
    return counter.get_total_flops()


def test_flops_done_twice_are_those_of_the_products_left_out():
    """Model FLOPs do not depend on the policy; hardware FLOPs grow by exactly what runs again."""
    rows = SPEC.batch * SPEC.length
    d, kv, hidden = SPEC.d, SPEC.kv_heads * SPEC.d // SPEC.heads, SPEC.hidden
    product = {"q": d * d, "k": d * kv, "v": d * kv, "o": d * d, "gate": d * hidden, "up": d * hidden}
    flops = {name: 2 * rows * size for name, size in product.items()}
    attention = 2 * 2 * SPEC.batch * SPEC.heads * SPEC.length**2 * (d // SPEC.heads)
    base = _flops(None)
    assert _flops(MATMUL) == base
    assert _flops(HALF) - base == 4 * (flops["k"] + flops["o"] + flops["up"])
    full = _flops({"kind": "full"}) - base
    everything = 4 * sum(flops.values())
    assert full in (everything, everything + 4 * attention)
    assert (_flops({"kind": "every_nth_layer", "n": 2}) - base) * 2 == full
