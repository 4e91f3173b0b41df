"""What a policy says, as values: no torch, no module, no counter.

kinds      one frozen class per kind, a union tagged by ``kind``
match      glob patterns over FQNs, by segments
resolve    policy + block names -> one recipe per region (what is priced is what runs)
rules      the kind that can say everything; the others are short for it (``expand``)
presets    what others do, as YAML files
aliases    names that stand for groups of operators
"""

from lowtide.policy._aliases import ALIASES, ROUTING_OPS
from lowtide.policy._base import Keep
from lowtide.policy._kinds import (
    EveryNthLayer,
    Full,
    LayerPolicy,
    MemoryBudget,
    NoPolicy,
    PlanPolicy,
    Policy,
    SaveRule,
    SelectiveOp,
    SomeLayers,
    parse_policy,
)
from lowtide.policy._match import Pattern, match_fqns
from lowtide.policy._presets import named_policy, preset_names
from lowtide.policy._resolve import Block, RegionRecipe, Resolution, expand, resolve, rules_of
from lowtide.policy._rules import Rule, Rules

__all__ = [
    "ALIASES",
    "ROUTING_OPS",
    "Block",
    "EveryNthLayer",
    "Full",
    "Keep",
    "LayerPolicy",
    "MemoryBudget",
    "NoPolicy",
    "Pattern",
    "PlanPolicy",
    "Policy",
    "RegionRecipe",
    "Resolution",
    "Rule",
    "Rules",
    "SaveRule",
    "SelectiveOp",
    "SomeLayers",
    "expand",
    "match_fqns",
    "named_policy",
    "parse_policy",
    "preset_names",
    "resolve",
    "rules_of",
]
