"""Accelerate with FSDP2: ``torchrun --nproc-per-node 2 examples/own_loop/accelerate_fsdp2.py`` (needs GPUs).

Leave ``activation_checkpointing`` of the plugin off. On a CPU accelerate 1.15 does not shard: ``sharded`` tells.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor

import lowtide


def build() -> nn.Module:
    """Make a small encoder, the same at every call."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def sharded(model: nn.Module) -> bool:
    """Tell whether each process really holds only its part of every parameter."""
    return all(isinstance(p, DTensor) for p in model.parameters())


def train(policy: object, *, steps: int = 3) -> tuple[nn.Module, list[float]]:
    """Train for some steps; the model and this process's losses."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    model = build().train()
    accelerator.print(lowtide.apply(model, policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses: list[float] = []
    torch.manual_seed(1 + accelerator.process_index)
    for _ in range(steps):
        loss = model(torch.randn(8, 32, 64, device=accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    trained, values = train(lowtide.Full())
    print(values, "sharded" if sharded(trained) else "NOT sharded: every process holds the whole model")
