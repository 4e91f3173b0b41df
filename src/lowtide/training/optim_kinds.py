"""Which optimizers and schedules a config can name; no torch here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from lowtide.training.registry import Component, register
from lowtide.training.section import Section

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["AdamWConfig", "ScheduleConfig", "learning_rate_factor"]


@register("optimizer", "adamw")
class AdamWConfig(Component):
    """AdamW (Loshchilov and Hutter 2019), with weight decay on matrices only."""

    kind: Literal["adamw"] = "adamw"

    lr: float = Field(default=3e-4, gt=0.0)
    """Peak learning rate; the schedule multiplies it."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of gradients and of their squares."""

    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second mean."""

    weight_decay: float = Field(default=0.1, ge=0.0)
    """Pull towards zero of parameters with two or more dimensions; biases and norms have none."""

    fused: bool = False
    """Whether one kernel updates everything. Faster on a GPU; results differ in the last bits."""

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in value):
            raise ValueError(f"each of betas is at least 0 and below 1, got {list(value)}")
        return value

    def build(self, *, model: nn.Module, matrices: frozenset[str]) -> Optimizer:
        """Make the optimizer of a model; ``matrices`` are names from ``optim.matrix_names``."""
        import torch

        from lowtide.training.optim import parameter_groups

        groups = parameter_groups(model, matrices=matrices, weight_decay=self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=self.fused or None)


class ScheduleConfig(Section):
    """How the learning rate moves over the run: a pure function of the step, so resuming needs no state."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises in equal parts to its peak; the first step already has one part."""

    kind: Literal["cosine", "constant"] = "cosine"
    """What follows: half a cosine down to ``final_ratio``, or the peak to the end."""

    final_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of the peak that a cosine has in the last step."""

    def factor(self, step: int, *, steps: int) -> float:
        """Return the share of the peak rate for a step, counted from 0, of a run of ``steps``."""
        return learning_rate_factor(
            step, steps=steps, warmup_steps=self.warmup_steps, kind=self.kind, final_ratio=self.final_ratio
        )


def learning_rate_factor(
    step: int, *, steps: int, warmup_steps: int, kind: Literal["cosine", "constant"], final_ratio: float
) -> float:
    """Return the share of the peak rate, in [0, 1], for a step counted from 0; past the end it stays."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
