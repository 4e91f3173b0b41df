"""What a block reads may change between forward and backward; gradients are those of forward's values, or an error."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import lowtide
from lowtide.errors import RecomputeError

POLICIES = {
    "full": {"kind": "full"},
    "selective_op": {"kind": "selective_op", "save": ["matmul"]},
    "full-replay": {"kind": "full", "executor": "replay"},
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Switched(nn.Module):
    """Runs one of two adapters, scaled by a number that lies deep in its settings."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.3)
        self.active = "a"
        self.settings = {"scale": {"value": 1.0}, "shifts": deque([0.0])}
        self.gain = torch.ones(())
        self.register_buffer("offset", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.sin(self.drop(getattr(self, self.active)(x)) * self.gain + self.offset)
        return x + inner * self.settings["scale"]["value"] + self.settings["shifts"][0]


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.ModuleDict({"layers": nn.ModuleList(Switched() for _ in range(3))})


def _run(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model["layers"]:
        x = layer(x)
    return x.square().sum()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _adapters(model: nn.Module, x: Tensor) -> list[Tensor]:
    losses: list[Tensor] = []
    for active, scale in (("a", 1.0), ("b", 3.0)):
        for layer in model["layers"]:
            layer.active = active
            layer.settings["scale"]["value"] = scale
            layer.settings["shifts"][0] = scale
        losses.append(_run(model, x))
    (losses[0] + 2 * losses[1]).backward()
    return _gradients(model)


def _evaluated(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = _run(model.train(), x)
    model.eval()
    loss.backward()
    return _gradients(model)


def _replaced_buffer(model: nn.Module, x: Tensor) -> list[Tensor]:
    losses: list[Tensor] = []
    for value in (0.0, 1.0):
        for layer in model["layers"]:
            layer.offset = torch.full((16,), value)
        losses.append(_run(model, x))
    (losses[0] + losses[1]).backward()
    return _gradients(model)


class _Called(nn.Module):
    """So that functional_call can run the stack, which is no module of its own."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: Tensor) -> Tensor:
        return _run(self.stack, x)


def _functional(model: nn.Module, x: Tensor) -> list[Tensor]:
    called = _Called(model)
    weights = {n: (p.detach() * 2).requires_grad_() for n, p in called.named_parameters()}
    loss = functional_call(called, weights, (x,))
    return [g for g in torch.autograd.grad(loss, list(weights.values()), allow_unused=True) if g is not None]


@every_policy
@pytest.mark.parametrize("steps", [_adapters, _evaluated, _replaced_buffer, _functional])
def test_recompute_sees_what_forward_saw(steps: Any, policy: dict[str, Any]) -> None:
    x = torch.randn(4, 16)
    results: list[list[Tensor]] = []
    for applied in (None, None, policy):
        model = _model()
        if applied is not None:
            lowtide.apply(model, applied)
        found: list[Tensor] = []
        for seed in range(3):
            torch.manual_seed(seed)
            model.zero_grad()
            found += steps(model, x)
        results.append(found)
    control, again, found = results
    assert all(map(torch.equal, control, again))
    assert len(found) == len(control)
    assert all(map(torch.equal, control, found))


def _write_bias(layer: nn.Module) -> None:
    layer.a.bias.add_(1)


def _write_attribute(layer: nn.Module) -> None:
    layer.gain.mul_(2)


def _write_buffer(layer: nn.Module) -> None:
    layer.offset.add_(1)


@pytest.mark.parametrize("write", [_write_bias, _write_attribute, _write_buffer])
@pytest.mark.parametrize("policy", [POLICIES["full"], POLICIES["selective_op"]], ids=["full", "selective_op"])
def test_a_write_that_recompute_would_read_is_an_error_that_names_it(write: Any, policy: dict[str, Any]) -> None:
    model, x = _model(), torch.randn(4, 16)
    lowtide.apply(model, policy)
    for _ in range(2):
        _run(model, x).backward()
    loss = _run(model, x)
    with torch.no_grad():
        write(model["layers"][1])
    with pytest.raises(RecomputeError, match=r"layers\.1.*'(bias|gain|offset)'"):
        loss.backward()
    # The next step is an ordinary one.
    _run(model, x).backward()


class _Slots:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class _Named:
    def __init__(self, scale: float) -> None:
        self.inner = {"scales": [scale]}


class Given(nn.Module):
    """Reads a number from the object that it is given, and changes it there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        if isinstance(given, _Slots):
            scale, given.scale = given.scale, given.scale + 1
        elif isinstance(given, UserDict):
            scale, given["scale"] = given["scale"], given["scale"] + 1
        else:
            scale = given.inner["scales"][0]
            given.inner["scales"][0] = scale + 1
        return torch.sin(self.linear(x)) * scale


@every_policy
@pytest.mark.parametrize("make", [_Slots, _Named, lambda scale: UserDict(scale=scale)], ids=["slots", "nested", "dict"])
def test_objects_of_every_make_are_given_to_recompute_as_they_were(make: Any, policy: dict[str, Any]) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    torch.manual_seed(3)
    bare = nn.ModuleList(Given() for _ in range(3))
    found: list[list[Tensor]] = []
    for applied in (None, policy):
        model = copy.deepcopy(bare)
        if applied is not None:
            lowtide.apply(nn.ModuleDict({"layers": model}), {**applied, "layers": "layers.*"})
        for _ in range(2):
            given, out = make(1.0), x
            for layer in model:
                out = layer(out, given)
            model.zero_grad()
            out.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))
