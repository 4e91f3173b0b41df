"""``inspect``: every tensor that backward needs, what the policy does with it, and the rule that says so.

    model, inputs ─► one forward under fake tensors (``tracing.trace_forward``) ─┐
    policy ─► apply ─► regions, each with its executor (then taken away again) ──┴─► prediction.explain ─► InspectReport

The whole model is traced, not one block of each kind, since who holds a tensor between blocks (a mask, a rope table,
the encoder's result) is seen only there. Where a region asks for replay, one more forward under fake tensors runs with
the policy, so that the executor is the one that would run, and the reason its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lowtide.api._planned import as_policy
from lowtide.errors import NothingMatchedError, RefusedError, nearest
from lowtide.inspect_report import InspectReport
from lowtide.measurement import tensors_in
from lowtide.policy import ALIASES, LayerPolicy, NoPolicy, Rule, rules_of
from lowtide.prediction import ExplainedRegion, explain, speeds_of
from lowtide.records import OpTrace
from lowtide.regions import Region, apply, find_blocks, innermost, slots
from lowtide.tracing import run_forward, trace_forward

__all__ = ["inspect"]


def inspect(
    model: nn.Module,
    inputs: Any,
    policy: object,
    *,
    forward: Callable[[Any, Any], object] | None = None,
    device: str = "cpu",
    threads: int = 1,
) -> InspectReport:
    """Say of every tensor that backward needs whether it is saved, recomputed or an input, and why.

    Nothing is computed or allocated: the model runs under fake tensors, on whatever device it is, and is left as it
    was. Numbers are those of the second step of a run and later: in its first step, executor recompute finds out which
    saved outputs backward never needs, and ``replay`` compares values.

    Args:
        model: any module without sharding and without a policy.
        inputs: one batch, as a tensor, a tuple of positional or a mapping of keyword arguments; only form counts.
        policy: a policy, or a mapping as in YAML, or the name of a preset.
        forward: runs ``forward(model, inputs)`` and returns the loss or the outputs; by default the model is called
            with the inputs, and its output is held.
        device: what it would run on, ``"cpu"`` or a name such as ``"H100"``; kernels, saved tensors and times are its.
        threads: CPU threads, for times on a CPU.

    Raises:
        PolicyError: a policy that cannot be applied to this model, or a rule that matches nothing in it.
        RefusedError: a policy is applied already.
        UserError: a forward that depends on the values of tensors.
    """
    parsed = as_policy(policy)
    if parsed.kind == "memory_budget":
        raise RefusedError(
            "policy memory_budget: the compiler chooses what to keep when it compiles a block, and inspect runs eager "
            "code: there is nothing to show. Inspect a policy of another kind"
        )
    bare = innermost(model)
    present = [slot.fqn for slot in slots(bare) if isinstance(slot.module.__dict__.get("forward"), Region)]
    if present:
        raise RefusedError(
            f"{present[0] or type(bare).__name__} has a policy applied, and inspect applies one itself: call remove() "
            "on what lowtide.apply returned first"
        )
    whole = _Whole(bare, forward or _call)
    given = dict(inputs) if isinstance(inputs, Mapping) else inputs
    applied = apply(bare, parsed)
    try:
        if any(region.executor == "replay" for region in applied.regions):
            run_forward(whole, (given,), device=device)
        regions = [
            ExplainedRegion(r.recipe, "replay" if r.executor == "replay" else "recompute", r.reason)
            for r in applied.regions
        ]
    finally:
        applied.remove()
    trace = trace_forward(
        whole, (given,), device=device, threads=threads, tensors_in=tensors_in, name=type(bare).__name__, inside="model"
    )
    rules = () if isinstance(parsed, NoPolicy) else rules_of(parsed)[1]
    found = explain(
        trace,
        _blocks(bare, parsed),
        regions,
        rules,
        policy=parsed.kind,
        speeds=speeds_of(device, threads=threads),
    )
    _refuse_unmatched(rules, regions, found.matched, trace, parsed.kind)
    return found.report


class _Whole(nn.Module):
    """Forward of the model as the caller runs it, as a module."""

    def __init__(self, model: nn.Module, forward: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self.model = model
        self._run = forward

    def forward(self, inputs: Any) -> object:
        return self._run(self.model, inputs)


def _call(model: nn.Module, inputs: Any) -> object:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _blocks(model: nn.Module, policy: NoPolicy | LayerPolicy) -> list[tuple[str, str]]:
    """Name the blocks and their classes: those that the policy is about, a shared one once."""
    layers = None if isinstance(policy, NoPolicy) else policy.layers
    try:
        names = [block.fqn for block in find_blocks(model, layers)]
    except NothingMatchedError:
        return []
    modules = {slot.fqn: slot.module for slot in slots(model)}
    first = {id(modules[name]): name for name in reversed(names)}
    return [(name, type(modules[name]).__name__) for name in names if first[id(modules[name])] == name]


def _refuse_unmatched(
    rules: Sequence[Rule], regions: Sequence[ExplainedRegion], matched: Mapping[int, int], trace: OpTrace, kind: str
) -> None:
    """Raise where a rule matched nothing, as a run with this policy would before its first backward."""
    active = {number for region in regions for number, _ in region.recipe.rules}
    for number in sorted(active):
        rule = rules[number]
        if rule.optional or matched.get(number) or not (rule.op or rule.name):
            continue
        where = "save" if kind == "selective_op" else f"rules.{number}"
        if rule.name is not None:
            there = ", ".join(dict.fromkeys(n.name for n in trace.names)) or "none"
            what = f"no value was given the name {rule.name!r}. Names given: {there}"
        else:
            there = _like(str(rule.op), list(dict.fromkeys(op.op for op in trace.ops)))
            what = f"{rule.op!r} matched no operator. Nearest operators that run: {', '.join(there) or 'none'}"
        raise NothingMatchedError(f"{where}: {what}, in {len(regions)} regions. Set optional: true where that may be")


def _like(name: str, ran: list[str]) -> list[str]:
    """Return the operators that ran and look most like the one that was named: mm for addmm, and the other way."""
    wanted = {packet.split(".")[1] for packet in ALIASES.get(name, (name,)) if "." in packet}
    near = [op for op in ran if any(w in op or op.split(".")[1] in w for w in wanted)]
    return [*near, *(op for op in nearest(name, ran) if op not in near)][:6]
