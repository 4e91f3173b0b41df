"""Tensor subclasses: quantized frozen weights as torchao has them, and activations that are subclasses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import lowtide
from lowtide.errors import NothingMatchedError
from tests.helpers import law, models
from tests.helpers.families import spec_step


class Quantized(torch.Tensor):
    """Eight-bit integers and a scale for each row, which act as the float tensor that they stand for."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: Tensor) -> Quantized:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def whole(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _Linear.apply(args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = lambda v: v.whole() if isinstance(v, Quantized) else v  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class _Linear(torch.autograd.Function):
    """The product with a frozen quantized weight, made whole again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantized) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.whole().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.whole(), None


class Adapted(nn.Module):
    """A frozen quantized projection and a trained low-rank one beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base = nn.Linear(linear.in_features, linear.out_features, bias=False)
        self.base.weight = nn.Parameter(Quantized.of(linear.weight.detach()), requires_grad=False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x).tanh())


def _quantized() -> nn.Module:
    torch.manual_seed(3)
    model = models.build(models.Spec(dropout=0.1))
    for block in model.layers:
        for name in ("gate", "up", "down"):
            setattr(block.feed, name, Adapted(getattr(block.feed, name)))
    return model


def _step(model: nn.Module, i: int) -> Tensor:
    return spec_step(model, i, spec=models.Spec(dropout=0.1))


POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "selective": {"kind": "selective_op", "save": [{"op": "matmul", "keep": "1/2"}]},
    "feed-forward": {"kind": "rules", "default": "save", "rules": [{"modules": "feed", "action": "recompute"}]},
}


@pytest.mark.parametrize("executor", ["recompute", "replay"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_frozen_quantized_weights_are_exact(policy, executor):
    found = law.assert_law(_quantized, _step, {**policy, "executor": executor}, steps=2)
    for region in found.applied.regions:
        # Replay carries them out, or says which class it does not.
        assert region.executor == executor or "Quantized" in region.reason, region.reason


class Labelled(torch.Tensor):
    """Wraps another tensor; every operator's result is wrapped as well."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Labelled:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = lambda v: v.inner if isinstance(v, Labelled) else v  # noqa: E731
        out = func(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        return tree_map(lambda v: Labelled(v) if isinstance(v, Tensor) else v, out)


class _Labelling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _labelled_step(model: nn.Module, i: int) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    loss = model(Labelled(torch.randn(4, 8, generator=generator))).square().sum()
    loss.backward()
    for parameter in model.parameters():
        if isinstance(parameter.grad, Labelled):
            parameter.grad = parameter.grad.inner
    return loss.inner


@pytest.mark.parametrize("executor", ["recompute", "replay"])
def test_activations_of_a_subclass_are_exact_and_replay_names_the_class(executor):
    policy = {"kind": "selective_op", "save": ["matmul"], "executor": executor}
    found = law.assert_law(_Labelling, _labelled_step, policy, steps=2)
    reasons = {r.reason for r in found.applied.regions}
    assert reasons == {"asked for"} if executor == "recompute" else all("Labelled" in r for r in reasons), reasons


def test_a_rule_counts_also_where_replay_has_stopped_recording():
    """What matches after the subclass has come through has matched; what matches nothing still is an error."""
    model = _Labelling()
    lowtide.apply(model, {"kind": "selective_op", "save": ["aten.gelu"], "executor": "replay"})
    _labelled_step(model, 0)
    model = _Labelling()
    lowtide.apply(model, {"kind": "selective_op", "save": ["aten.silu"], "executor": "replay"})
    with pytest.raises(NothingMatchedError, match=r"aten\.silu"):
        _labelled_step(model, 0)
