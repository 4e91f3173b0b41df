"""The same decisions under ``torch.compile``: tags that the compiler's partitioner reads.

Dynamo accepts a ``context_fn`` that is a plain function in a ``functools.partial``, and the partitioner forces only
``MUST_SAVE``; torch's own selective contexts carry both (checked in torch 2.11 to 2.14).

Where dropout is recomputed, inductor fuses its scaling otherwise in backward than in forward, and float32 gradients
differ from those of the same compiled model without a policy in the last bit (torch 2.13). So a random operator in a
region that inductor compiles is refused, unless ``allow_inexact`` is set. Other backends repeat it exactly.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowtide.errors import RefusedError
from lowtide.regions._operators import Trait, draws, traits
from lowtide.regions._plan import Plan
from lowtide.regions._tape import Witness, describe


class _Decider:
    """Decides per operator while the compiler traces a region; counts anew in each trace."""

    def __init__(self, plan: Plan, witness: Witness) -> None:
        self.plan = plan
        self.witness = witness
        self.calls = {False: [0] * len(plan.rules), True: [0] * len(plan.rules)}

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not ctx.is_recompute:
            self.witness.ran(func)
            if traits(func) & Trait.RANDOM and not self.plan.allow_inexact and draws(func, args, kwargs):
                _refuse_random(func, budget=self.plan.budget is not None)
        if self.plan.budget is not None:
            if traits(func) & Trait.ROUTING:
                raise RefusedError(
                    f"{describe(func)} decides where tokens go, and under a memory budget the compiler may run it "
                    "again, otherwise fused: it could decide twice. Leave these blocks out, or use another policy"
                )
            return CheckpointPolicy.PREFER_SAVE
        decision = self.plan.decide(func, self.calls[ctx.is_recompute], None)
        if decision.rule is None:
            if traits(func) & Trait.ROUTING:
                return CheckpointPolicy.MUST_SAVE
            # Under `default: save` the partitioner saves what backward needs, and nothing else.
            return CheckpointPolicy.PREFER_SAVE if decision.keep else CheckpointPolicy.MUST_RECOMPUTE
        if not ctx.is_recompute:
            self.witness.matched(self.plan.rules[decision.rule].number)
        return CheckpointPolicy.MUST_SAVE if decision.keep else CheckpointPolicy.MUST_RECOMPUTE


def _refuse_random(func: Any, *, budget: bool) -> None:
    if budget:
        raise RefusedError(
            f"{describe(func)} draws random numbers, and under a memory budget PyTorch may draw others when it runs "
            "again: gradients would be wrong (pytorch issue 190758). Set dropout to 0, or use another kind of policy"
        )
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch._inductor."):
            raise RefusedError(
                f"{describe(func)} draws random numbers in a checkpointed block that inductor compiles: recomputed and "
                "fused otherwise, gradients would differ in the last bits. Set dropout to 0, leave the block eager "
                "(compile: false), or set allow_inexact: true"
            )
        frame = frame.f_back


def compiled_contexts(plan: Plan, witness: Witness) -> Any:
    """Make the pair of contexts for one traced region.

    Raises:
        RefusedError: rules that offload, or on modules or names, which compiled code does not show.
    """
    if plan.offloads:
        raise RefusedError(
            "a rule of the policy offloads, which compiled code does not: leave these blocks eager (compile: false), "
            "or save instead"
        )
    hard = [rule for rule in plan.rules if rule.modules is not None or rule.name is not None]
    if hard:
        what = f"the name {hard[0].name!r}" if hard[0].name is not None else "certain modules in a region"
        raise RefusedError(
            f"a rule of the policy is about {what}, and torch.compile shows operators only. Leave these blocks eager "
            "(compile: false), write rules on operators and layers, or make the modules regions of their own "
            "(`default: save`, rules that recompute only in modules)"
        )
    return create_selective_checkpoint_contexts(_Decider(plan, witness))
