"""A model of torchtitan, whose own ``apply_ac`` is left out: ``python examples/own_loop/torchtitan_model.py``."""

from __future__ import annotations

import torch
from torch import nn
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import lowtide


def build() -> nn.Module:
    """Make torchtitan's smallest Llama 3, the same at every call."""
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:
        # Flex attention has no backward on a CPU; on GPUs leave this out.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    return model


def train(policy: object, *, steps: int = 2) -> tuple[nn.Module, list[float]]:
    """Train for some steps; the model and its losses."""
    model = build().train()
    print(lowtide.apply(model, policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(steps):
        tokens = torch.randint(2048, (2, 32), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    # What torchtitan's selective checkpointing keeps; on a CPU its own list would miss attention.
    print(train("torchtitan")[1])
