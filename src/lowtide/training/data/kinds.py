"""Which data a config can name; no torch here: ``build`` imports what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from lowtide.training.registry import Component, register
from lowtide.training.section import Section

if TYPE_CHECKING:
    from lowtide.training.data.embedded_text import EmbeddedText
    from lowtide.training.data.random_data import RandomData

__all__ = ["EmbeddedTextConfig", "RandomConfig", "Values"]


@register("data", "embedded_text")
class EmbeddedTextConfig(Component):
    """Real text with no download: the language reference that ships inside Python, as bytes.

    It differs a little between Python versions, and so do losses.
    """

    kind: Literal["embedded_text"] = "embedded_text"

    sequence_length: int = Field(default=256, ge=1)
    """Tokens (bytes) of a sequence. Activation memory grows in proportion."""

    batch_size: int = Field(default=8, ge=1)
    """Sequences of a batch on each process. The global batch is this times the number of processes."""

    docstrings: bool = False
    """Whether the docstrings of the standard library are added: about four times the text, some seconds more
    at the start."""

    held_out: float = Field(default=0.05, gt=0.0, lt=0.5)
    """Share of the text that evaluation sees and training does not."""

    def build(self, *, rank: int, world_size: int, seed: int) -> EmbeddedText:
        """Make the source of one rank.

        Raises:
            InputError: this Python carries no text, or too little for one global batch of this length.
        """
        from lowtide.training.data.embedded_text import EmbeddedText

        return EmbeddedText(self, rank=rank, world_size=world_size, seed=seed)


class Values(Section):
    """Shape, type and range of random values."""

    shape: tuple[int, ...] | None = None
    """Sizes of one sample, without the batch; left out, one value per position: ``[sequence_length]``."""

    dtype: Literal["int64", "int32", "float32", "bfloat16", "float16", "float64"] = "int64"
    """Type of the values. Token ids and targets of cross-entropy are ``int64``."""

    low: float = 0.0
    """Smallest value."""

    high: float | None = None
    """Values stay below it. Left out, ``vocab_size`` for whole numbers and 1 for others."""

    @model_validator(mode="after")
    def _in_order(self) -> Values:
        if self.shape is not None and any(n < 1 for n in self.shape):
            raise ValueError(f"sizes are 1 or more, got {list(self.shape)}")
        whole = self.dtype.startswith("int")
        if whole and (self.low != int(self.low) or (self.high is not None and self.high != int(self.high))):
            raise ValueError(f"low and high of {self.dtype} are whole numbers, got {self.low} and {self.high}")
        if self.high is not None and not self.low < self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


@register("data", "random")
class RandomConfig(Component):
    """Random batches, for measuring: no text, no order, the same memory and time."""

    kind: Literal["random"] = "random"

    sequence_length: int = Field(default=256, ge=1)
    """Tokens of a sequence."""

    batch_size: int = Field(default=8, ge=1)
    """Samples of a batch on each process."""

    vocab_size: int = Field(default=256, ge=1)
    """Token ids stay below it, where ``inputs`` and ``targets`` do not say otherwise."""

    inputs: Values = Values()
    """What the model is given."""

    targets: Values = Values()
    """What its output is compared with."""

    evaluation_batches: int = Field(default=2, ge=1)
    """How many batches evaluation sees on each process."""

    @model_validator(mode="after")
    def _ranges_hold_values(self) -> RandomConfig:
        for name, values in (("inputs", self.inputs), ("targets", self.targets)):
            high = self.high_of(values)
            if not values.low < high:
                raise ValueError(
                    f"{name}: low {values.low:g} must be below {high:g}, which is used as high is left out"
                )
        return self

    def high_of(self, values: Values) -> float:
        """The upper end of a range, with the default filled in."""
        if values.high is not None:
            return values.high
        return float(self.vocab_size) if values.dtype.startswith("int") else 1.0

    def shape_of(self, values: Values) -> tuple[int, ...]:
        """Sizes of one sample, with the default filled in."""
        return (self.sequence_length,) if values.shape is None else values.shape

    def build(self, *, rank: int, world_size: int, seed: int) -> RandomData:
        """Make the source of one rank; every rank sees other values."""
        from lowtide.training.data.random_data import RandomData

        return RandomData(self, rank=rank, world_size=world_size, seed=seed)
