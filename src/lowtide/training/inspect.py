"""What a config's policy keeps of its model for backward, tensor by tensor: no GPU, no weights.

config ─► data (one batch, for its shapes) ─► model under fake tensors, in the type that it computes in ─► inspect
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.api import as_policy, inspect
from lowtide.errors import PolicyError
from lowtide.inspect_report import InspectReport
from lowtide.policy import MemoryBudget, NoPolicy, Rules, expand
from lowtide.prediction import find_device
from lowtide.regions import find_blocks
from lowtide.tracing import fake_building
from lowtide.training.build import build_bare, check_vocabulary
from lowtide.training.config import TrainConfig
from lowtide.training.loop import next_token_loss
from lowtide.training.model.forward import forward_logits
from lowtide.training.registry import Builder

__all__ = ["expand_config", "inspect_config"]


def inspect_config(config: TrainConfig, *, device: str | None = None, threads: int | None = None) -> InspectReport:
    """Inspect one forward and loss of a config on one rank, with the batch of that rank.

    Args:
        config: what would be trained.
        device: what it would compute on; left out, ``"cpu"``.
        threads: CPU threads; left out, the config's, else one.

    Raises:
        UserError: an unknown device, or a forward that depends on the values of tensors.
        PolicyError: the policy cannot be applied to this model.
    """
    target = find_device(device or "cpu")
    data: Any = Builder().build(config.data, rank=0, world_size=1, seed=config.run.seed)
    like = [(t.shape, t.dtype) for t in next(iter(data.batches()))]
    with torch.random.fork_rng(devices=[]), FakeTensorMode() as mode:
        with fake_building(mode):
            model = build_bare(config)
            check_vocabulary(model, data)
            batch = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in like)
        return inspect(
            model,
            batch,
            config.policy,
            forward=_loss,
            device=target.name,
            threads=threads or config.launch.threads or 1,
        )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return next_token_loss(forward_logits(model, batch[0]), batch[1])


def expand_config(config: TrainConfig) -> Rules:
    """Write a config's policy as ``rules``.

    Raises:
        PolicyError: a policy that makes no regions, or that the compiler carries out.
        NothingMatchedError: no blocks, or patterns that match none.
        Exception: whatever building the model under fake tensors raises.
    """
    policy = as_policy(config.policy)
    if isinstance(policy, NoPolicy | MemoryBudget):
        raise PolicyError(f"policy {policy.kind} is no choice between operators, and no rules say it")
    if isinstance(policy, Rules):
        return policy
    with torch.random.fork_rng(devices=[]), FakeTensorMode() as mode:
        with fake_building(mode):
            model = build_bare(config)
        return expand(policy, find_blocks(model, policy.layers))
