"""The law for blocks and steps of every kind that has tripped activation checkpointing before.

Exact, or refused with a message: never a silently different gradient.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import LowtideError, RecomputeError, RefusedError
from tests.helpers import law, models
from tests.helpers.families import FULL, SELECTIVE, both, spec_step
from tests.helpers.models import Spec

SPECS = {
    "bias": Spec(bias=True, dropout=0.2),
    "written-out attention": Spec(attention="plain", dropout=0.2),
    "moe": Spec(feed="moe", dropout=0.1),
    "moe, bfloat16": Spec(feed="moe", dtype=torch.bfloat16),
    "batch norm": Spec(batch_norm=True),
    "counter": Spec(counter=True, dropout=0.1),
    "dict": Spec(arguments="dict", dropout=0.1),
    "kwargs": Spec(arguments="kwargs", outputs="named"),
    "tuple": Spec(outputs="tuple"),
    "dataclass": Spec(outputs="dataclass"),
    "gaps": Spec(stack="gaps"),
    "shared": Spec(stack="shared", dropout=0.1),
    "nested": Spec(stack="nested", layers=4),
    "buffer table": Spec(table="buffer"),
}


@both
@pytest.mark.parametrize("name", SPECS)
def test_blocks(name, policy):
    spec = SPECS[name]
    law.assert_law(partial(models.build, spec), partial(spec_step, spec=spec), policy)


@both
def test_encoder_and_decoder_with_other_signatures(policy):
    spec = Spec(layers=2, dropout=0.1)

    def build() -> nn.Module:
        torch.manual_seed(99)
        return models.randomized(models.EncoderDecoder(spec))

    found = law.assert_law(build, partial(spec_step, spec=spec), policy)
    assert [r.fqn for r in found.applied.regions] == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def _tells(error: Exception, part: str) -> None:
    assert part in str(error)


def _exact_or_told(build: Callable[[], nn.Module], step: law.Step, policy: Any, *, steps: int = 3) -> bool:
    """Whether the outcome was exact; a clear error is the only other thing allowed."""
    control = law.check_control(build, step, steps=steps)
    try:
        found = law.run_steps(build, step, policy, steps=steps)
    except LowtideError as error:
        _tells(error, "layers.")
        return False
    assert law.differences(control, found) == []
    return True


@both
def test_a_table_that_is_built_in_the_first_forward_is_exact(policy):
    spec = Spec(table="lazy")
    law.assert_law(partial(models.build, spec), partial(spec_step, spec=spec), policy)


class Odd(nn.Module):
    """A model of three blocks around one function of (block, x)."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        spec = Spec()
        self.embed = nn.Embedding(spec.vocab, spec.d)
        self.layers = nn.ModuleList(OddBlock(function, spec.d) for _ in range(3))
        self.head = nn.Linear(spec.d, spec.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class OddBlock(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], d: int) -> None:
        super().__init__()
        self.function = function
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def odd(function: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(4_256_233)
        return Odd(function)

    return build


step = partial(spec_step, spec=Spec())


def _addmm(policy: Any) -> Any:
    return {"kind": "selective_op", "save": [{"op": "aten.addmm", "keep": "1/2"}]} if policy is SELECTIVE else policy


def relu_in_place(block: Any, x: Tensor) -> Tensor:
    return block.down(F.relu(block.up(x), inplace=True))


def dropout_in_place(block: Any, x: Tensor) -> Tensor:
    return block.down(F.dropout(block.up(x) + 1.0, 0.4, inplace=True))


def random_relu(block: Any, x: Tensor) -> Tensor:
    return block.down(F.rrelu(block.up(x), training=True))


def alpha_dropout(block: Any, x: Tensor) -> Tensor:
    return F.feature_alpha_dropout(block.down(F.alpha_dropout(block.up(x), 0.3, training=True)), 0.2, training=True)


def noise(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    return block.down(h * (1 + 0.1 * torch.randn_like(h)) + torch.rand(h.shape[-1]))


def gumbel(block: Any, x: Tensor) -> Tensor:
    return block.down(F.gumbel_softmax(block.up(x), hard=True))


def shuffled(block: Any, x: Tensor) -> Tensor:
    return block.down(block.up(x)[:, torch.randperm(x.shape[1])])


def multinomial_sample(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    picked = torch.multinomial(h.detach().flatten(0, 1).softmax(-1), 8)
    return block.down(h * torch.zeros_like(h).flatten(0, 1).scatter(1, picked, 1.0).view_as(h))


def without_grad_inside(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block.up(x).std(-1, keepdim=True)
    return block.down(block.up(x) / (1 + scale))


def detached(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    return block.down(h * h.detach().sigmoid())


def item_branch(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    return block.down(h.relu() if h.mean().item() > 0 else h.tanh())


def views_in_place(block: Any, x: Tensor) -> Tensor:
    h = block.up(x).clone()
    h[:, ::2].mul_(0.5)
    h[..., :4] = 1.0
    return block.down(h)


def sorted_and_gathered(block: Any, x: Tensor) -> Tensor:
    values, order = block.up(x).sort(-1)
    return block.down(values.gather(-1, order.argsort(-1)).exp().clamp(max=2))


def argmax_routed(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    return block.down(h * F.one_hot(h.argmax(-1), h.shape[-1]).to(h.dtype) + h.tanh())


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _, e = ctx.saved_tensors
        return grad * e


def custom_function(block: Any, x: Tensor) -> Tensor:
    return block.down(_Twice.apply(block.up(x).tanh()))


def called_twice_inside(block: Any, x: Tensor) -> Tensor:
    return block.down(block.up(x).relu()) + block.down(block.up(x * 0.5).tanh())


def own_gradient_inside(block: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(block.up(probe).square().sum(), probe)
    return block.down(block.up(x + 0.1 * slope).tanh())


EXACT = [
    relu_in_place, dropout_in_place, random_relu, alpha_dropout, noise, gumbel, shuffled, multinomial_sample,
    without_grad_inside, detached, item_branch, views_in_place, sorted_and_gathered, argmax_routed, custom_function,
    called_twice_inside,
]  # fmt: skip


@both
@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_operators_of_every_kind(function, policy):
    policy = _addmm(policy)
    law.assert_law(odd(function), step, policy)


SAVES = ["bernoulli", "rand_like", "randn_like", "relu", "exp", "mul", "tanh", "_to_copy", "clone", "view", "add", "t"]


@pytest.mark.parametrize("function", EXACT, ids=lambda f: f.__name__)
def test_saving_odd_operators_is_exact_or_refused(function):
    """Random ones, in-place neighbours, views, factories: what is saved must never change what comes out."""
    rules = [{"op": f"aten.{op}", "optional": True} for op in SAVES] + [{"op": "matmul", "keep": "2/3"}]
    try:
        law.assert_law(odd(function), step, {"kind": "selective_op", "save": rules})
    except RefusedError as error:
        _tells(error, "save")


# What reads Python state


# Each changes what recompute must run again: a factor at the end would never be computed a second time.


def python_random(block: Any, x: Tensor) -> Tensor:
    return block.down(block.up(x * random.random()).relu())


def python_counter(block: Any, x: Tensor) -> Tensor:
    block.n += 1
    return block.down(block.up(x * (1.0 + block.n)).relu())


def counter_in_a_shape_free_branch(block: Any, x: Tensor) -> Tensor:
    block.n += 1
    h = block.up(x)
    return block.down(h.relu() if block.n % 2 else h.tanh())


def list_cache(block: Any, x: Tensor) -> Tensor:
    block.seen = [*getattr(block, "seen", []), x.detach().mean()][-3:]
    return block.down(block.up(x).tanh()) * torch.stack(block.seen).sum()


def tensor_state(block: Any, x: Tensor) -> Tensor:
    """A running mean kept in an attribute that is no buffer."""
    block.mean = 0.9 * getattr(block, "mean", torch.zeros(())) + 0.1 * x.detach().mean()
    return block.down(block.up(x - block.mean).tanh())


def later_counter(block: Any, x: Tensor) -> Tensor:
    """Changes what it does long after its first recompute was compared."""
    block.n += 1
    return block.down(block.up(x * (2.0 if block.n > 6 else 1.0)).relu())


STATEFUL = [python_counter, counter_in_a_shape_free_branch, list_cache, tensor_state, later_counter]


@both
@pytest.mark.parametrize("function", STATEFUL, ids=lambda f: f.__name__)
def test_state_of_modules_that_changes_is_exact(function, policy):
    law.assert_law(odd(function), step, _addmm(policy), steps=8)


@both
def test_random_numbers_of_python_are_exact(policy):
    def seeded(model: nn.Module, i: int) -> Tensor:
        random.seed(i)
        return step(model, i)

    law.assert_law(odd(python_random), seeded, _addmm(policy), steps=8)


@both
def test_a_gradient_taken_inside_a_region_is_told(policy):
    assert not _exact_or_told(odd(own_gradient_inside), step, _addmm(policy))


@both
def test_a_generator_of_its_own_is_refused_before_backward(policy):
    generator = torch.Generator().manual_seed(5)

    def drawn(block: Any, x: Tensor) -> Tensor:
        return block.down(block.up(x) * torch.rand(64, generator=generator))

    policy = _addmm(policy)
    model = odd(drawn)()
    lowtide.apply(model, policy)
    with pytest.raises(RefusedError, match="generator of its own"):
        model(models.tokens())


@both
def test_an_input_that_is_written_in_place_is_told(policy):
    def build() -> nn.Module:
        class Writing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(64, 32)
                self.layers = nn.ModuleList(OddBlock(writes, 32) for _ in range(3))

            def forward(self, tokens: Tensor) -> Tensor:
                x = self.embed(tokens)
                for layer in self.layers:
                    # A write to what the block was given, of which nothing before needs the value.
                    x = layer(x * 1.0)
                return x @ self.embed.weight.t()

        torch.manual_seed(11)
        return Writing()

    def writes(block: Any, x: Tensor) -> Tensor:
        x += 1.0
        return block.down(block.up(x).tanh())

    assert not _exact_or_told(build, step, _addmm(policy))


def test_strict_determinism_names_the_first_operator_that_differs():
    state = {"n": 0}

    def drifting(block: Any, x: Tensor) -> Tensor:
        state["n"] += 1
        # The same operators, shapes and literals; other values.
        return block.down(block.up(x) * torch.tensor([float(state["n"])]))

    model = odd(drifting)()
    lowtide.apply(model, {**FULL, "determinism": "strict"})
    with pytest.raises(RecomputeError, match=r"region layers\.2"):
        step(model, 0)
