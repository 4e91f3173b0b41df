"""What ``lowtide calibrate`` measured on one machine, as a record in a file.

A rate belongs to a size: a product of small matrices is slower than one of large ones, and what fits into a cache moves
faster than what does not. Points are the sizes that were measured; between two of them rates are interpolated on the
logarithm of the size, beyond the ends the last one stands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from lowtide.errors import InputError
from lowtide.records import Environment, Record, Value

__all__ = ["CollectivePoint", "DeviceProfile", "RatePoint", "read_profile"]

OperatorClass = Literal[
    "matmul", "attention", "attention_backward", "pointwise", "transcendental", "reduction", "normalisation", "copy"
]
"""Operators that reach like shares of a device's peaks."""


class RatePoint(Value):
    """One measured speed."""

    operators: OperatorClass
    dtype: str
    """As in ``bfloat16``."""

    size: float = Field(gt=0)
    """Floating-point operations of the call for ``matmul`` and attention, bytes moved for all others."""

    per_s: float = Field(gt=0)
    """The same unit, a second."""


class CollectivePoint(Value):
    """One measured collective between processes of one machine."""

    collective: Literal["all_gather", "reduce_scatter", "all_reduce"]
    ranks: int = Field(ge=2)
    nbytes: int = Field(ge=1)
    """Of the whole tensor: what all_gather returns, what reduce_scatter and all_reduce are given."""
    ms: float = Field(gt=0)


class DeviceProfile(Record):
    """Measured speeds of one device of one machine."""

    kind: Literal["DeviceProfile"] = "DeviceProfile"
    schema_version: Literal[1] = 1

    device: str
    """Its name in the device table where it stands there (``cpu``, ``H100``), else what its driver calls it."""

    kernels: Literal["cpu", "cuda", "rocm"]
    threads: int = Field(ge=1, default=1)
    """CPU threads that computed; 1 on a GPU."""

    rates: tuple[RatePoint, ...]
    collectives: tuple[CollectivePoint, ...] = ()

    operator_us: float = Field(ge=0)
    """What one small operator takes, with autograd's book-keeping: microseconds."""

    view_us: float = Field(ge=0)
    """What one view takes: microseconds."""

    seconds: float = Field(ge=0, default=0)
    """How long measuring took."""

    environment: Environment

    @model_validator(mode="after")
    def _has_products(self) -> Self:
        measured = {(p.operators, p.dtype) for p in self.rates}
        for needed in ("matmul", "pointwise"):
            if (needed, "float32") not in measured:
                raise ValueError(f"a profile has at least one rate of {needed} in float32")
        return self

    def per_s(self, operators: OperatorClass, dtype: str, size: float) -> float | None:
        """Return operations or bytes a second at a size; None where the class was not measured in this type."""
        points = [(p.size, p.per_s) for p in self.rates if p.operators == operators and p.dtype == dtype]
        return interpolate(points, size) if points else None

    def collective_ms(self, collective: str, nbytes: float, ranks: int) -> float | None:
        """Return the time of a collective; None where none of this kind and number of ranks was measured."""
        points = [
            (float(p.nbytes), p.nbytes / p.ms)
            for p in self.collectives
            if p.collective == collective and p.ranks == ranks
        ]
        if not points or nbytes <= 0:
            return None
        # Below the smallest message only latency is left.
        least = min(size for size, _ in points)
        return max(nbytes, least) / interpolate(points, max(nbytes, least))


def interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """Return the rate at ``size``, linear in the logarithm of the size between (size, rate) points."""
    ordered = sorted(points)
    if size <= ordered[0][0]:
        return ordered[0][1]
    for (low, at_low), (high, at_high) in itertools.pairwise(ordered):
        if size <= high:
            share = math.log(size / low) / math.log(high / low) if high > low else 1.0
            return at_low + share * (at_high - at_low)
    return ordered[-1][1]


def read_profile(path: str | Path) -> DeviceProfile:
    """Read the file that ``lowtide calibrate`` wrote.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise InputError(
            f"the device profile {path} cannot be read: {error.strerror or error}; `lowtide calibrate` writes one"
        ) from None
    return DeviceProfile.from_json(text)
