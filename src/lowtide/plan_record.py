"""``Plan``: what every layer keeps and recomputes, what that should cost, and which model it is for.

A plan names operators as policies do: an overload, and the numbers of its calls within one call of the block, from 0.
Layers that do the same share an entry, so a plan of 126 layers has a few.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lowtide.records import CategoryBytes, Environment, Record, Value

__all__ = ["BlockPrint", "OtherChoice", "Plan", "PlanLayers"]


class BlockPrint(Value):
    """By what a kind of block is known again."""

    block: str
    """Class."""

    layers: tuple[str, ...]
    """Patterns that name all its layers."""

    count: int = Field(ge=1)

    parameters: int = Field(ge=0)
    """Numbers in its parameters."""

    parameters_hash: str
    """Of the names of its parameters and how many numbers each has."""

    inputs: tuple[str, ...]
    """What it was given: name, type and shape of each tensor."""

    operators: int = Field(ge=0)
    operators_hash: str
    """Of its forward: operators, and shapes and types of what they made."""


class PlanLayers(Value):
    """Layers that do the same."""

    layers: tuple[str, ...]
    """Patterns that name them, as in a policy."""

    count: int = Field(ge=1)

    block: str
    """Class of the block."""

    region: bool
    """Whether these blocks are checkpointed at all."""

    save: dict[str, tuple[int, ...]] = {}
    """Overload -> numbers of its calls whose outputs are saved; all else is recomputed where backward needs it."""

    saved_bytes: int = Field(ge=0)
    """Of one layer, with its input where it holds that."""

    recompute_ms: float = Field(ge=0)
    """Of one layer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.save and not self.region:
            raise ValueError("layers without a region keep what autograd keeps: `save` has no meaning there")
        for op, calls in self.save.items():
            if not calls or list(calls) != sorted(set(calls)) or calls[0] < 0:
                raise ValueError(f"save.{op}: give different numbers of calls, counted from 0, in order")
        return self


class OtherChoice(Value):
    """What another policy would cost, to compare with."""

    policy: str
    peak_bytes: int = Field(ge=0)
    saved_bytes: int = Field(ge=0)
    recompute_ms: float = Field(ge=0)
    step_ms: float | None = None
    fits: bool


class Plan(Record):
    """What each layer keeps, chosen for a memory limit."""

    kind: Literal["Plan"] = "Plan"
    schema_version: Literal[1] = 1

    limit_bytes: int = Field(ge=1)
    margin_bytes: int = Field(ge=0)
    """Of the limit: what must stay free besides the predicted peak."""

    peak_bytes: int = Field(ge=0)
    """Predicted, without the margin."""

    peak_at: str
    """Where in the step the peak is."""

    at_peak: CategoryBytes

    simulated_peak_bytes: int | None = None
    """The peak of the whole step under fake tensors with this plan; None where it was not asked for."""

    saved_bytes: int = Field(ge=0)
    """Of all layers, from forward to backward."""

    recompute_ms: float = Field(ge=0)
    """Of all layers in one step."""

    fastest_ms: float = Field(ge=0)
    """No choice under the limit recomputes less than this; where it equals ``recompute_ms``, this plan is proven best
    among the choices that were looked at."""

    step_ms: float | None = None
    tokens_per_s: float | None = None

    executor: Literal["recompute", "replay"]
    device: str
    world_size: int = Field(ge=1)

    choices: tuple[PlanLayers, ...]
    """Every layer once."""

    blocks: tuple[BlockPrint, ...]
    """The model that it is for."""

    others: tuple[OtherChoice, ...] = ()

    assumptions: tuple[str, ...] = ()
    environment: Environment

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.at_peak.total != self.peak_bytes:
            raise ValueError(f"at_peak adds up to {self.at_peak.total}, and peak_bytes is {self.peak_bytes}")
        if self.peak_bytes + self.margin_bytes > self.limit_bytes:
            raise ValueError(
                f"peak_bytes {self.peak_bytes} and margin_bytes {self.margin_bytes} are above limit_bytes "
                f"{self.limit_bytes}"
            )
        return self
