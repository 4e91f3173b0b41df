"""Offload on one CUDA device: exact, a lower peak of the allocator, copies that run beside computation.

``python -m pytest tests/gpu/test_offload.py`` on a machine with a GPU. Until it has passed on one, offload is called
experimental.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.gpus(1)

DIM, LENGTH, BATCH, LAYERS = 2048, 4096, 2, 8
OFFLOAD = {
    "kind": "rules",
    "default": "recompute",
    "rules": [{"op": "sdpa", "action": "offload"}, {"op": "matmul", "action": "offload"}],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(BATCH, LENGTH, 3, 16, DIM // 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, DIM))
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(policy: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model = Model().to("cuda", torch.bfloat16)
    if policy is not None:
        lowtide.apply(model, policy)
    return model, torch.randn(BATCH, LENGTH, DIM, device="cuda", dtype=torch.bfloat16)


def step(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(x).float().pow(2).mean()
    loss.backward()
    return loss.detach()


def with_action(action: str) -> dict[str, Any]:
    return {**OFFLOAD, "rules": [{**rule, "action": action} for rule in OFFLOAD["rules"]]}


def gradients(policy: Any) -> list[Tensor]:
    model, x = build(policy)
    for _ in range(3):
        step(model, x)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_gradients_are_exact() -> None:
    wanted = gradients(None)
    assert all(torch.equal(a, b) for a, b in zip(wanted, gradients(None), strict=True)), "the control"
    assert all(torch.equal(a, b) for a, b in zip(wanted, gradients(OFFLOAD), strict=True))


def peak(policy: Any) -> int:
    model, x = build(policy)
    for _ in range(3):
        step(model, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(model, x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_the_allocators_peak_is_lower_than_with_the_same_values_saved() -> None:
    saved, parked = peak(with_action("save")), peak(OFFLOAD)
    one_block = 2 * BATCH * LENGTH * DIM * (3 + 1 + 1 + 4)
    # All blocks' values go but those of the last one, of one that is on its way out and one on its way back.
    assert saved - parked > (LAYERS - 4) * one_block, (saved, parked)


def test_copies_run_beside_computation() -> None:
    """Of the time that copies take, most lies under kernels of the computation's stream."""
    model, x = build(OFFLOAD)
    for _ in range(3):
        step(model, x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, x)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [
        e.time_range
        for e in events
        if "memcpy" in e.name.lower() and ("htod" in e.name.lower() or "dtoh" in e.name.lower())
    ]
    kernels = [e.time_range for e in events if "memcpy" not in e.name.lower() and "memset" not in e.name.lower()]
    assert copies, "nothing was copied"
    total = sum(c.end - c.start for c in copies)
    beside = sum(max(0.0, min(c.end, k.end) - max(c.start, k.start)) for c in copies for k in kernels)
    assert beside / total > 0.8, f"{beside / total:.0%} of the copies' time lies beside kernels"
