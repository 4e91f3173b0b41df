"""What replay runs again and what it holds: exactly what backward needs, by count and by bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.measurement import measure_saved_bytes
from tests.helpers import families, models, ops, replayed
from tests.helpers.models import Spec
from tests.helpers.replayed import POLICIES, hidden, one

MATMUL = ("aten.mm", "aten.addmm", "aten.bmm")


def _again(function: Callable[[Any, Tensor], Tensor], policy: Any = None) -> Counter[str]:
    bare, block = one(function, policy)
    for _ in range(2):
        block(hidden()).sum().backward()
        block.zero_grad()
    return ops.ran_again(lambda: bare(hidden()).sum(), lambda: block(hidden()).sum())


def _made(counts: Counter[str]) -> dict[str, int]:
    return {n: c for n, c in counts.items() if n not in ("aten.as_strided.default", "aten.view.default")}


def test_a_chain_runs_up_to_the_last_value_that_backward_needs():
    # tanh keeps its result, exp keeps its result, the second product its input: all but the second product.
    again = _again(lambda b, x: b.down(b.up(x).tanh().exp()))
    assert _made(again) == {"aten.addmm.default": 1, "aten.tanh.default": 1, "aten.exp.default": 1}


def test_what_backward_never_needs_does_not_run():
    def function(block: Any, x: Tensor) -> Tensor:
        h = block.up(x)
        h.detach().mean((0, 1)).sqrt()
        h.detach().cos().sum()
        return block.down(h.tanh()) + h.detach().std()

    assert _made(_again(function)) == {"aten.addmm.default": 1, "aten.tanh.default": 1}


def test_a_mask_does_not_hang_on_what_it_is_the_mask_of():
    """Dropout asks for memory like its input's; the product before it does not run again for that."""

    def function(block: Any, x: Tensor) -> Tensor:
        return F.dropout(block.down(block.up(x).relu()), 0.5, training=True)

    again = _again(function)
    assert again["aten.addmm.default"] == 1, "up, for what down reads; down itself is not needed"
    assert again["aten.bernoulli_.float"] == 1


def test_a_kept_value_cuts_the_chain_above_it():
    def function(block: Any, x: Tensor) -> Tensor:
        return block.down(block.up(x).sin().exp().cos())

    policy = {"kind": "selective_op", "executor": "replay", "save": ["aten.exp"]}
    # cos needs exp, which is kept; sin needs the product; the last product needs cos.
    assert _made(_again(function, policy)) == {"aten.addmm.default": 1, "aten.cos.default": 1}


def test_values_that_autograd_never_packs_can_be_kept():
    def function(block: Any, x: Tensor) -> Tensor:
        return block.down((block.up(x) + 1.0).tanh())

    policy = {"kind": "selective_op", "executor": "replay", "save": ["aten.add"]}
    assert _made(_again(function, policy)) == {"aten.tanh.default": 1}


def test_operators_run_once_for_one_backward_and_once_more_for_another():
    _, block = one(lambda b, x: b.down(b.up(x).tanh().exp()))
    loss = block(hidden()).sum()
    for retain in (True, False):
        with ops.OpCounter() as counter:
            loss.backward(retain_graph=retain)
        assert counter.counts["aten.tanh.default"] == 1


RULES: dict[str, Any] = {
    "inputs": {"kind": "full"},
    "products": {"kind": "selective_op", "save": ["matmul"]},
    "half": {"kind": "selective_op", "save": [{"op": "matmul", "keep": "1/2"}]},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", ["plain", "bias", "written-out"])
def test_no_more_operators_run_again_than_under_recompute_and_no_less_products(kind, name):
    spec = {"plain": Spec(), "bias": Spec(bias=True), "written-out": Spec(attention="plain")}[kind]

    def again(executor: str) -> Counter[str]:
        plain, model = models.build(spec), models.build(spec)
        lowtide.apply(model, {**RULES[name], "executor": executor})
        for _ in range(2):
            families.spec_step(model, 0, spec=spec)
            model.zero_grad()
        tokens = models.tokens(spec)
        # Torch 2.11 makes an empty tensor in forward to save a region's inputs by: only backward is compared.
        behind = [ops.count_ops(lambda m=m: models.loss_of(m(tokens), tokens))[1] for m in (plain, model)]
        return behind[1] - behind[0]

    replay, recompute = again("replay"), again("recompute")
    views = ("aten.as_strided", "aten.set_", "aten.clone", "aten.empty")
    assert {n: c for n, c in (replay - recompute).items() if not n.startswith(views)} == {}
    assert ops.only(replay, *MATMUL) == ops.only(recompute, *MATMUL)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("name", RULES)
def test_saved_bytes_are_those_of_recompute_or_fewer(family, name):
    def measured(executor: str) -> int:
        model = families.build(family)
        lowtide.apply(model, {**RULES[name], "executor": executor})
        for i in range(2):
            families.step(model, i)
            model.zero_grad()
        tokens = models.tokens()
        blocks = {f"layers.{i}": block for i, block in enumerate(families.blocks(model))}
        found = measure_saved_bytes(model, lambda: families.logits_of(model, tokens), blocks)
        return found.total_bytes

    replay, recompute = measured("replay"), measured("recompute")
    assert replay <= recompute
    # Inputs of 3 blocks at least: 2 x 16 tokens x 32 floats.
    assert replay >= 3 * 2 * 16 * 32 * 4


def _held(function: Callable[[Any, Tensor], Tensor], policy: Any) -> int:
    _, block = one(function, policy)
    block(hidden()).sum().backward()
    x = hidden()
    return ops.saved_bytes(lambda: block(x).sum())


def test_what_is_kept_in_vain_is_not_held():
    def function(block: Any, x: Tensor) -> Tensor:
        return block.down(block.up(x).tanh()) * 2.0

    save = [{"op": "aten.addmm", "keep": "always"}]
    product = 2 * 16 * 64 * 4
    kept = _held(function, {"kind": "selective_op", "executor": "replay", "save": save})
    inputs = _held(function, POLICIES["inputs"])
    # The first product leads to tanh and is held; the second one leads to nothing that backward needs.
    assert kept - inputs == product


def test_everything_goes_with_backward_and_kept_values_go_as_it_proceeds():
    def function(block: Any, x: Tensor) -> Tensor:
        return block.down(F.silu(block.up(x)).sin())

    _, block = one(function, {"kind": "selective_op", "executor": "replay", "save": ["aten.addmm", "aten.silu"]})
    block(hidden()).sum().backward()
    alive: list[int] = []
    storages = ops.Storages()
    with storages:
        loss = block(hidden()).sum()
        block.up.weight.register_hook(lambda g: alive.append(storages.alive_bytes()))
        block.down.weight.register_hook(lambda g: alive.append(storages.alive_bytes()))
        loss.backward()
        for p in block.parameters():
            p.grad = None
        del loss
        assert storages.alive_bytes() <= 2 * 16 * 32 * 4 + 16
    assert len(alive) == 2


# What cannot be replayed


class _Tagged(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map_only

        plain = tree_map_only(_Tagged, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, _Tagged.of, func(*plain[0], **plain[1]))

    @staticmethod
    def of(inner: Tensor) -> Tensor:
        out = Tensor._make_wrapper_subclass(_Tagged, inner.shape, dtype=inner.dtype, strides=inner.stride())
        out.inner = inner
        return out


def tensor_subclass(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (_Tagged.of(torch.full((64,), 0.5)) * 2.0).inner
    return block.down(block.up(x).tanh() * scale)


def sparse(block: Any, x: Tensor) -> Tensor:
    mask = torch.eye(32).to_sparse()
    return block.down(block.up(torch.sparse.mm(mask, x.flatten(0, 1)).view_as(x)).tanh())


def lazy_conjugate(block: Any, x: Tensor) -> Tensor:
    h = torch.view_as_complex(block.up(x).reshape(2, 16, 32, 2))
    return block.down(torch.view_as_real((h.conj() * h).resolve_conj()).flatten(-2).tanh())


def numpy_behind_the_back(block: Any, x: Tensor) -> Tensor:
    h = torch.empty(64)
    h.numpy()[:] = 0.75
    return block.down((block.up(x) * h).tanh())


@torch.library.custom_op("lowtide_tests::scales_in_secret", mutates_args=())
def scales_in_secret(x: Tensor, by: Tensor) -> Tensor:
    by.data.mul_(1.5)
    return x * by


scales_in_secret.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1].clone()),
)


@torch.library.custom_op("lowtide_tests::draws_in_secret", mutates_args=())
def draws_in_secret(x: Tensor) -> Tensor:
    return torch.rand_like(x)


def drawn_by_a_foreign_kernel(block: Any, x: Tensor) -> Tensor:
    return block.down(block.up(x).tanh() * draws_in_secret(block.up(x).detach()))


REASONS = {
    sparse: "sparse",
    lazy_conjugate: r"aten\._conj",
    numpy_behind_the_back: "another result in replay",
    drawn_by_a_foreign_kernel: "another result in replay",
    tensor_subclass: "_Tagged",
}


@pytest.mark.parametrize("function", REASONS, ids=lambda f: f.__name__)
def test_what_cannot_be_replayed_has_exact_gradients_in_that_step_and_says_why(function):
    bare, model = replayed.build(function), replayed.build(function)
    applied = lowtide.apply(model, POLICIES["inputs"])
    for m in (bare, model):
        torch.manual_seed(3)
        replayed.step(m, 0)
    for (name, p), q in zip(bare.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    for region in applied.regions:
        assert region.executor == "recompute"
        assert region.reason.startswith("not replayed: ")
        assert re.search(REASONS[function], region.reason)


def test_a_kernel_that_writes_what_it_does_not_declare_is_found_and_undone():
    def function(block: Any, x: Tensor) -> Tensor:
        return block.down(torch.ops.lowtide_tests.scales_in_secret(block.up(x), block.mean).tanh())

    bare, model = replayed.build(function), replayed.build(function)
    applied = lowtide.apply(model, POLICIES["inputs"])
    for m in (bare, model):
        for layer in m.layers:
            layer.mean.fill_(1.0)
        m(models.tokens())
    assert {r.executor for r in applied.regions} == {"recompute"}
    assert (
        [float(layer.mean[0]) for layer in model.layers] == [float(layer.mean[0]) for layer in bare.layers] == 3 * [1.5]
    )


def test_a_region_falls_back_for_one_form_and_not_for_others():
    def function(block: Any, x: Tensor) -> Tensor:
        h = block.up(x)
        return block.down((h.to_sparse().to_dense() if x.shape[1] == 8 else h).tanh())

    found = []
    for block in one(function):
        for length in (16, 8, 16, 8, 12):
            block(hidden()[:, :length]).sum().backward()
        found.append(block.up.weight.grad)
    assert torch.equal(*found)


def test_a_block_that_changes_its_mind_with_one_form_stays_exact():
    """A problem that comes up after the form was verified: what is recorded is replayed, the rest is held."""

    def function(block: Any, x: Tensor) -> Tensor:
        block.n += 1
        h = block.up(x).tanh()
        if block.n % 4 == 3:
            h = h.to_sparse().to_dense()
        return block.down(h.exp())

    found = []
    for block in one(function):
        for _ in range(6):
            block(hidden()).sum().backward()
        found.append(block.up.weight.grad)
    assert isinstance(block, nn.Module)
    assert torch.equal(*found)


class _ThroughNumpy(torch.autograd.Function):
    """Writes to its output where torch does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.numpy()[:] = 2 * x.detach().numpy()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


def _numpy_in_a_function(h: Tensor) -> Tensor:
    return _ThroughNumpy.apply(h)


def _numpy_on_a_constant(h: Tensor) -> Tensor:
    by = torch.empty(64)
    by.numpy()[:] = 0.75
    return h * by


def _written_through_data(h: Tensor) -> Tensor:
    h.data.mul_(0.5)
    return h * h


def _kept_value_written(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.detach().add_(0.25)
    return h


LATE = {
    _numpy_in_a_function: "another result in replay",
    _numpy_on_a_constant: "another result in replay",
    _written_through_data: None,
    _kept_value_written: None,
}


@pytest.mark.parametrize("policy", [POLICIES["inputs"], POLICIES["all"]], ids=["inputs", "all"])
@pytest.mark.parametrize("late", LATE, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("early", [True, False], ids=["in_the_middle", "at_the_end"])
def test_code_that_runs_first_in_a_later_call_is_verified_too(late, early, policy):
    def function(block: Any, x: Tensor) -> Tensor:
        block.n += 1
        h = block.up(x).sigmoid() * 2
        if early and block.n > 2:
            h = late(h)
        h = block.down(h).exp().relu()
        if not early and block.n > 2:
            h = late(h.repeat(1, 1, 2))
        return h.sigmoid()

    found = []
    models = replayed.build(function), replayed.build(function)
    applied = lowtide.apply(models[1], policy)
    for model in models:
        for i in range(5):
            model.layers[0](hidden(seed=i)).sum().backward()
            found.append(model.layers[0].up.weight.grad.clone())
    assert [torch.equal(a, b) for a, b in zip(found[:5], found[5:], strict=True)] == 5 * [True]
    if policy is POLICIES["all"]:
        # Keeps what numpy wrote.
        return
    region, reason = applied.regions[0], LATE[late]
    assert region.executor == ("recompute" if reason else "replay")
    assert reason is None or re.search(reason, region.reason)


def test_each_sequence_of_steps_is_verified_once():
    """A branch that comes later, and a product whose input autograd saves only once its weight is trained."""

    def function(block: Any, x: Tensor) -> Tensor:
        h = block.up(x).tanh()
        return block.down(h.exp() if block.n % 2 else h + 1)

    _, block = one(function)
    found = []
    for i in range(7):
        block.n = i
        block.down.weight.requires_grad_(i >= 4)
        with ops.OpCounter() as counter:
            out = block(hidden())
        found.append(counter.counts["aten.addmm.default"])
        out.sum().backward()
    # Verification runs the first product again.
    assert found == [3, 3, 2, 2, 3, 2, 2]


def test_a_graph_that_no_backward_frees_goes_with_its_results():
    # exp and sin keep what the policy keeps too; a cycle through the node that made it would hold all of it for ever.
    policy = {"kind": "selective_op", "executor": "replay", "save": ["aten.exp", "aten.mm", "aten.addmm"]}
    _, block = one(lambda b, x: b.down(b.up(x).exp().sin()), policy)
    for _ in range(2):
        measured = measure_saved_bytes(block, lambda: block(hidden()).sum(), {"block": block})
        assert measured.total_bytes == 4 * 2 * 16 * (64 + 32)
