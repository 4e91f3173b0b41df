"""Replay under steps of every kind: autocast, several backwards, hooks, writes from outside, nesting, errors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import RecomputeError
from tests.helpers import law, models, ops, replayed
from tests.helpers.models import Spec
from tests.helpers.replayed import POLICIES, assert_replayed, hidden, one, policies

DROPOUT = Spec(dropout=0.2)
WRITTEN = r"modified by an inplace operation|changed in place"


def _loss(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    return models.loss_of(model(tokens), tokens)


def autocast(model: nn.Module, i: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = _loss(model, i)
    loss.backward()
    return loss


def autocast_around_backward(model: nn.Module, i: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = _loss(model, i)
        loss.backward()
    return loss


def autocast_only_around_backward(model: nn.Module, i: int) -> Tensor:
    loss = _loss(model, i)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    return loss


def autocast_with_a_warm_cache(model: Any, i: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        side = model.layers[1].feed.up(torch.ones(1, 32)).sum()
        loss = _loss(model, i) + 0.01 * side
    loss.backward()
    return loss


def accumulated(model: nn.Module, i: int) -> Tensor:
    losses = [_loss(model, 10 * i + j) / 3 for j in range(3)]
    for loss in losses:
        loss.backward()
    return sum(losses, torch.zeros(()))


def backward_twice(model: nn.Module, i: int) -> Tensor:
    loss = _loss(model, i)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def backward_of_parts(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    logits = model(tokens)
    first, second = models.loss_of(logits[:1], tokens[:1]), models.loss_of(logits[1:], tokens[1:])
    first.backward(retain_graph=True)
    second.backward()
    return first + second


def some_gradients_then_the_rest(model: Any, i: int) -> Tensor:
    """The first pass asks for some values, and for those twice; the second for all."""
    loss = _loss(model, i)
    some = list(model.layers[1].feed.parameters())
    again = torch.autograd.grad(loss, some, retain_graph=True)
    loss.backward()
    for p, g in zip(some, again, strict=True):
        p.grad = p.grad + 2 * g
    return loss


def double_backward(model: nn.Module, i: int) -> Tensor:
    loss = _loss(model, i)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total = loss + 0.1 * sum(g.square().sum() for g in grads)
    total.backward()
    return total


def batched_gradients(model: nn.Module, i: int) -> Tensor:
    """Backward under vmap."""
    tokens = models.tokens(step=i)
    logits = model(tokens)
    seeds = torch.stack([torch.ones_like(logits), torch.linspace(-1, 1, logits.numel()).view_as(logits)])
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(logits, parameters, seeds, is_grads_batched=True), strict=True):
        p.grad = g[0] + g[1]
    return logits.sum()


def split_backward(model: Any, i: int) -> Tensor:
    """Gradients of inputs first, of weights later, as zero-bubble pipelines do."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    tokens = models.tokens(step=i)
    x = model.embed(tokens).detach().requires_grad_()
    h = x
    for layer in model.layers:
        h = layer(h)
    loss = models.loss_of(model.head(model.norm(h)), tokens)
    weights = [p for m in (model.layers, model.norm, model.head) for p in m.parameters()]
    _, groups = stage_backward_input([loss], None, [x], iter(weights))
    stage_backward_weight(iter(weights), groups)
    assert x.grad is not None
    model.embed.weight.grad = torch.zeros_like(model.embed.weight).index_add(0, tokens.flatten(), x.grad.flatten(0, 1))
    return loss


def frozen_parameters(model: Any, i: int) -> Tensor:
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or name.startswith(("layers.1", "head")))
    loss = _loss(model, i)
    loss.backward()
    return loss


def called_twice_before_backward(model: nn.Module, i: int) -> Tensor:
    loss = _loss(model, i) + _loss(model, i + 100)
    loss.backward()
    return loss


def other_shapes(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)[:, : 16 - 3 * i]
    loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss


def in_another_thread(model: nn.Module, i: int) -> Tensor:
    from concurrent.futures import ThreadPoolExecutor

    loss = _loss(model, i)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    return loss


def random_numbers_before_backward(model: nn.Module, i: int) -> Tensor:
    loss = _loss(model, i)
    torch.rand(100)
    loss.backward()
    return loss + torch.rand(())


def saved_on_cpu_around(model: nn.Module, i: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        loss = _loss(model, i)
    loss.backward()
    return loss


def evaluated_in_between(model: nn.Module, i: int) -> Tensor:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model.eval()(models.tokens(step=50 + i))
    model.train()
    return replayed.step(model, i)


WAYS = [
    autocast, autocast_around_backward, autocast_only_around_backward, autocast_with_a_warm_cache, accumulated,
    backward_twice, backward_of_parts, some_gradients_then_the_rest, split_backward, frozen_parameters,
    called_twice_before_backward, other_shapes, in_another_thread, random_numbers_before_backward, saved_on_cpu_around,
    evaluated_in_between,
]  # fmt: skip


@policies
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_ways_to_run_a_step(way, policy):
    assert_replayed(partial(models.build, DROPOUT), policy, step=way)


@policies
@pytest.mark.parametrize("way", [double_backward, batched_gradients], ids=lambda f: f.__name__)
def test_gradients_of_gradients(way, policy):
    assert_replayed(partial(models.build, Spec(attention="plain", dropout=0.2)), policy, step=way)


@policies
def test_a_region_inside_torch_checkpoint(policy):
    def outer(model: Any, i: int) -> Tensor:
        tokens = models.tokens(step=i)
        x = checkpoint(lambda v: model.layers[1](model.layers[0](v)), model.embed(tokens), use_reentrant=False)
        loss = models.loss_of(model.head(model.norm(model.layers[2](x))), tokens)
        loss.backward()
        return loss

    assert_replayed(partial(models.build, DROPOUT), policy, step=outer)


class Hiding(nn.Module):
    """A block that calls blocks of another model, which are not among its modules."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.9, 1.1, 32))
        self.hidden = (blocks,)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.hidden[0]:
            x = block(x * self.scale)
        return x.tanh()


def _nested(policy: Any, *, outer: Any) -> dict[str, Tensor | None]:
    """Gradients of a step through regions inside of regions."""
    model = models.build(DROPOUT)
    blocks = nn.ModuleList(Hiding(list(model.layers)) for _ in range(2))
    if policy is not None:
        regions = lowtide.apply(model, policy).regions
        regions += lowtide.apply(nn.ModuleDict({"layers": blocks}), {**outer, "layers": ["layers.*"]}).regions
    torch.manual_seed(1)
    for _ in range(2):
        x = model.embed(models.tokens())
        for block in blocks:
            x = block(x)
        model.head(x).square().mean().backward()
    if policy is not None:
        assert {r.executor for r in regions} == {"replay"}
    return {n: p.grad for m in (model, blocks) for n, p in m.named_parameters()}


@policies
@pytest.mark.parametrize("outer", POLICIES)
def test_regions_inside_regions(policy, outer):
    expected, found = _nested(None, outer=None), _nested(policy, outer=POLICIES[outer])
    assert [n for n in expected if not law.same_bits(expected[n], found[n])] == []


def test_an_outer_region_still_frees_what_the_inner_one_would_hold():
    def held(*, inner: bool) -> int:
        model = models.build()
        block = Hiding(list(model.layers))
        if inner:
            lowtide.apply(model, POLICIES["inputs"])
        lowtide.apply(nn.ModuleDict({"layers": nn.ModuleList([block])}), {**POLICIES["inputs"], "layers": ["layers.*"]})
        x = torch.randn(2, 16, 32, requires_grad=True)
        block(x).sum().backward()
        return ops.saved_bytes(lambda: block(x))

    assert held(inner=True) == held(inner=False)


# Writes from outside


def _in_place(h: Tensor) -> None:
    with torch.no_grad():
        h.add_(1.0)


def test_a_parameter_that_is_updated_before_backward_is_an_error():
    for block in one(lambda b, x: b.down(b.up(x).tanh())):
        loss = block(hidden()).sum()
        _in_place(block.up.weight)
        _in_place(block.down.weight)
        with pytest.raises(RuntimeError, match=WRITTEN):
            loss.backward()


def test_an_input_that_is_written_before_backward_is_an_error():
    for block in one(lambda b, x: b.down(b.up(x).tanh())):
        x = hidden() * 1.0
        loss = block(x).sum()
        _in_place(x)
        with pytest.raises(RuntimeError, match=WRITTEN):
            loss.backward()


def test_a_buffer_that_only_replay_reads_and_that_is_written_before_backward_is_an_error():
    _, block = one(lambda b, x: b.down((b.up(x) + b.mean).tanh()))
    loss = block(hidden()).sum()
    block.mean.add_(1.0)
    with pytest.raises(RecomputeError, match=r"region layers\.0: a tensor of shape \(64,\)"):
        loss.backward()


@policies
@pytest.mark.parametrize(
    "last",
    [
        lambda b, x: b.down(b.up(x)).tanh(),
        lambda b, x: (b.down(b.up(x)).tanh(), None),
        lambda b, x: {"h": b.down(b.up(x)).exp().view(32, 32)},
        lambda b, x: models.BlockOutput(F.linear(x, b.down.weight.t()).sigmoid()),
    ],
    ids=["tensor", "tuple", "view in a dict", "dataclass"],
)
def test_an_output_that_is_written_after_the_region_is_an_error(last, policy):
    for block in one(last, policy):
        out = block(hidden())
        h = out if isinstance(out, Tensor) else models.hidden_of(out) if not isinstance(out, dict) else out["h"]
        loss = h.sum()
        _in_place(h)
        with pytest.raises(RuntimeError, match=WRITTEN):
            loss.backward()


def test_an_output_that_nobody_needs_may_be_written_after_the_region():
    results = []
    for block in one(lambda b, x: x + b.down(b.up(x).tanh()), POLICIES["all"]):
        h = block(hidden())
        h += 1.0
        h.exp().sum().backward()
        results.append([p.grad for p in (block.up.weight, block.down.weight)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_kept_value_that_is_reached_by_another_name_and_written_is_an_error():
    """An output that shares storage with a kept product, and not its version counter."""
    stash: list[Tensor] = []

    def function(block: Any, x: Tensor) -> Tensor:
        h = F.linear(x, block.up.weight)
        stash[:] = [h]
        return block.down(h.tanh() * h)

    policy = {"kind": "selective_op", "executor": "replay", "save": ["aten.mm", {"op": "matmul", "optional": True}]}
    for block in one(function, policy):
        loss = block(hidden()).sum()
        _in_place(stash[0])
        with pytest.raises(RuntimeError, match=WRITTEN):
            loss.backward()


# What must not happen


def test_hooks_and_counters_run_once():
    calls: list[str] = []

    def function(block: Any, x: Tensor) -> Tensor:
        block.n += 1
        return block.down(block.norm(block.up(x).transpose(1, 2)).transpose(1, 2).tanh())

    _, block = one(function)
    block.up.register_forward_hook(lambda *_: calls.append("forward"))
    block.up.register_full_backward_hook(lambda *_: calls.append("backward"))
    before, tracked = block.n, int(block.norm.num_batches_tracked)
    block(hidden()).sum().backward()
    assert calls == ["forward", "backward"]
    assert block.n == before + 1
    assert int(block.norm.num_batches_tracked) == tracked + 1


def test_a_full_backward_hook_on_the_block_changes_nothing():
    grads = []
    for block in one(lambda b, x: b.down(b.up(x).tanh())):
        block.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
        x = hidden()
        block(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_an_exception_in_forward_leaves_nothing_behind():
    def function(block: Any, x: Tensor) -> Tensor:
        h = block.up(x).tanh().exp()
        if block.n == 1:
            raise KeyError("on purpose")
        return block.down(h)

    _, block = one(function)
    block(hidden()).sum().backward()
    block.n = 1
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(4):
            with pytest.raises(KeyError):
                block(hidden())
            counts.append(_tensors_alive())
    finally:
        gc.enable()
    assert len(set(counts[1:])) == 1
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    block.n = 0
    block(hidden()).sum().backward()


def _tensors_alive() -> int:
    return sum(isinstance(o, Tensor) for o in gc.get_objects())


def _objects(run: Callable[[int], Any], *, steps: int) -> list[int]:
    for i in range(10):
        run(i)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for i in range(steps):
            run(i)
            if i % 20 == 0:
                counts.append(len(gc.get_objects()))
    finally:
        gc.enable()
    return counts


@policies
def test_no_reference_cycles(policy):
    model = models.build(DROPOUT)
    lowtide.apply(model, policy)

    def run(i: int) -> None:
        replayed.step(model, i)
        for p in model.parameters():
            p.grad = None

    counts = _objects(run, steps=200)
    assert max(counts) - min(counts) <= 2


def test_no_growth_without_backward_and_with_branches():
    def function(block: Any, x: Tensor) -> Tensor:
        block.n += 1
        h = block.up(x)
        for _ in range(block.n % 40):
            h = h.tanh()
        return block.down(h)

    _, block = one(function)

    def run(i: int) -> None:
        block(hidden()).sum()
        block(hidden()).sum().backward()

    counts = _objects(run, steps=200)
    # Schedules of the last few branches are remembered; no more than those.
    assert counts[-1] - counts[3] <= 400


def test_no_gradients_no_cost():
    bare, block = one(lambda b, x: b.down(b.up(x).tanh()))
    modes: list[int] = []
    for b in (bare, block):
        b.up.register_forward_hook(lambda *_: modes.append(torch._C._len_torch_dispatch_stack()))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(bare(hidden()), block(hidden()))
    assert modes == [0, 0, 0, 0]


def test_inputs_from_inference_mode():
    with torch.inference_mode():
        table = torch.linspace(0, 1, 64)
    results = []
    for block in one(lambda b, x: b.down((b.up(x) + table).tanh())):
        x = hidden()
        block(x).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_a_mode_around_backward_sees_what_runs_again():
    _, block = one(lambda b, x: b.down(b.up(x).tanh()))
    loss = block(hidden()).sum()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        loss.backward()
    # The first product again, and two gradients each of both.
    product = 2 * 32 * 32 * 64
    assert counter.get_total_flops() == 5 * product
