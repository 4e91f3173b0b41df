"""Replay gives every kind of operator the gradients of plain autograd, to the last bit, and without a fallback."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.helpers import families, law, models, replayed
from tests.helpers.models import Spec
from tests.helpers.replayed import assert_replayed, policies


def in_place(block: Any, x: Tensor) -> Tensor:
    return block.down(F.dropout(F.relu(block.up(x), inplace=True) + 0.1, 0.3, inplace=True))


def in_place_on_views(block: Any, x: Tensor) -> Tensor:
    h = block.up(x).clone()
    h[:, ::2].mul_(0.5)
    h[..., :4] = 1.0
    h.view(-1)[5:9].neg_()
    return block.down(h.transpose(0, 1).tanh().transpose(0, 1))


def in_place_between_uses(block: Any, x: Tensor) -> Tensor:
    """A value is read, overwritten in part, and read again."""
    h = block.up(x).detach()
    before = h.exp()
    h[..., 3:7].zero_()
    after = h.sin()
    h.add_(before)
    return block.down(block.up(x) * before * after * h)


def changes_of_shape_in_place(block: Any, x: Tensor) -> Tensor:
    h = block.up(x).tanh()
    h = h.transpose(1, 2).contiguous()
    h.transpose_(1, 2).unsqueeze_(0).squeeze_(0)
    return block.down(h.exp())


def buffer_read_then_written(block: Any, x: Tensor) -> Tensor:
    h = block.up(x) * (1 + block.mean)
    with torch.no_grad():
        block.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
    return block.down(h.tanh())


def buffer_written_then_read(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    with torch.no_grad():
        block.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
    return block.down((h - block.mean).tanh() * block.mean.clone())


def batch_norm(block: Any, x: Tensor) -> Tensor:
    return block.down(block.norm(block.up(x).transpose(1, 2)).transpose(1, 2).tanh())


def input_written(block: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    y += block.down(block.up(y * 2.0).tanh())
    return y.sin()


class _ReadTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        first = ctx.saved_tensors[1].clone()
        scale = ctx.saved_tensors[0] * 0 + 1
        return grad * first * scale * (ctx.saved_tensors[1] == first)


def custom_function_that_reads_twice(block: Any, x: Tensor) -> Tensor:
    return block.down(_ReadTwice.apply(block.up(x).tanh()))


class _WritesIntoItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(3.0)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3.0


def custom_function_that_writes(block: Any, x: Tensor) -> Tensor:
    return block.down(_WritesIntoItsInput.apply(block.up(x) + 0.5).tanh())


def host_reads(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    scale = h.detach().abs().mean().item()
    rows = h.detach().mean((0, 2)).gt(0).nonzero()[:, 0]
    h = h.relu() if h.sum() > 0 else h.tanh()
    return block.down(h.index_add(1, rows, h[:, rows] * scale))


def own_generator(block: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(17)
    h = block.up(x)
    noise = torch.rand(64, generator=generator) + torch.randn(16, 1, generator=generator)
    return block.down((h * noise).tanh() * torch.rand_like(h))


def random_of_every_kind(block: Any, x: Tensor) -> Tensor:
    h = F.rrelu(block.up(x)[:, torch.randperm(x.shape[1])], training=True)
    h = F.alpha_dropout(F.dropout1d(h.transpose(1, 2), 0.2).transpose(1, 2), 0.2)
    picked = torch.multinomial(h.detach().flatten(0, 1).softmax(-1), 8)
    mask = torch.bernoulli(torch.full_like(h, 0.7)) * torch.empty_like(h).uniform_()
    return block.down(
        h * mask * torch.zeros_like(h).flatten(0, 1).scatter(1, picked, 1.0).view_as(h) + F.gumbel_softmax(h)
    )


def many_outputs(block: Any, x: Tensor) -> Tensor:
    a, b, c, d = block.up(x).split(16, -1)
    values, order = a.sort(-1)
    top, index = b.topk(16, dim=-1)
    u = torch.stack(c.unbind(1), 1)
    s, m = torch.std_mean(d, -1, keepdim=True)
    return block.down(torch.cat([values.gather(-1, order), top * index, u.exp(), (d - m) / (s + 1)], -1))


def tensor_lists_and_names(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    parts = torch._foreach_mul(list(h.chunk(4, -1)), [0.5, 1.0, 1.5, 2.0])
    index = torch.arange(15, -1, -1)
    h = torch.cat(list(torch._foreach_exp(parts)), -1)[:, index]
    return block.down(torch.where(h > 1, input=h, other=torch.tensor(0.25)).clamp(min=torch.tensor(0.1)))


def complex_numbers(block: Any, x: Tensor) -> Tensor:
    h = torch.view_as_complex(block.up(x).reshape(2, 16, 32, 2))
    turn = torch.polar(torch.ones(16, 1), torch.arange(16.0)[:, None])
    return block.down(torch.view_as_real(h * turn).flatten(-2).tanh())


def other_dtype_of_the_same_bytes(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    sign = (h.detach().view(torch.int32) >> 31).float()
    return block.down((h * (1 + sign)).exp())


def without_gradients_inside(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block.up(x).std(-1, keepdim=True)
    h = block.up(x) / (1 + scale)
    return block.down(h * h.detach().sigmoid())


def gradient_taken_inside(block: Any, x: Tensor) -> Tensor:
    probe = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(block.up(probe).tanh().square().sum(), probe)
    return block.down(block.up(x + 0.1 * slope).tanh())


def constants(block: Any, x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat(16)
    block.n += 1
    return block.down((block.up(x) * table * torch.tensor(block.n / 4)).tanh() * torch.arange(64.0).cos())


def empty_tensors(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    return block.down(h.exp() + h[:, 16:].sum() + torch.cat([h[:0], h]).tanh())


def torch_checkpoint_inside(block: Any, x: Tensor) -> Tensor:
    h = checkpoint(lambda v: F.dropout(block.up(v).tanh(), 0.2).exp(), x * 1.5, use_reentrant=False)
    return block.down(h.sin())


def saved_on_cpu_inside(block: Any, x: Tensor) -> Tensor:
    h = block.up(x).tanh()
    with torch.autograd.graph.save_on_cpu():
        h = h.exp()
    return block.down(h.sin())


FUNCTIONS = [
    in_place, in_place_on_views, in_place_between_uses, changes_of_shape_in_place, buffer_read_then_written,
    buffer_written_then_read, batch_norm, input_written, custom_function_that_reads_twice, custom_function_that_writes,
    host_reads, own_generator, random_of_every_kind, many_outputs, tensor_lists_and_names, complex_numbers,
    other_dtype_of_the_same_bytes, without_gradients_inside, gradient_taken_inside, constants, empty_tensors,
    torch_checkpoint_inside, saved_on_cpu_inside,
]  # fmt: skip


@policies
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_operators_of_every_kind(function, policy):
    assert_replayed(function, policy)


SPECS = {
    "moe": Spec(feed="moe", dropout=0.1),
    "written-out attention": Spec(attention="plain", dropout=0.2, dtype=torch.bfloat16),
    "batch norm": Spec(batch_norm=True),
    "counter": Spec(counter=True, dropout=0.1),
    "dict": Spec(arguments="dict", dropout=0.1),
    "kwargs only, named tuple": Spec(arguments="kwargs", outputs="named"),
    "tuple with None": Spec(outputs="tuple"),
    "dataclass with None": Spec(outputs="dataclass"),
    "shared": Spec(stack="shared", dropout=0.1),
    "lazy table": Spec(table="lazy"),
}


@policies
@pytest.mark.parametrize("name", SPECS)
def test_blocks_of_every_kind(name, policy):
    spec = SPECS[name]
    assert_replayed(partial(models.build, spec), policy, step=partial(families.spec_step, spec=spec))


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@policies
def test_families(family, dtype, policy):
    assert_replayed(families.builder(family, dtype, True), policy, step=families.step)


def test_python_state_is_read_once():
    """What recompute refuses or gets wrong: forward's Python code runs once."""

    seen: list[int] = []

    def counted(block: Any, x: Tensor) -> Tensor:
        block.n += 1
        seen.append(block.n)
        h = block.up(x)
        return block.down((h.relu() if block.n % 2 else h.tanh()) * block.n)

    assert_replayed(counted, replayed.POLICIES["inputs"])
    assert seen == 3 * [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_the_control_of_these_tests_can_fail():
    """A replay that gave other numbers would be seen."""

    def drifting(block: Any, x: Tensor) -> Tensor:
        return block.down(block.up(x).tanh()) * state["scale"]

    state = {"scale": 1.0}
    first = law.run_steps(partial(replayed.build, drifting), replayed.step)
    state["scale"] = 1.0 + 1e-6
    assert law.differences(first, law.run_steps(partial(replayed.build, drifting), replayed.step))
