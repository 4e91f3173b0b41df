"""Operator-level proof: what runs again in backward, by name and count, and which bytes stay, by storage.

The expectation is computed from what one bare block runs and from the policy alone: recompute goes up to the
last operator whose inputs backward needs (the last matrix product), and leaves out what is kept.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.policy import parse_policy
from tests.helpers import families, models, ops
from tests.helpers.models import Spec

MATMUL = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"

SPECS = {
    "plain": Spec(),
    "bias": Spec(bias=True),
    "plain attention": Spec(attention="plain"),
    "dropout": Spec(dropout=0.2),
}


class _Sequence(TorchDispatchMode):
    """Lists operators with the bytes of what each makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]
        if func is not torch.ops.aten.detach.default:
            self.calls.append((str(func), sum(t.numel() * t.element_size() for t in made)))
        return out


def _forward(model: nn.Module, spec: Spec) -> Callable[[], torch.Tensor]:
    tokens = models.tokens(spec)
    return lambda: models.loss_of(model(tokens), tokens)


def _block_calls(spec: Spec) -> list[tuple[str, int]]:
    block = models.Block(spec)
    x = torch.randn(spec.batch, spec.length, spec.d, requires_grad=True)
    with _Sequence() as sequence:
        block(x)
    return sequence.calls


def _kept(spec: Spec, rules: list[tuple[tuple[str, ...], int, int]]) -> set[int]:
    """Positions of the calls in a block that the rules keep; each is (operators, m, n), the first match decides."""
    kept: set[int] = set()
    counters = [0] * len(rules)
    for position, (name, _) in enumerate(_block_calls(spec)):
        for i, (names, m, n) in enumerate(rules):
            if name in names:
                if counters[i] % n < m:
                    kept.add(position)
                counters[i] += 1
                break
    return kept


def _last_needed(spec: Spec) -> int:
    """Position of the last matrix product: its inputs are the last thing that backward needs, without dropout."""
    return max(i for i, (name, _) in enumerate(_block_calls(spec)) if name in MATMUL)


RULES = {
    "matmul": [(MATMUL, 1, 1)],
    "matmul 1/2": [(MATMUL, 1, 2)],
    "matmul 2/3": [(MATMUL, 2, 3)],
    "sdpa": [((SDPA,), 1, 1)],
    "sdpa, matmul": [((SDPA,), 1, 1), (MATMUL, 1, 1)],
    "sdpa, matmul 1/2": [((SDPA,), 1, 1), (MATMUL, 1, 2)],
    "sdpa, matmul 2/3": [((SDPA,), 1, 1), (MATMUL, 2, 3)],
}
KINDS = ("plain", "bias", "plain attention")
# Attention written out has no kernel to keep.
CELLS = [(k, n) for k in KINDS for n in RULES if not (k == "plain attention" and "sdpa" in n)]


def _trained_once(spec: Spec, policy: object, *, steps: int) -> nn.Module:
    model = models.build(spec)
    if policy is not None:
        lowtide.apply(model, policy)
    for _ in range(steps):
        _forward(model, spec)().backward()
        model.zero_grad()
    return model


@pytest.mark.parametrize("steps", [0, 2], ids="after {} steps".format)
@pytest.mark.parametrize(("kind", "name"), [*CELLS, *((kind, "full") for kind in KINDS)])
def test_what_runs_again_is_what_the_policy_leaves_out(kind, name, steps):
    spec = SPECS[kind]
    plain = _trained_once(spec, None, steps=steps)
    checkpointed = _trained_once(spec, families.POLICIES[name], steps=steps)
    again = ops.ran_again(_forward(plain, spec), _forward(checkpointed, spec))
    kept = _kept(spec, RULES.get(name, []))
    calls = _block_calls(spec)[: _last_needed(spec)]
    expected = Counter(op for i, (op, _) in enumerate(calls) if i not in kept)
    assert again == Counter({op: count * spec.layers for op, count in expected.items()})


@pytest.mark.parametrize(("keep", "again"), [("1/2", 3), ("2/3", 2), ("always", 0), ("1/7", 5), ("6/7", 0)])
def test_every_nth_product_in_plain_numbers(keep, again):
    # q k v o gate up down: 1/2 keeps q v gate down and leaves k o up; down itself is never needed.
    spec = Spec()
    policy = lowtide.SelectiveOp(save=[{"op": "aten.mm", "keep": keep}])
    plain, checkpointed = _trained_once(spec, None, steps=1), _trained_once(spec, policy, steps=1)
    counts = ops.ran_again(_forward(plain, spec), _forward(checkpointed, spec))
    assert counts["aten.mm.default"] == again * spec.layers


@pytest.mark.parametrize(
    ("policy", "regions"),
    [
        ({"kind": "every_nth_layer", "n": 2}, 3),
        ({"kind": "every_nth_layer", "n": 4}, 2),
        ({"kind": "some_layers", "checkpoint": "1/3"}, 2),
        ({"kind": "some_layers", "checkpoint": [4]}, 1),
        ({"kind": "full", "layers": "layers.{-2--1}"}, 2),
    ],
)
def test_only_chosen_layers_run_again(policy, regions):
    spec = Spec(layers=5)
    plain, checkpointed = _trained_once(spec, None, steps=0), _trained_once(spec, policy, steps=0)
    counts = ops.ran_again(_forward(plain, spec), _forward(checkpointed, spec))
    assert counts["aten.mm.default"] == 6 * regions


def test_dropout_draws_as_often_again_as_forward_did():
    spec = SPECS["dropout"]
    plain, checkpointed = _trained_once(spec, None, steps=1), _trained_once(spec, {"kind": "full"}, steps=1)
    again = ops.ran_again(_forward(plain, spec), _forward(checkpointed, spec))
    drawn = ops.count_ops(_forward(plain, spec))[0]
    assert again["aten.bernoulli_.float"] == drawn["aten.bernoulli_.float"] > 0


@pytest.mark.parametrize(("kind", "name"), CELLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_the_policys_arithmetic(kind, name, dtype):
    """Over what `full` keeps: the outputs of kept calls, without the last product's, which nothing needs."""
    spec = SPECS[kind].but(dtype=dtype)
    full = _trained_once(spec, {"kind": "full"}, steps=1)
    model = _trained_once(spec, families.POLICIES[name], steps=1)
    size = 4 if dtype == torch.float32 else 2
    kept = _kept(spec, RULES[name]) - {_last_needed(spec)}
    # A block made by hand above is float32; attention's log-sum-exp stays float32 in any precision.
    calls = _block_calls(spec)
    exempt = spec.batch * spec.heads * spec.length * 4
    expected = 0
    for i in kept:
        name_, made = calls[i]
        expected += (made - exempt) * size // 4 + exempt if name_ == SDPA else made * size // 4
    found = ops.saved_bytes(_forward(model, spec)) - ops.saved_bytes(_forward(full, spec))
    assert found == expected * spec.layers


def test_full_keeps_one_input_a_block_and_nothing_else():
    def held(layers: int) -> int:
        spec = Spec(layers=layers)
        return ops.saved_bytes(_forward(_trained_once(spec, {"kind": "full"}, steps=1), spec))

    spec = Spec()
    assert held(5) - held(3) == 2 * spec.batch * spec.length * spec.d * 4


@pytest.mark.parametrize("name", ["full", "sdpa, matmul 1/2"])
@pytest.mark.parametrize("kind", ["plain", "dropout"])
def test_nothing_outlives_a_step_but_gradients_without_the_cycle_collector(kind, name):
    spec = SPECS[kind]
    model = _trained_once(spec, families.POLICIES[name], steps=2)
    storages = ops.Storages()
    gc.collect()
    gc.disable()
    try:
        with storages:
            _forward(model, spec)().backward()
        alive = storages.alive_bytes()
    finally:
        gc.enable()
    assert alive == sum(p.numel() * p.element_size() for p in model.parameters())


def test_forward_without_backward_leaves_nothing_once_the_loss_is_gone():
    spec = Spec()
    model = _trained_once(spec, families.POLICIES["sdpa, matmul 1/2"], steps=1)
    gc.collect()
    with ops.Storages() as storages:
        for _ in range(3):
            _forward(model, spec)()
    gc.collect()
    assert storages.alive_bytes() == 0


def test_the_same_table_says_what_is_kept_as_parse_policy_does():
    for name, rules in RULES.items():
        policy = parse_policy(families.POLICIES[name])
        assert [(r.keep.m, r.keep.n) for r in policy.save] == [(m, n) for _, m, n in rules]
