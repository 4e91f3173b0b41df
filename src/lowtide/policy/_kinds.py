"""One frozen class per kind of policy, tagged by ``kind``; unknown keys are refused.

A policy is a value: hashable, comparable, printable; it holds no module and no counter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from lowtide.errors import PolicyError, nearest
from lowtide.policy._match import Pattern

_SHARE = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*")
_OP_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+){0,2}")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _parse_share(value: str) -> tuple[int, int]:
    found = _SHARE.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is not a share: write m/n with whole numbers, such as 1/2")
    m, n = int(found[1]), int(found[2])
    if not 1 <= m <= n:
        raise ValueError(f"{value!r} is not a share: m/n needs 1 <= m <= n")
    return m, n


def _no_truth_value(value: object) -> object:
    """Refuse true and false where a number is meant: pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    return value


Whole = Annotated[int, BeforeValidator(_no_truth_value)]


class Keep(_Frozen):
    """The first ``m`` of every ``n`` calls; ``always`` is 1/1."""

    m: Whole = 1
    n: Whole = 1

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if value == "always":
            return {"m": 1, "n": 1}
        if isinstance(value, str):
            m, n = _parse_share(value)
            return {"m": m, "n": n}
        if isinstance(value, Mapping | Keep):
            return value
        raise ValueError(f"{value!r} is not legal: write 'always' or a share such as 1/2")

    @model_validator(mode="after")
    def _in_range(self) -> Keep:
        if not 1 <= self.m <= self.n:
            raise ValueError(f"{self.m}/{self.n} is not a share: m/n needs 1 <= m <= n")
        return self

    def __str__(self) -> str:
        return "always" if self.m == self.n else f"{self.m}/{self.n}"

    def keeps(self, call: int) -> bool:
        """Whether the call with this number, counted from 0, is kept."""
        return call % self.n < self.m


class SaveRule(_Frozen):
    """An operator whose outputs are saved."""

    op: str
    """An overload (``aten.mm.default``), a packet (``aten.mm``: all its overloads) or an alias (``matmul``,
    ``sdpa``, ``collective``)."""

    keep: Keep = Keep()
    """``always``, or ``m/n``: the first m of every n calls are saved, counted anew in every call of a region
    over everything that this rule matches."""

    optional: bool = False
    """Whether the rule may match nothing. By default a rule that no region ever ran is an error."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"op": value} if isinstance(value, str) else value

    @field_validator("op")
    @classmethod
    def _named_well(cls, value: str) -> str:
        if _OP_NAME.fullmatch(value) is None:
            raise ValueError(f"{value!r} is not an operator name: write aten.mm, aten.mm.default or an alias")
        return value

    def __str__(self) -> str:
        return self.op if self.keep.m == self.keep.n else f"{self.op} {self.keep}"


def _as_patterns(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class _LayerPolicy(_Frozen):
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
        return _as_patterns(value)

    @field_validator("layers")
    @classmethod
    def _patterns_parse(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("an empty list of layers would checkpoint nothing: leave `layers` out to find all blocks")
        for text in value or ():
            Pattern.parse(text)
        return value


class NoPolicy(_Frozen):
    """Keeps everything, as PyTorch does."""

    kind: Literal["none"] = "none"


class Full(_LayerPolicy):
    """Each matched block saves only its inputs (and integer routing results); the rest is recomputed."""

    kind: Literal["full"] = "full"


class EveryNthLayer(_LayerPolicy):
    """Checkpoints the blocks whose index is 0, n, 2n, ..."""

    kind: Literal["every_nth_layer"] = "every_nth_layer"

    n: Whole = Field(ge=1)
    """Every how many blocks one is checkpointed; 1 is all of them."""


class SomeLayers(_LayerPolicy):
    """Checkpoints a share of the blocks, or those in a list."""

    kind: Literal["some_layers"] = "some_layers"

    checkpoint: str | tuple[Whole, ...]
    """A share ``p/q`` (blocks whose index mod q is below p) or a list of block indices."""

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _of_a_kind(cls, value: Any) -> Any:
        if not isinstance(value, str | list | tuple):
            raise ValueError("write a share such as 3/4 or a list of block indices such as [0, 1, 5]")
        return value

    @field_validator("checkpoint")
    @classmethod
    def _share_or_list(cls, value: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(value, str):
            p, q = _parse_share(value)
            return f"{p}/{q}"
        if not value:
            raise ValueError("an empty list would checkpoint nothing: write `kind: none` for that")
        if any(i < 0 for i in value):
            raise ValueError(f"block indices count from 0, got {min(value)}")
        if len(set(value)) != len(value):
            raise ValueError("a block index stands twice in the list")
        return tuple(sorted(value))

    def share(self) -> tuple[int, int] | None:
        """Return p and q where ``checkpoint`` is a share, else None."""
        return _parse_share(self.checkpoint) if isinstance(self.checkpoint, str) else None


class SelectiveOp(_LayerPolicy):
    """Saves the outputs of named operators in each matched block and recomputes the rest."""

    kind: Literal["selective_op"] = "selective_op"

    save: tuple[SaveRule, ...] = Field(min_length=1)
    """Operators whose outputs are saved, each a name or ``{op, keep}``. An operator that two rules match is
    decided by the first."""

    @field_validator("save", mode="before")
    @classmethod
    def _one_or_many_rules(cls, value: Any) -> Any:
        return _as_patterns(value)


Policy = Annotated[NoPolicy | Full | EveryNthLayer | SomeLayers | SelectiveOp, Field(discriminator="kind")]
"""Any kind of policy, told apart by ``kind``."""

LayerPolicy = Full | EveryNthLayer | SomeLayers | SelectiveOp
"""The kinds that make regions."""

_ADAPTER: TypeAdapter[NoPolicy | LayerPolicy] = TypeAdapter(Policy)
_KINDS = ("none", "full", "every_nth_layer", "some_layers", "selective_op")


def parse_policy(value: object) -> NoPolicy | LayerPolicy:
    """Turn a mapping (as read from YAML or JSON) or a policy into a policy.

    Raises:
        PolicyError: an unknown kind or key, or a value out of range; the message lists what is legal.
    """
    if isinstance(value, NoPolicy | Full | EveryNthLayer | SomeLayers | SelectiveOp):
        return value
    if not isinstance(value, Mapping):
        raise PolicyError(
            f"a policy is a mapping with `kind`, or a policy object such as lowtide.Full(); "
            f"got {type(value).__name__}. Kinds: {', '.join(_KINDS)}"
        )
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        near = nearest(str(kind), _KINDS, count=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PolicyError(f"policy.kind: {kind!r} is not a kind of policy. Kinds: {', '.join(_KINDS)}.{hint}")
    try:
        return _ADAPTER.validate_python(dict(value))
    except ValidationError as error:
        raise PolicyError(_explain(error, kind)) from None
    except RecursionError:
        raise PolicyError(f"policy: nested too deeply for a policy of kind {kind}") from None


def _explain(error: ValidationError, kind: str) -> str:
    lines: list[str] = []
    for item in error.errors():
        # The tag of the union stands first, and members of a union inside a field carry a type's name.
        steps = [p for p in item["loc"][1:] if not (isinstance(p, str) and p.startswith(("str", "tuple[")))]
        path = ".".join(["policy", *map(str, steps)])
        if item["type"] == "extra_forbidden":
            lines.append(_unknown_key(path, kind))
        else:
            lines.append(f"{path}: {item['msg'].removeprefix('Value error, ')} (got {item['input']!r})")
    return "; ".join(lines)


def _unknown_key(path: str, kind: str) -> str:
    models: dict[str, type[BaseModel]] = {
        m.model_fields["kind"].default: m for m in (NoPolicy, Full, EveryNthLayer, SomeLayers, SelectiveOp)
    }
    model = SaveRule if path.startswith("policy.save.") else models[kind]
    legal = list(model.model_fields)
    near = nearest(path.rsplit(".", 1)[-1], legal, count=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{path}: unknown key. Legal keys: {', '.join(legal)}.{hint}"
