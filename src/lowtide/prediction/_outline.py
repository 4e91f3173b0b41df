"""A training step with its blocks taken out: what is alive when, whatever the blocks keep.

Made once for a model, a sharding and a batch (``lowtide.tracing.trace_outline``): parameters, gradients, optimizer
states, what sharding gathers and reduces, embedding, head, loss and optimizer are all there, as in the real step; each
block is an empty call with the right arguments and results. A policy changes nothing of it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lowtide.records import Category, Environment, Phase, Record, Value

__all__ = ["BlockCall", "OutlineChange", "StepOutline"]


class OutlineChange(Value):
    """One storage grew, shrank or went."""

    storage: int = Field(ge=0)
    delta: int
    """Bytes."""
    phase: Phase
    module: str
    op: str


class BlockCall(Value):
    """One call of a block in the step. Places are numbers of changes that came before."""

    block: str
    """FQN."""
    kind: str
    """Which blocks are alike: key of its trace."""
    forward: tuple[int, int]
    """Where its forward begins and ends."""
    backward: tuple[int, int] | None = None
    """Where its backward begins and ends; None where it has none."""
    arguments: tuple[tuple[str, int], ...] = ()
    """(name, storage) of what it was given."""


class PhaseTimes(Value):
    """Milliseconds of one pass without the blocks."""

    computing: float = 0.0
    sharding: float = 0.0
    """Collectives that run beside the computation on a GPU."""
    waiting: float = 0.0
    """Collectives that are waited for."""


class StepOutline(Record):
    """Everything of one training step on one rank but the blocks."""

    kind: Literal["StepOutline"] = "StepOutline"
    schema_version: Literal[1] = 1

    categories: tuple[Category, ...]
    """Of every storage."""

    changes: tuple[OutlineChange, ...]
    calls: tuple[BlockCall, ...]
    """In the order of forward."""

    forward: PhaseTimes = PhaseTimes()
    backward: PhaseTimes = PhaseTimes()
    optimizer: PhaseTimes = PhaseTimes()
    model_flops: int = 0
    hardware_flops: int = 0
    """Of products outside of blocks."""

    tokens: int | None = None
    """Of all ranks in a step."""

    dtype: str = "float32"
    """In which the blocks' products run, for utilisation."""

    device: str
    world_size: int = Field(ge=1)
    rank: int = Field(ge=0)
    threads: int = Field(ge=1, default=1)
    assumptions: tuple[str, ...] = ()
    environment: Environment
