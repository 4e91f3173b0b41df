"""What a policy says, as values: no torch, no module, no counter.

kinds      one frozen class per kind, a union tagged by ``kind``
match      glob patterns over FQNs, by segments
resolve    policy + block names -> one recipe per region (what is priced is what runs)
aliases    names that stand for groups of operators
"""

from lowtide.policy._aliases import ALIASES, ROUTING_OPS
from lowtide.policy._kinds import (
    EveryNthLayer,
    Full,
    Keep,
    LayerPolicy,
    NoPolicy,
    Policy,
    SaveRule,
    SelectiveOp,
    SomeLayers,
    parse_policy,
)
from lowtide.policy._match import Pattern, match_fqns
from lowtide.policy._resolve import Block, RegionRecipe, Resolution, resolve

__all__ = [
    "ALIASES",
    "ROUTING_OPS",
    "Block",
    "EveryNthLayer",
    "Full",
    "Keep",
    "LayerPolicy",
    "NoPolicy",
    "Pattern",
    "Policy",
    "RegionRecipe",
    "Resolution",
    "SaveRule",
    "SelectiveOp",
    "SomeLayers",
    "match_fqns",
    "parse_policy",
    "resolve",
]
