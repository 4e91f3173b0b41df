"""What the rules of a region come to, operator by operator.

A ``Plan`` is shared by all regions with the same rules: overload -> the rules that may decide, in order. Where a rule
has a condition on modules, the ``Scope`` of the region tells which modules run now: it walks up Python's frames to the
region and looks for modules that are being called. So nothing is put on inner modules, and the walk costs only
operators that such a rule names.

An operator is decided by the first rule that matches it, and each match counts, also in regions that do not save.
Rules on names match later, when the model gives the name: they win over a rule on the operator that stands behind.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lowtide.errors import PolicyError
from lowtide.policy import RegionRecipe, Rule
from lowtide.regions._operators import Trait, resolve_operator, traits

__all__ = ["NOTHING", "Decision", "Plan", "PlanRule", "Scope", "make_plan"]


@dataclass(frozen=True)
class PlanRule:
    """A rule, ready to be asked."""

    number: int
    """Its place in the policy."""
    saves: bool
    """Whether what it keeps stays, here or on the host."""
    offloads: bool
    """Whether it waits on the host."""
    keeps: Callable[[int], bool]
    """Whether its call number i, counted from 0 in each call of the region, is kept."""
    modules: frozenset[str] | None = None
    """Modules that it is about, by their names in the block; None for all."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one operator call."""

    rule: int | None
    """The rule that decided, by its place in the plan; None for the default."""
    keep: bool
    call: int = 0
    """Number of the call, among those that the rule matched."""
    away: bool = False
    """Whether it is kept on the host."""


NOTHING = Decision(None, False)
"""Recompute, by default."""
_KEPT = Decision(None, True)


@dataclass
class Plan:
    """How calls are carried out; one for all regions with the same rules, so that compiled blocks share their code."""

    rules: tuple[PlanRule, ...]
    overloads: Mapping[Any, tuple[int, ...]]
    """Overload -> places of the rules on it."""
    saves_by_default: bool
    preserve_rng: bool
    strict: bool
    allow_inexact: bool
    budget: float | None = None
    """Share of its own choice that the compiler may save, where it chooses."""
    broad: tuple[int, ...] = ()
    """Places of the rules on all operators of certain modules."""
    _candidates: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    @property
    def wide(self) -> bool:
        """Whether outputs may be kept that no rule names by operator or name."""
        return self.saves_by_default or any(self.rules[i].saves for i in self.broad)

    @property
    def selects(self) -> bool:
        """Whether anything may be kept."""
        return bool(self.rules) or self.saves_by_default

    @property
    def by_name(self) -> tuple[int, ...]:
        """Places of the rules on names."""
        return tuple(i for i, rule in enumerate(self.rules) if rule.name is not None)

    @property
    def offloads(self) -> bool:
        """Whether something may go to the host."""
        return any(rule.offloads for rule in self.rules)

    @property
    def needs_scope(self) -> bool:
        """Whether a rule is about certain modules."""
        return any(rule.modules is not None for rule in self.rules)

    def candidates(self, func: Any) -> tuple[int, ...]:
        """Return the places of the rules that may decide a call, in order; none behind one that always matches."""
        found = self._candidates.get(func)
        if found is None:
            found = self._candidates[func] = self._look_up(func)
        return found

    def _look_up(self, func: Any) -> tuple[int, ...]:
        named = self.overloads.get(func, ())
        # What makes no content of its own is kept only where a rule names it.
        wide = () if traits(func) & Trait.VIEW else self.broad
        found: list[int] = []
        for place in sorted({*named, *wide}):
            found.append(place)
            if self.rules[place].modules is None:
                break
        return tuple(found)

    def concerns(self, func: Any) -> bool:
        """Whether the output of an operator may be kept."""
        if self.candidates(func):
            return True
        return self.saves_by_default and not traits(func) & Trait.VIEW

    def decide(self, func: Any, counts: list[int], scope: Scope | None) -> Decision:
        """Decide one call, and count it."""
        candidates = self.candidates(func)
        inside: frozenset[int] | None = None
        for place in candidates:
            rule = self.rules[place]
            if rule.modules is not None:
                if inside is None:
                    inside = scope.now() if scope is not None else frozenset()
                if place not in inside:
                    continue
            call = counts[place]
            counts[place] = call + 1
            return Decision(place, rule.saves and rule.keeps(call), call, rule.offloads)
        if self.saves_by_default and not traits(func) & Trait.VIEW:
            return _KEPT
        return NOTHING

    def decide_name(self, name: str, before: Decision, counts: list[int], scope: Scope | None) -> Decision | None:
        """Decide a value that was given a name; None where what decided its operator stands."""
        inside: frozenset[int] | None = None
        for place in self.by_name:
            rule = self.rules[place]
            if rule.name != name:
                continue
            if rule.modules is not None:
                inside = inside if inside is not None else (scope.now() if scope is not None else frozenset())
                if place not in inside:
                    continue
            call = counts[place]
            counts[place] = call + 1
            if before.rule is not None and before.rule < place:
                return Decision(place, before.keep, call, before.away)
            return Decision(place, rule.saves and rule.keeps(call), call, rule.offloads)
        return None


class Scope:
    """Which rules' modules run now, in one region."""

    def __init__(self, plan: Plan, names: Mapping[int, Sequence[str]], stop: types.CodeType) -> None:
        """Args: ``names`` maps the ids of the region's modules to their names in the block; ``stop`` is the code of
        the frame that stands for the region.
        """
        self._stop = stop
        self._rules: dict[int, frozenset[int]] = {}
        for key, own in names.items():
            around = {prefix for name in own for prefix in _prefixes(name)}
            self._rules[key] = frozenset(
                place
                for place, rule in enumerate(plan.rules)
                if rule.modules is not None and not around.isdisjoint(rule.modules)
            )

    def now(self) -> frozenset[int]:
        """Return the places of the rules whose modules are being called, inside this region."""
        found: frozenset[int] = frozenset()
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._stop:
            if frame.f_code is _CALL:
                found |= self._rules.get(id(frame.f_locals["self"]), frozenset())
            frame = frame.f_back
        return found


_CALL = nn.Module._call_impl.__code__


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def make_plan(recipe: RegionRecipe, where: Callable[[int], str]) -> tuple[Plan, dict[int, str]]:
    """Make the plan of a recipe.

    Args:
        recipe: rules and flags.
        where: says where in the policy a rule stands, by its number.

    Returns:
        The plan, and for each rule that can never decide anything here, by its number, why.

    Raises:
        NothingMatchedError: an operator that this torch does not know.
        PolicyError: an operator that only writes in place.
    """
    rules: list[PlanRule] = []
    overloads: dict[Any, list[int]] = {}
    broad: list[int] = []
    hidden: dict[int, str] = {}
    decided: dict[Any, int] = {}
    for place, (number, rule) in enumerate(recipe.rules):
        rules.append(_plan_rule(number, rule))
        if rule.name is not None:
            continue
        if rule.op is None:
            broad.append(place)
            continue
        found = resolve_operator(rule.op, where=where(number))
        if all(o in decided for o in found):
            hiding = sorted({str(recipe.rules[decided[o]][1].op) for o in found})
            hidden[number] = f"{', '.join(hiding)} stands before it"
        for overload in found:
            overloads.setdefault(overload, []).append(place)
            if rule.modules is None:
                decided.setdefault(overload, place)
    plan = Plan(
        rules=tuple(rules),
        overloads={o: tuple(places) for o, places in overloads.items()},
        saves_by_default=recipe.default == "save",
        preserve_rng=recipe.preserve_rng,
        strict=recipe.strict,
        allow_inexact=recipe.allow_inexact,
        budget=recipe.budget,
        broad=tuple(broad),
    )
    return plan, hidden


def _plan_rule(number: int, rule: Rule) -> PlanRule:
    return PlanRule(
        number=number,
        saves=rule.action in ("save", "offload"),
        offloads=rule.action == "offload",
        keeps=rule.keep.keeps,
        modules=None if rule.modules is None else frozenset(rule.modules),
        name=rule.name,
    )


def refuse_hidden(hidden: Mapping[int, str], rules: Sequence[Rule], where: Callable[[int], str]) -> None:
    """Raise for a rule that can decide nothing anywhere.

    Raises:
        PolicyError: names it, and the rule that stands before it.
    """
    for number, why in hidden.items():
        raise PolicyError(
            f"{where(number)}: {rules[number].op!r} can never decide anything, since {why} and the "
            "first rule that matches decides. Put the narrower rule first"
        )
