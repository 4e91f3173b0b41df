"""``InspectReport``: what backward needs, tensor by tensor, and what a policy does with it; strict JSON.

    kinds    blocks with equal operators and equal rules are one kind; its rows are those of one block
    rest     what is held outside of blocks: embedding, final norm, head, loss, and what several blocks share

A storage counts once: ``saved_bytes`` of a kind times its blocks, over all kinds, and ``rest_bytes`` make
``total_bytes``, which is what ``lowtide.measurement.measure_saved_bytes`` counts on real tensors.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lowtide.records import Environment, Record, Value

__all__ = ["BlockKind", "Decision", "InspectReport", "NeverNeeded", "RegionRow", "TensorRow"]

Decision = Literal["saved", "recomputed", "offloaded", "input"]


class TensorRow(Value):
    """One tensor that backward needs, or that is held so that something can run again."""

    op: str
    """The operator that made it; empty for what was there before the block ran."""

    module: str
    """FQN, relative to the block, of the module inside of which it was made; for an input, the argument."""

    shape: tuple[int, ...]
    dtype: str

    nbytes: int = Field(ge=0)
    """Of its storage, which views share."""

    decision: Decision
    """``input``: made before the block, and held. ``offloaded``: kept on the host."""

    rule: int | None = None
    """Place in the policy of the rule that decided."""

    why: str
    """That rule as text, or ``default``, ``routing``, ``executor keeps it``, ``no region``."""

    counted: bool = True
    """Whether its bytes count here: not where it is recomputed, offloaded, another block's or the rest's."""

    needed: bool = True
    """Whether backward reads it; else it is there so that other tensors can be made again."""

    recompute_flops: int | None = None
    """Of the operator that made it, where that runs again; None where no formula is known, or none runs."""

    recompute_ms: float | None = None
    """Estimated time of that operator."""


class NeverNeeded(Value):
    """An output that the rules save and that backward never needs."""

    op: str
    module: str
    nbytes: int = Field(ge=0)
    why: str
    held: bool
    """Whether it is held all the same, since executor recompute runs everything that is not."""


class RegionRow(Value):
    """A region in a block."""

    module: str
    """Relative to the block; empty for the block itself."""
    executor: str
    reason: str


class BlockKind(Value):
    """Blocks that are alike. Bytes, FLOPs and time are those of one block."""

    block_class: str
    blocks: tuple[str, ...]
    """FQNs."""
    regions: tuple[RegionRow, ...]
    rows: tuple[TensorRow, ...]
    never_needed: tuple[NeverNeeded, ...] = ()

    saved_bytes: int = Field(ge=0)
    """Alive at the end of forward only because backward needs it, inputs too."""
    input_bytes: int = Field(ge=0)
    """Of these, inputs."""
    recomputed_bytes: int = Field(ge=0)
    """Of tensors that backward needs and that are made again."""
    recompute_flops: int = Field(ge=0)
    """Of all that runs again, also in between; without operators that have no formula."""
    recompute_ms: float = Field(ge=0)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.saved_bytes != sum(r.nbytes for r in self.rows if r.counted):
            raise ValueError("the counted rows make saved_bytes")
        return self


class InspectReport(Record):
    """What is kept for backward, and why."""

    kind: Literal["InspectReport"] = "InspectReport"
    schema_version: Literal[1] = 1

    model: str
    """Its class."""
    device: str
    policy: str
    """Its kind."""
    rules: tuple[str, ...]
    """All rules of the policy as text, in order."""

    kinds: tuple[BlockKind, ...]
    rest: tuple[TensorRow, ...] = ()
    rest_bytes: int = Field(ge=0)
    total_bytes: int = Field(ge=0)
    recompute_flops: int = Field(ge=0)
    recompute_ms: float = Field(ge=0)

    assumptions: tuple[str, ...] = ()
    environment: Environment

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        blocks = sum(kind.saved_bytes * len(kind.blocks) for kind in self.kinds)
        if self.total_bytes != blocks + self.rest_bytes:
            raise ValueError("kinds and rest make total_bytes")
        return self

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return sum(len(kind.blocks) for kind in self.kinds)

    @property
    def checkpointed(self) -> int:
        """How many of them hold regions."""
        return sum(len(kind.blocks) for kind in self.kinds if kind.regions)

    def block_bytes(self, fqn: str) -> int:
        """Return the saved bytes of one block."""
        return next(kind.saved_bytes for kind in self.kinds if fqn in kind.blocks)
