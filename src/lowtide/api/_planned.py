"""Plans where policies are accepted: read, compared with the model, carried out as rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from lowtide.errors import UserError
from lowtide.plan_record import Plan
from lowtide.planning import BlockFacts, check_model, policy_of, read_plan
from lowtide.policy import LayerPolicy, NoPolicy, PlanPolicy, parse_policy
from lowtide.regions import Applied, find_blocks, slots
from lowtide.regions import apply as apply_policy

__all__ = ["apply", "as_policy", "check_plan", "plan_of"]


def plan_of(value: object) -> Plan | None:
    """Return the plan that a value is or names; None for any other policy.

    Raises:
        InputError: no such file, or no plan in it.
        UserError: a limit to plan for, which takes more than a model.
    """
    if isinstance(value, Plan):
        return value
    if isinstance(value, Mapping) and value.get("kind") == "plan":
        value = PlanPolicy.parse(value)
    if not isinstance(value, PlanPolicy):
        return None
    if value.path is None:
        raise UserError(
            f"policy plan: to plan for {value.limit} takes a batch and a training setup: give what lowtide.plan(model, "
            "inputs, limit=..., setup=...) returns, or write `limit` into a config for `lowtide train`"
        )
    return read_plan(Path(value.path))


def as_policy(value: object) -> NoPolicy | LayerPolicy:
    """Return a policy; a plan as the rules that carry it out, without a look at any model.

    Raises:
        PolicyError: no policy; the message lists what is legal.
        InputError: no such plan file, or no plan in it.
    """
    plan = plan_of(value)
    return parse_policy(value) if plan is None else policy_of(plan)


def check_plan(plan: Plan, model: nn.Module) -> None:
    """See that a model is the one that a plan was made for.

    Raises:
        PolicyError: it is not; the message says what differs.
    """
    modules = {slot.fqn: slot.module for slot in slots(model)}
    facts: dict[str, BlockFacts] = {}
    for block in find_blocks(model):
        module = modules[block.fqn]
        sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
        facts[block.fqn] = (type(module).__name__.removeprefix("FSDP"), sizes)
    check_model(plan, facts)


def apply(model: nn.Module, policy: object) -> Applied:
    """Checkpoint the blocks of ``model`` as ``policy`` says.

    Replaces ``forward`` on each chosen block's instance and nothing else: names, ``state_dict`` keys, classes and
    the modules themselves stay. Gradients stay bitwise those without the policy, or the policy is refused. Applying
    an equal policy again changes nothing.

    Order: ``apply``, then ``block.compile()``, then ``fully_shard``. ``apply`` after ``fully_shard`` works as well.

    Args:
        model: any module; the root, or a part that holds whole blocks.
        policy: a policy (``lowtide.SelectiveOp(save=["sdpa"])``), a mapping as in YAML, the name of a preset, or a plan
            (``lowtide.plan``, or ``{"kind": "plan", "path": "plan.yaml"}``), which must be one for this model.

    Returns:
        What was done, with ``remove()``.

    Raises:
        PolicyError: the policy cannot be meant, or a plan is for another model.
        NothingMatchedError: no block, or a pattern or operator name that matches nothing.
        RefusedError: another policy is applied, or this model in this state cannot keep the promise.
        InputError: a plan file that cannot be read.
    """
    plan = plan_of(policy)
    if plan is None:
        return apply_policy(model, policy)
    check_plan(plan, model)
    return apply_policy(model, policy_of(plan))
