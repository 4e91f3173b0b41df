"""The same decisions under ``torch.compile``: tags that the compiler's partitioner reads.

Dynamo accepts a ``context_fn`` that is a plain function in a ``functools.partial``, and the partitioner forces only
``MUST_SAVE``; torch's own selective contexts carry both (checked in torch 2.11 to 2.14).
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowtide.regions._operators import Trait, traits
from lowtide.regions._tape import Plan, Witness


class _Decider:
    """Decides per operator while the compiler traces a region; counts anew in each trace."""

    def __init__(self, plan: Plan, witness: Witness) -> None:
        self.plan = plan
        self.witness = witness
        self.calls = {False: [0] * len(plan.keeps), True: [0] * len(plan.keeps)}

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        rule = self.plan.table.get(func)
        if not ctx.is_recompute:
            self.witness.ran(func)
        if rule is None:
            routes = bool(traits(func) & Trait.ROUTING)
            return CheckpointPolicy.MUST_SAVE if routes else CheckpointPolicy.MUST_RECOMPUTE
        calls = self.calls[ctx.is_recompute]
        call = calls[rule]
        calls[rule] = call + 1
        if not ctx.is_recompute:
            self.witness.matched(rule)
        return CheckpointPolicy.MUST_SAVE if self.plan.keeps[rule](call) else CheckpointPolicy.MUST_RECOMPUTE


def compiled_contexts(plan: Plan, witness: Witness) -> Any:
    """Make the pair of contexts for one traced region."""
    return create_selective_checkpoint_contexts(_Decider(plan, witness))
