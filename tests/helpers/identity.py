"""Everything about a model that must not change under a policy, in one comparable value."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def identity(model: nn.Module) -> dict[str, Any]:
    """Names in their order, classes, which places share a module or a parameter, and optimizer groups."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    return {
        "state_dict": list(model.state_dict()),
        "parameters": [n for n, _ in model.named_parameters()],
        "buffers": [n for n, _ in model.named_buffers()],
        "modules": [(n, type(m).__module__, type(m).__qualname__) for n, m in model.named_modules()],
        "bases": [[k.__qualname__ for k in type(m).__mro__] for m in model.modules()],
        "shared": sorted(p for p in places.values() if len(p) > 1),
        "tied": sorted(p for p in tied.values() if len(p) > 1),
        "groups": optimizer_groups(model),
        "text": repr(model),
    }


def optimizer_groups(model: nn.Module) -> list[list[int]]:
    """Weight decay by name and shape, as trainers do it: which parameters (by place) each group holds."""
    order = {id(p): i for i, p in enumerate(model.parameters())}
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2 and "norm" not in n and not n.endswith("bias")]
    rest = [p for p in model.parameters() if all(p is not d for d in decay)]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    return [[order[id(p)] for p in group["params"]] for group in optimizer.param_groups]
