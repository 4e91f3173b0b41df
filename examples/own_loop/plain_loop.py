"""A loop of plain PyTorch: ``python examples/own_loop/plain_loop.py``."""

from __future__ import annotations

import torch
from torch import nn

import lowtide


def build() -> nn.Module:
    """Make a small encoder, the same at every call."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Linear(16, 64), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(64, 4)
    )


def train(policy: object, *, steps: int = 5) -> tuple[nn.Module, list[float]]:
    """Train for some steps; the model and its losses."""
    model = build().train()
    print(lowtide.apply(model, policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        x = torch.randn(8, 32, 16)
        loss = model(x).mean(1).softmax(-1)[:, 0].log().neg().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    print(train(lowtide.EveryNthLayer(n=2))[1])
