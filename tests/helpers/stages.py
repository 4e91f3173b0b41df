"""Stages of a pipeline over the four models: each holds its layers in a dict whose keys have gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from tests.helpers import families, models

ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")
SCHEDULES = ("1F1B", *ZERO_BUBBLE)
MICROBATCHES = 2


class Stage(nn.Module):
    """Layers ``first``, ``first + stages``, ... of a model; the first stage embeds, the last has the head."""

    def __init__(self, family: str, first: int, stages: int, *, dropout: bool) -> None:
        super().__init__()
        self.family = family
        model: Any = families.build(family, layers=2 * stages, dropout=dropout)
        inner = getattr(model, "model", getattr(model, "transformer", model))
        gpt2 = family == "gpt2"
        self.embed = (
            (inner.wte if gpt2 else getattr(inner, "embed_tokens", getattr(inner, "embed", None)))
            if (first == 0)
            else None
        )
        self.places = inner.wpe if gpt2 and first == 0 else None
        self.rotary = getattr(inner, "rotary_emb", None)
        layers = families.blocks(model)
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(first, 2 * stages, stages)})
        last = first == stages - 1
        self.norm = (inner.ln_f if gpt2 else inner.norm) if last else None
        self.head = getattr(model, "lm_head", getattr(model, "head", None)) if last else None

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        if self.embed is not None:
            x = self.embed(x)
            if self.places is not None:
                x = x + self.places(positions)
        more = {} if self.rotary is None else {"position_embeddings": self.rotary(x, positions)}
        for layer in self.layers.values():
            out = layer(x, **more)
            x = out[0] if isinstance(out, tuple) else out
        return x if self.head is None else self.head(self.norm(x))


@dataclass
class Ran:
    """What one step of a pipeline left on this rank."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    regions: list[str] = field(default_factory=list)
    forwards: int = 0
    """Calls of blocks, recompute's too."""


def run(schedule: str, family: str, policy: Any, *, dropout: bool = False) -> Ran:
    """One step, after one in which the stages learn their shapes."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank, world = dist.get_rank(), dist.get_world_size()
    indices = {"1F1B": [rank], "ZBVZeroBubble": [rank, 2 * world - 1 - rank]}.get(schedule, [rank, rank + world])
    total = world * len(indices)
    ran = Ran()
    calls: list[int] = []
    parts: dict[int, Stage] = {}
    for index in indices:
        part = parts[index] = Stage(family, index, total, dropout=dropout)
        if policy is not None:
            ran.regions += [f"{index}: {r.fqn}" for r in lowtide.apply(part, policy).regions]
        for block in part.layers.values():
            # A child's hook: what runs again in recompute, without the block's own call.
            next(iter(block.children())).register_forward_pre_hook(lambda m, a: calls.append(1))
    stages = [PipelineStage(part, i, total, torch.device("cpu")) for i, part in parts.items()]
    kind: Callable[..., Any] = get_schedule_class(schedule)
    losses: list[Tensor] = []
    tokens = torch.cat([models.tokens(step=i) for i in range(MICROBATCHES)])
    made = kind(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=models.loss_of)
    arguments = (tokens,) if 0 in parts else ()
    keywords: dict[str, Any] = {"target": tokens, "losses": losses} if total - 1 in parts else {}
    made.step(*arguments, **keywords)
    for part in parts.values():
        part.zero_grad()
    calls.clear()
    losses.clear()
    torch.manual_seed(41 + rank)
    made.step(*arguments, **keywords)
    ran.gradients = {
        f"{i}.{n}": p.grad.clone()
        for i, part in parts.items()
        for n, p in part.named_parameters()
        if p.grad is not None
    }
    ran.loss = float(sum(losses)) if losses else None
    ran.forwards = len(calls)
    return ran
