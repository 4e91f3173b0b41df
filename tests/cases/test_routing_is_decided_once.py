"""Mixture of experts: ties that resolve otherwise in recompute send tokens to another expert."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.errors import RecomputeError
from tests.helpers import law, models, ops
from tests.helpers.families import FULL, SELECTIVE, both, spec_step
from tests.helpers.models import Spec

SPEC = Spec(feed="moe", layers=2)
step = partial(spec_step, spec=SPEC)


class Flipping(models.MoE):
    """Scores tie but for a jitter whose sign changes with every call of the router."""

    flips = 0.5

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.jitter = Jitter()

    def scores(self, x: Tensor) -> Tensor:
        return super().scores(x) * 0.01 + self.jitter(x, self.flips)


class Jitter(nn.Module):
    """Not part of the model's mathematics: what differs between two runs of a kernel with the same inputs.

    An operator of its own, so that no operator, shape or literal shows that the second run differs.
    """

    calls = 0

    def forward(self, x: Tensor, share: float) -> Tensor:
        return _jitter(x.detach(), share)


@torch.library.custom_op("lowtide_tests::jitter", mutates_args=())
def _jitter(x: Tensor, share: float) -> Tensor:
    Jitter.calls += 1
    sign = 1.0 if Jitter.calls % 2 else -1.0
    flipped = torch.arange(x.shape[0]) < share * x.shape[0]
    return torch.outer(torch.where(flipped, sign, 1.0), torch.tensor([3.0, 1.0, -1.0, -3.0]))


def _build(share: float) -> nn.Module:
    model = models.build(SPEC)
    torch.manual_seed(1)
    for block in model.layers:
        block.feed = Flipping(SPEC)
        block.feed.flips = share
    return model


def _run(model: nn.Module, i: int) -> Tensor:
    Jitter.calls = 0
    tokens = models.tokens(SPEC, step=i)
    logits = model(tokens)
    # Two blocks ran, and backward begins with the last: recompute of each sees the other sign than forward did.
    assert Jitter.calls == 2
    loss = models.loss_of(logits, tokens)
    loss.backward()
    return loss


@pytest.mark.parametrize("share", [0.5, 1.0])
@both
def test_a_router_that_flips_in_recompute_changes_nothing(policy, share):
    law.assert_law(partial(_build, share), _run, policy, steps=2)


class Normalising(Flipping):
    """Divides the weights of the chosen in place, so that they add up to one (Qwen3's router)."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.scores(flat).topk(2, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


@both
def test_weights_that_are_scaled_in_place_leave_the_choice_alone(policy):
    def build() -> nn.Module:
        model = models.build(SPEC)
        torch.manual_seed(1)
        for block in model.layers:
            block.feed = Normalising(SPEC)
        return model

    def run(model: nn.Module, i: int, *, twice: bool) -> Tensor:
        Jitter.calls = 0
        tokens = models.tokens(SPEC, step=i)
        loss = models.loss_of(model(tokens), tokens)
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        return loss

    for twice in (False, True):
        law.assert_law(build, partial(run, twice=twice), policy, steps=3)


@both
def test_topk_runs_once(policy):
    plain, model = models.build(SPEC), models.build(SPEC)
    lowtide.apply(model, policy)
    tokens = models.tokens(SPEC)
    again = ops.ran_again(lambda: models.loss_of(plain(tokens), tokens), lambda: models.loss_of(model(tokens), tokens))
    assert again["aten.topk.default"] == 0
    assert again["aten.mm.default"] > 0


def route(name: str, scores: Tensor) -> Tensor:
    """The chosen expert of each token by one of the operators that route."""
    match name:
        case "topk":
            return scores.topk(1, dim=-1).indices[:, 0]
        case "argmax":
            return scores.argmax(-1)
        case "argmin":
            return (-scores).argmin(-1)
        case "sort":
            return scores.sort(-1, descending=True).indices[:, 0]
        case "argsort":
            return scores.argsort(-1, descending=True)[:, 0]
        case "bucketize":
            return torch.bucketize(scores[:, 0], torch.tensor([-0.5, 0.0, 0.5]))
        case "searchsorted":
            return torch.searchsorted(torch.tensor([-0.5, 0.0, 0.5]), scores[:, 0].contiguous())
        case "max":
            return scores.max(-1).indices
        case "min":
            return (-scores).min(-1).indices
        case "kthvalue":
            return scores.kthvalue(4, dim=-1).indices
        case "median":
            return scores.median(-1).indices
        case "threshold":
            return (scores[:, 1] > scores[:, 0]).long()
    raise AssertionError(name)


class Routed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.jitter = Jitter()
        self.experts = nn.Parameter(torch.randn(4, 32, 32) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 32)
        chosen = route(self.name, self.jitter(flat, 1.0))
        return x + torch.einsum("td,tde->te", flat, self.experts[chosen]).view_as(x).tanh()


def _build_routed(name: str) -> nn.Module:
    model = models.build(SPEC)
    torch.manual_seed(2)
    model.layers = nn.ModuleList(nn.Sequential(Routed(name), nn.RMSNorm(32)) for _ in range(2))
    return model


@pytest.mark.parametrize(
    "name",
    ["topk", "argmax", "argmin", "sort", "argsort", "bucketize", "searchsorted", "max", "min", "kthvalue", "median"],
)
def test_every_operator_that_routes_is_decided_once(name):
    law.assert_law(partial(_build_routed, name), _run, FULL, steps=2)


def test_what_no_list_knows_to_route_is_found_by_strict_comparison_only():
    """The control of the tests above: the second decision really is another one."""
    build = partial(_build_routed, "threshold")
    control = law.check_control(build, _run, steps=2)
    assert law.differences(control, law.run_steps(build, _run, FULL, steps=2)) != []
    with pytest.raises(RecomputeError, match=r"lowtide_tests\.jitter"):
        law.run_steps(build, _run, {**FULL, "determinism": "strict"}, steps=2)


def _experts_on_two_ranks(policy: Any) -> list[str]:
    """Expert parallel: rows go to the rank of their expert and come back; sizes depend on the routing."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
            ctx.sizes = (sent, received)
            out = x.new_empty(sum(received), x.shape[1])
            dist.all_to_all_single(out, x.contiguous(), received, sent)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            sent, received = ctx.sizes
            out = grad.new_empty(sum(sent), grad.shape[1])
            dist.all_to_all_single(out, grad.contiguous(), sent, received)
            return out, None, None

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(32, 2, bias=False)
            self.expert = models.SwiGLU(SPEC)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, 32)
            weight, chosen = self.router(flat).softmax(-1).topk(1, dim=-1)
            order = chosen[:, 0].argsort(stable=True)
            counts = torch.bincount(chosen[:, 0], minlength=2)
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            sent, received = counts.tolist(), theirs.tolist()
            rows = Exchange.apply(flat[order], sent, received)
            back = Exchange.apply(self.expert(rows), received, sent)
            return x + (torch.zeros_like(flat).index_add(0, order, back) * weight).view_as(x)

    def build() -> nn.Module:
        torch.manual_seed(5)
        model = models.build(SPEC)
        model.layers = nn.ModuleList(Parallel() for _ in range(2))
        return model

    def run(model: nn.Module, i: int) -> Tensor:
        tokens = models.tokens(SPEC, step=i, seed=100 + dist.get_rank())
        loss = models.loss_of(model(tokens), tokens)
        loss.backward()
        return loss

    control = law.check_control(build, run)
    return law.differences(control, law.run_steps(build, run, policy))


@pytest.mark.parametrize("policy", [FULL, SELECTIVE], ids=["full", "selective_op"])
def test_experts_on_two_ranks_exchange_as_many_tokens_again(run_on, policy):
    assert run_on(2, _experts_on_two_ranks, policy) == [[], []]
