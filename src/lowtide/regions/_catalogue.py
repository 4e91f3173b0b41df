"""The operators that a region records, each looked up once: how to call it and what to note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide.regions._operators import Trait, traits, written_positions
from lowtide.regions._plan import Plan
from lowtide.regions._tape import describe

__all__ = ["Catalogue", "Kind"]

_TENSOR_METADATA_WRITES = frozenset({"resize_", "resize_as_", "set_", "resize_as_sparse_", "_resize_output_"})
_LAZY = frozenset({"_conj", "_neg_view"})


class Kind:
    """What recording must know of an operator, looked up once for each."""

    __slots__ = (
        "blank",
        "call",
        "decides",
        "draws",
        "foreign",
        "free",
        "func",
        "refused",
        "routing",
        "ruled",
        "special",
        "writes",
    )

    def __init__(self, func: Any, plan: Plan) -> None:
        trait = traits(func)
        overload = isinstance(func, OpOverload)
        name = func._opname if overload else ""
        self.func = func
        self.call: Callable[..., Any] = func._op if overload else func
        inplace_view = overload and torch.Tag.inplace_view in func.tags and name not in _TENSOR_METADATA_WRITES
        self.refused = _refusal(func, name)
        self.free = not self.refused and (bool(trait & (Trait.VIEW | Trait.SKIPPED)) or inplace_view)
        """Runs and is not recorded: it makes no content and changes none."""
        self.foreign = getattr(func, "namespace", "") not in ("aten", "prims")
        """Does not come with torch: it may write what its schema does not tell."""
        self.draws = bool(trait & Trait.RANDOM)
        self.writes = written_positions(func) if overload and not self.free else ()
        self.blank = bool(trait & Trait.UNINITIALISED) and not self.refused and not plan.overloads.get(func)
        """Makes memory like a tensor's and reads nothing of it."""
        self.special = bool(self.draws or self.writes or self.refused)
        self.ruled = plan.concerns(func)
        self.routing = bool(trait & Trait.ROUTING)
        self.decides = self.ruled or self.routing or plan.wide or bool(plan.by_name)
        """Whether something is to be decided of its output, or of what it reads."""

    def __repr__(self) -> str:
        return describe(self.func)


def _refusal(func: Any, name: str) -> str:
    """Say why an operator cannot be recorded; empty where it can."""
    if not isinstance(func, OpOverload):
        return f"the higher-order operator {func} runs inside it"
    if func.namespace in ("fsdp", "c10d"):
        return f"{describe(func)} runs inside it"
    if func.namespace == "_c10d_functional":
        return f"the collective {describe(func)} runs inside it"
    if name in _TENSOR_METADATA_WRITES or name in _LAZY:
        return f"{describe(func)} runs inside it"
    return ""


_FRESH = torch.ops.aten.empty_strided.default


class Catalogue:
    """The kinds of operators, under one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # By id, since an overload's hash is a Python function; a Kind keeps its overload alive.
        self.kinds: dict[int, Kind] = {}
        self.fresh = self.add(_FRESH)
        """What stands for every operator that makes memory and fills nothing in."""

    def add(self, func: Any) -> Kind:
        """Look an operator up."""
        kind = self.kinds[id(func)] = Kind(func, self.plan)
        return kind
