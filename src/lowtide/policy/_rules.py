"""Kind ``rules``: ordered rules over layers, modules inside the block, operators and names; the first that matches
decides. The simpler kinds are short ways to write such rules (``expand`` in ``_resolve``).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from lowtide.policy._base import OP_NAME, Frozen, Keep, LayerPolicyBase, as_patterns
from lowtide.policy._match import Pattern

__all__ = ["Rule", "Rules"]


class Rule(Frozen):
    """What it is about (all conditions that are given must hold), and what happens then."""

    layers: tuple[str, ...] | None = None
    """Globs on FQNs of blocks: the rule counts in these blocks only. Left out, in all."""

    modules: tuple[str, ...] | None = None
    """Globs on names inside the block (``mlp``, ``**.router``): what runs in these modules and in modules below them.
    Left out, everywhere in the block."""

    op: str | None = None
    """An overload (``aten.mm.default``), a packet (``aten.mm``: all its overloads) or an alias (``matmul``, ``sdpa``,
    ``collective``)."""

    name: str | None = None
    """A name that the model's code gives with ``lowtide.checkpoint_name(x, "ffn_in")``."""

    action: Literal["save", "recompute", "offload", "none"]
    """``save`` keeps the output from forward to backward, ``recompute`` makes it again in backward. ``offload``
    (experimental: not yet shown on a GPU) keeps it on the host and brings it back in time. ``none`` makes no region in
    these layers at all, whatever other rules say."""

    keep: Keep = Keep()
    """With ``save`` and ``offload``: ``always``, the first m of every n calls (``m/n``), or a list of calls counted
    from 0. The other calls are recomputed. One counter for each rule and call of a region, over everything that the
    rule matches."""

    optional: bool = False
    """Whether the rule may match nothing. By default that is an error."""

    @field_validator("layers", "modules", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return as_patterns(value)

    @field_validator("layers", "modules")
    @classmethod
    def _patterns_parse(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("an empty list matches nothing; leave the key out where everything is meant")
        for text in value or ():
            Pattern.parse(text)
        return value

    @field_validator("op")
    @classmethod
    def _operator_named_well(cls, value: str | None) -> str | None:
        if value is not None and OP_NAME.fullmatch(value) is None:
            raise ValueError(f"{value!r} is not an operator name: write aten.mm, aten.mm.default or an alias")
        return value

    @field_validator("name")
    @classmethod
    def _named_well(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("an empty name matches nothing")
        return value

    @model_validator(mode="after")
    def _makes_sense(self) -> Rule:
        if self.action == "none":
            if self.layers is None or self.modules or self.op or self.name:
                raise ValueError(
                    "`action: none` takes whole layers out: it needs `layers` and takes no `modules`, `op` or `name`"
                )
        elif not (self.layers or self.modules or self.op or self.name):
            raise ValueError("a rule without conditions matches everything: write its action as the policy's `default`")
        if self.op is not None and self.name is not None:
            raise ValueError("a rule is about an operator or about a name, not both: `name` alone finds the value")
        if self.action == "recompute" and not self.keep.always:
            raise ValueError(f"`keep` says how many calls are saved; it has no meaning with `action: {self.action}`")
        if self.name is not None and self.keep.calls is not None:
            raise ValueError("a list of calls is for operators; write a share for names, such as 1/2")
        return self

    @property
    def recomputes(self) -> bool:
        """Whether something that it matches does not simply stay where it is."""
        return self.action in ("recompute", "offload") or (self.action == "save" and not self.keep.always)

    def __str__(self) -> str:
        parts = [f"op {self.op}"] if self.op else []
        parts += [f"name {self.name}"] if self.name else []
        parts += [f"in modules {', '.join(self.modules)}"] if self.modules else []
        parts += [f"in layers {', '.join(self.layers)}"] if self.layers else []
        kept = "" if self.keep.always else f" {self.keep}"
        return f"{self.action}{kept}: {' '.join(parts) or 'everything'}"


class Rules(LayerPolicyBase):
    """Ordered rules over layers, modules, operators and names; the first that matches decides."""

    kind: Literal["rules"] = "rules"

    default: Literal["save", "recompute"]
    """What happens to what no rule matches. Under ``save`` a region is as small as its rules allow: where they
    recompute only inside certain modules, only those become regions."""

    rules: tuple[Rule, ...] = ()
    """The rules, in order."""

    @model_validator(mode="after")
    def _does_something(self) -> Rules:
        if self.default == "save" and not any(rule.recomputes for rule in self.rules):
            raise ValueError(
                "`default: save` without a rule that recomputes does nothing; write `kind: none` where that is meant"
            )
        return self
