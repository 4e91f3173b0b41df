"""One frozen class per kind of policy, tagged by ``kind``; unknown keys are refused.

A policy is a value: hashable, comparable, printable; it holds no module and no counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator, model_validator

from lowtide.errors import PolicyError, nearest
from lowtide.policy._base import OP_NAME, Frozen, Keep, LayerPolicyBase, Whole, as_patterns, parse_share
from lowtide.policy._presets import named_policy, preset_names
from lowtide.policy._rules import Rule, Rules
from lowtide.units import parse_bytes


class SaveRule(Frozen):
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
        if OP_NAME.fullmatch(value) is None:
            raise ValueError(f"{value!r} is not an operator name: write aten.mm, aten.mm.default or an alias")
        return value

    def __str__(self) -> str:
        return self.op if self.keep.always else f"{self.op} {self.keep}"


class NoPolicy(Frozen):
    """Keeps everything, as PyTorch does."""

    kind: Literal["none"] = "none"


class Full(LayerPolicyBase):
    """Each matched block saves only its inputs (and integer routing results); the rest is recomputed."""

    kind: Literal["full"] = "full"


class EveryNthLayer(LayerPolicyBase):
    """Checkpoints the blocks whose index is 0, n, 2n, ..."""

    kind: Literal["every_nth_layer"] = "every_nth_layer"

    n: Whole = Field(ge=1)
    """Every how many blocks one is checkpointed; 1 is all of them."""


class SomeLayers(LayerPolicyBase):
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
            p, q = parse_share(value)
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
        return parse_share(self.checkpoint) if isinstance(self.checkpoint, str) else None


class SelectiveOp(LayerPolicyBase):
    """Saves the outputs of named operators in each matched block and recomputes the rest."""

    kind: Literal["selective_op"] = "selective_op"

    save: tuple[SaveRule, ...] = Field(min_length=1)
    """Operators whose outputs are saved, each a name or ``{op, keep}``. An operator that two rules match is
    decided by the first."""

    @field_validator("save", mode="before")
    @classmethod
    def _one_or_many_rules(cls, value: Any) -> Any:
        return as_patterns(value)


class MemoryBudget(LayerPolicyBase):
    """Under ``torch.compile``: the compiler chooses what to keep, up to a fraction of what it would keep."""

    kind: Literal["memory_budget"] = "memory_budget"

    fraction: float = Field(gt=0, lt=1)
    """Share of the activations that the compiler would save which it may save. Its own choice, graph by graph: this
    setting holds for the blocks of this model only. Blocks with random operators are refused, since PyTorch's
    gradients are wrong there."""

    @model_validator(mode="after")
    def _only_what_means_something(self) -> MemoryBudget:
        for name in ("executor", "preserve_rng", "determinism"):
            if getattr(self, name) != MemoryBudget.model_fields[name].default:
                raise ValueError(f"`{name}` has no meaning here: the compiler carries a memory budget out")
        return self


Policy = Annotated[
    NoPolicy | Full | EveryNthLayer | SomeLayers | SelectiveOp | Rules | MemoryBudget, Field(discriminator="kind")
]
"""Any kind of policy, told apart by ``kind``."""

LayerPolicy = Full | EveryNthLayer | SomeLayers | SelectiveOp | Rules | MemoryBudget
"""The kinds that make regions."""


class PlanPolicy(Frozen):
    """What `lowtide plan` chose, or is to choose at the start of the run for a memory limit."""

    kind: Literal["plan"] = "plan"

    path: str | None = None
    """A plan file. It must be for this model; where it is not, the run ends and says what differs."""

    limit: str | None = None
    """Memory of a process, such as `80GiB`: rank 0 plans before the run starts and tells the others; the plan is kept
    in the run's folder. Give this or `path`."""

    @model_validator(mode="after")
    def _one_of_them(self) -> PlanPolicy:
        if (self.path is None) == (self.limit is None):
            raise ValueError("give `path` (a plan file) or `limit` (memory to plan for), and not both")
        if self.limit is not None:
            parse_bytes(self.limit)
        return self

    @classmethod
    def parse(cls, value: Mapping[Any, Any]) -> PlanPolicy:
        """Read a mapping as in YAML.

        Raises:
            PolicyError: an unknown key, or both or none of `path` and `limit`.
        """
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            raise PolicyError(_explain(error, "plan")) from None


_ADAPTER: TypeAdapter[NoPolicy | LayerPolicy] = TypeAdapter(Policy)
_MODELS: dict[str, type[BaseModel]] = {
    model.model_fields["kind"].default: model
    for model in (NoPolicy, Full, EveryNthLayer, SomeLayers, SelectiveOp, Rules, MemoryBudget)
}
_INNER: dict[str, type[BaseModel]] = {"policy.save.": SaveRule, "policy.rules.": Rule}


def parse_policy(value: object) -> NoPolicy | LayerPolicy:
    """Turn a mapping (as read from YAML or JSON), the name of a preset or a policy into a policy.

    Raises:
        PolicyError: an unknown kind, preset or key, or a value out of range; the message lists what is legal.
    """
    if isinstance(value, NoPolicy | LayerPolicy):
        return value
    given = value
    if isinstance(value, str):
        value = named_policy(value)
    if not isinstance(value, Mapping):
        near = nearest(given, preset_names(), count=1) if isinstance(given, str) else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PolicyError(
            "a policy is a mapping with `kind`, the name of a preset, or a policy object such as lowtide.Full(); "
            f"got {repr(given) if isinstance(given, str) else type(given).__name__}. Kinds: {', '.join(_MODELS)}. "
            f"Presets: {', '.join(preset_names())}.{hint}"
        )
    kind = value.get("kind")
    if kind == "plan":
        raise PolicyError(
            "policy.kind: a plan is read where the model is known: lowtide.apply(model, {'kind': 'plan', 'path': ...}),"
            " `policy` in a config, or `lowtide train --plan`"
        )
    if not isinstance(kind, str) or kind not in _MODELS:
        near = nearest(str(kind), _MODELS, count=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PolicyError(f"policy.kind: {kind!r} is not a kind of policy. Kinds: {', '.join(_MODELS)}.{hint}")
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
    inner = [model for start, model in _INNER.items() if path.startswith(start)]
    legal = list((inner[0] if inner else PlanPolicy if kind == "plan" else _MODELS[kind]).model_fields)
    near = nearest(path.rsplit(".", 1)[-1], legal, count=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{path}: unknown key. Legal keys: {', '.join(legal)}.{hint}"
