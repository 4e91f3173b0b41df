"""Lightning Fabric with FSDP2 on two processes.

``torchrun --nproc-per-node 2 examples/own_loop/lightning_fabric.py``
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lowtide


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x and what the layer adds."""
        return x + self.drop(self.down(self.up(self.norm(x)).relu()))


class Model(nn.Module):
    """Some layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _parallelize(model: nn.Module, mesh: object) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def train(policy: object, *, steps: int = 3, devices: int = 2) -> tuple[nn.Module, list[float]]:
    """Train for some steps; the model and this process's losses."""
    strategy = ModelParallelStrategy(_parallelize, data_parallel_size=devices, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = Model()
    fabric.print(lowtide.apply(model, policy))
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    torch.manual_seed(1 + fabric.global_rank)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(torch.randn(8, 64)).logsumexp(-1).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    print(train(lowtide.Full())[1])
