"""What the kinds of policies have in common: frozen values, shares, and the keys that every kind with regions takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator, model_validator

from lowtide.policy._match import Pattern

__all__ = ["OP_NAME", "Frozen", "Keep", "LayerPolicyBase", "Whole", "as_patterns", "parse_share"]

_SHARE = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*")
OP_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+){0,2}")


class Frozen(BaseModel):
    """A value of which nothing can be changed, and that knows all its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def parse_share(value: str) -> tuple[int, int]:
    """Read ``m/n``."""
    found = _SHARE.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is not a share: write m/n with whole numbers, such as 1/2")
    m, n = int(found[1]), int(found[2])
    if not 1 <= m <= n:
        raise ValueError(f"{value!r} is not a share: m/n needs 1 <= m <= n")
    return m, n


def _whole_number(value: object) -> object:
    """Refuse what pydantic would turn into a whole number: true, false and 2.0."""
    if isinstance(value, bool | float):
        raise ValueError(f"{value!r} is no whole number")
    return value


Whole = Annotated[int, BeforeValidator(_whole_number)]


class Keep(Frozen):
    """The first ``m`` of every ``n`` calls, or the calls in a list; ``always`` is 1/1."""

    m: Whole = 1
    n: Whole = 1
    calls: tuple[Whole, ...] | None = None
    """Numbers of the calls that are kept, counted from 0; then ``m`` and ``n`` say nothing."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if value == "always":
            return {"m": 1, "n": 1}
        if isinstance(value, str):
            m, n = parse_share(value)
            return {"m": m, "n": n}
        if isinstance(value, list | tuple):
            return {"calls": value}
        if isinstance(value, Mapping | Keep):
            return value
        raise ValueError(
            f"{value!r} is not legal: write 'always', a share such as 1/2, or a list of calls such as [0, 3]"
        )

    @field_validator("calls")
    @classmethod
    def _calls_in_order(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not value or min(value) < 0 or len(set(value)) != len(value):
            raise ValueError("a list of calls holds one or more different numbers, counted from 0")
        return tuple(sorted(value))

    @model_validator(mode="after")
    def _in_range(self) -> Keep:
        if not 1 <= self.m <= self.n:
            raise ValueError(f"{self.m}/{self.n} is not a share: m/n needs 1 <= m <= n")
        return self

    @property
    def always(self) -> bool:
        """Whether every call is kept."""
        return self.calls is None and self.m == self.n

    def __str__(self) -> str:
        if self.calls is not None:
            return f"calls {', '.join(map(str, self.calls))}"
        return "always" if self.always else f"{self.m}/{self.n}"

    def keeps(self, call: int) -> bool:
        """Whether the call with this number, counted from 0, is kept."""
        return call in self.calls if self.calls is not None else call % self.n < self.m

    def written(self) -> str | list[int]:
        """Return what a config says."""
        return list(self.calls) if self.calls is not None else str(self)


def as_patterns(value: Any) -> Any:
    """Let one stand for a list of one."""
    return (value,) if isinstance(value, str) else value


class LayerPolicyBase(Frozen):
    """The keys of every kind that makes regions."""

    layers: tuple[str, ...] | None = None
    """Globs on FQNs, by segments: ``model.layers.*``, ``model.layers.{0-7}``, ``**.block.{-1}``. Left out,
    all repeated trainable stacks are found and named in the log."""

    executor: Literal["auto", "recompute", "replay"] = "auto"
    """What carries the policy out. ``recompute`` runs the region's Python code again, ``replay`` only the operators
    that backward needs, from forward's record; what it cannot replay goes to ``recompute``. ``auto`` is
    ``recompute``. Compiled blocks go to the compiler under each of them."""

    preserve_rng: bool = True
    """Whether recompute sees the random state of forward. Off, a region in which a random operator ran is
    refused unless ``allow_inexact`` is set."""

    determinism: Literal["default", "strict"] = "default"
    """``default`` compares operators, shapes and literals of forward and recompute the first time that a
    region meets inputs of a form; ``strict`` also compares every operator's result, bit by bit."""

    allow_inexact: bool = False
    """Lets a policy through whose gradients may differ from those without it. It is written into the record
    of the run."""

    @field_validator("layers", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return as_patterns(value)

    @field_validator("layers")
    @classmethod
    def _patterns_parse(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("an empty list of layers would checkpoint nothing: leave `layers` out to find all blocks")
        for text in value or ():
            Pattern.parse(text)
        return value
