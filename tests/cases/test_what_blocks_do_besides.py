"""Things that blocks do besides computing: random numbers of NumPy, losses kept on themselves, modules added later."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import RefusedError

POLICIES = {
    "full": {"kind": "full"},
    "selective_op": {"kind": "selective_op", "save": ["matmul"]},
    "full-replay": {"kind": "full", "executor": "replay"},
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)


class HostMask(Base):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.from_numpy(np.random.rand(16) > 0.3) * random.random()
        return x + self.outer(torch.sin(self.inner(x)) * mask)


class Transposed(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.inner(x)).clone()
        h.t_()
        h.unsqueeze_(0)
        h.squeeze_(0)
        return x + self.outer(h.t().contiguous())


class Auxiliary(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.inner(x))
        self.loss = h.square().mean()
        return x + self.outer(h)


class Norm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.sin(self.norm(self.inner(x))))


class Counted(nn.Module):
    """An adapter that reads and writes a counter of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.calls = base, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.sin(self.base(x)) * self.calls


def _stack(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(kind() for _ in range(3)))


def _steps(model: nn.Module, change: Any = None) -> list[Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    np.random.seed(2)
    random.seed(3)
    found: list[Tensor] = []
    for i in range(4):
        if change is not None and i == 2:
            change(model)
        model.zero_grad()
        torch.manual_seed(i)
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [b.clone() for b in model.buffers()]
    return found


def _adapt(model: nn.Module) -> None:
    for block in model:
        block.inner = Counted(block.inner)


def _thaw(model: nn.Module) -> None:
    for block in model:
        block.norm.train()


def _frozen_norm() -> nn.Module:
    model = _stack(Norm)
    for block in model:
        block.norm.eval()
    return model


@every_policy
@pytest.mark.parametrize(
    ("build", "change"),
    [
        (lambda: _stack(HostMask), None),
        (lambda: _stack(Transposed), None),
        (lambda: _stack(Auxiliary), None),
        (lambda: _stack(Auxiliary), _adapt),
        (_frozen_norm, _thaw),
    ],
    ids=["host_random", "reshaped_in_place", "auxiliary", "adapter_added_later", "norm_thawed_later"],
)
def test_gradients_are_bitwise_those_without_a_policy(build: Any, change: Any, policy: dict[str, Any]) -> None:
    control, again = _steps(build(), change), _steps(build(), change)
    assert all(map(torch.equal, control, again))
    model = build()
    lowtide.apply(model, policy)
    found = _steps(model, change)
    assert len(found) == len(control)
    assert all(map(torch.equal, control, found))


@every_policy
def test_a_loss_that_a_block_keeps_and_nobody_uses_does_not_chain_steps(policy: dict[str, Any]) -> None:
    model = _stack(Auxiliary)
    lowtide.apply(model, policy)

    def live() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    x = torch.randn(8, 16)
    counts: list[int] = []
    for i in range(30):
        model.zero_grad()
        model(x).square().mean().backward()
        if i in (9, 19, 29):
            counts.append(live())
    assert counts[1] == counts[2]
    assert counts[0] == counts[1]


def test_copies_that_share_a_forward_are_refused() -> None:
    model = nn.DataParallel(nn.Sequential(_stack(Base)))
    with pytest.raises(RefusedError, match="DistributedDataParallel"):
        lowtide.apply(model, {"kind": "full"})


@every_policy
def test_function_transforms_are_refused_by_name(policy: dict[str, Any]) -> None:
    model = copy.deepcopy(_stack(Transposed))
    lowtide.apply(model, policy)
    with pytest.raises(RefusedError, match=r"torch\.func"):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(8, 16))


def test_host_random_without_preserved_state_is_refused() -> None:
    model = _stack(HostMask)
    lowtide.apply(model, {"kind": "full", "preserve_rng": False})
    with pytest.raises(RefusedError, match="preserve_rng"):
        model(torch.randn(8, 16))
