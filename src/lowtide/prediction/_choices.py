"""Recipes of a policy -> what each region of a block keeps, by operators of the block's trace.

Decides as the executors do (``lowtide.regions``): the first rule that matches an operator decides, each match counts,
views and writes in place have no output of their own. A trace has no names given with ``checkpoint_name``: rules on
names decide nothing here, and that is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from lowtide.policy import ALIASES, RegionRecipe, Rule
from lowtide.prediction._block import RegionChoice
from lowtide.records import OpRecord, OpTrace

__all__ = ["regions_of"]


_GENERATOR_BYTES = 5056
"""``torch.get_rng_state()`` of a CPU (torch 2.11 to 2.15)."""


def regions_of(
    trace: OpTrace, recipes: Sequence[RegionRecipe], executor: Literal["auto", "recompute", "replay"] = "auto"
) -> tuple[tuple[RegionChoice, ...], tuple[str, ...]]:
    """Return the regions that recipes make in one block, and what was taken for granted.

    Args:
        trace: the block's.
        recipes: those of this block, as ``policy.resolve`` returned them.
        executor: the policy's; ``auto`` is replay where everything but what rules name is saved, else recompute.
    """
    unknown = {str(rule) for recipe in recipes for _, rule in recipe.rules if rule.name is not None}
    assumptions = [f"{text}: a trace has no names, so this rule was left out" for text in sorted(unknown)]
    return tuple(_choice(trace, recipe, executor) for recipe in recipes), tuple(assumptions)


def _choice(trace: OpTrace, recipe: RegionRecipe, executor: str) -> RegionChoice:
    rules = [rule for _, rule in recipe.rules if rule.name is None]
    counts: Counter[int] = Counter()
    saves: set[int] = set()
    for op in trace.forward:
        if not _inside(op.module, recipe.module):
            continue
        place = next((i for i, rule in enumerate(rules) if _matches(rule, op)), None)
        if place is None:
            if recipe.default == "save" and not op.view and not op.writes:
                saves.add(op.index)
            continue
        call = counts[place]
        counts[place] += 1
        if rules[place].action == "save" and rules[place].keep.keeps(call) and not op.writes:
            saves.add(op.index)
    replays = executor == "replay" or (executor == "auto" and recipe.default == "save")
    if replays:
        return RegionChoice(recipe.module, frozenset(saves), "replay")
    # On a GPU it lies on the host.
    state_bytes = _GENERATOR_BYTES if recipe.preserve_rng and trace.device == "cpu" else 0
    return RegionChoice(recipe.module, frozenset(saves), "recompute", state_bytes)


def _inside(module: str, around: str) -> bool:
    return not around or module == around or module.startswith(f"{around}.")


def _matches(rule: Rule, op: OpRecord) -> bool:
    if rule.modules is not None and not any(_inside(op.module, name) for name in rule.modules):
        return False
    if rule.op is None:
        return not op.view
    names = ALIASES.get(rule.op, (rule.op,))
    return any(op.op == name or op.op.startswith(f"{name}.") for name in names)
