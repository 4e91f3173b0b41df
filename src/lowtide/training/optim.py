"""What surrounds the optimizer: parameter groups, the rate of a step, clipping over all ranks.

Groups are made from bare names, and from shapes seen before sharding, because FSDP1 flattens a matrix into a
vector and every wrapper has names of its own: groups are the same with any policy, compiled or not, sharded
or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lowtide.regions import bare_fqn, innermost

__all__ = ["clip_gradients", "matrix_names", "named_bare_parameters", "parameter_groups", "set_learning_rate"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def named_bare_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name each parameter once as the bare model does, whatever wrappers it is in."""
    return [(bare_fqn(name), parameter) for name, parameter in innermost(model).named_parameters()]


def matrix_names(model: nn.Module) -> frozenset[str]:
    """Name the parameters with two or more dimensions. Call it before sharding: FSDP1 flattens."""
    return frozenset(name for name, p in named_bare_parameters(model) if p.ndim >= 2)


def parameter_groups(model: nn.Module, *, matrices: frozenset[str], weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into those with weight decay and those without; no group is empty."""
    trainable = [(name, p) for name, p in named_bare_parameters(model) if p.requires_grad]
    groups = [
        {"params": [p for n, p in trainable if n in matrices], "weight_decay": weight_decay},
        {"params": [p for n, p in trainable if n not in matrices], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(model: nn.Module, *, max_norm: float | None) -> Tensor:
    """Return the norm of all gradients over all shards, float32, and scale them down to ``max_norm``.

    ``None`` only measures. A norm that is not finite leaves every gradient not finite: look at it before the
    optimizer steps. Collective: every rank calls it. Gradients below float32 are summed up in float32.
    """
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(float("inf") if max_norm is None else max_norm)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    total = _total_norm(gradients)
    if max_norm is not None:
        _scale(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _scale(gradients: list[Tensor], scale: Tensor) -> None:
    """Multiply in place; written out, as torch's own first looks at lists that mix plain and sharded ones."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        alike.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), locals_ in alike.items():
        torch._foreach_mul_(locals_, scale.to(device, dtype))


def _total_norm(gradients: list[Tensor]) -> Tensor:
    sharded = [g for g in gradients if isinstance(g, DTensor)]
    plain = [g for g in gradients if not isinstance(g, DTensor)]
    parts = [_norm(plain)] if plain else []
    if sharded:
        joined = _norm([*sharded])
        assert isinstance(joined, DTensor)
        parts.append(joined.full_tensor())
    return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))


def _norm(gradients: list[Tensor]) -> Tensor:
    if any(g.dtype in _LOW_PRECISION for g in gradients):
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        return torch.linalg.vector_norm(torch.stack(norms))
    return torch.nn.utils.get_total_norm(gradients)
