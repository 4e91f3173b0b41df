"""By what a model is known again: classes, parameters, inputs and operators of its blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.errors import PolicyError, listing
from lowtide.plan_record import BlockPrint, Plan
from lowtide.planning._names import patterns_of
from lowtide.policy import match_fqns
from lowtide.records import OpTrace, TensorRecord

__all__ = ["BlockFacts", "check_model", "parameters_hash", "print_of"]

BlockFacts = tuple[str, Mapping[str, int]]
"""(class of a block, name of each of its parameters -> how many numbers it has)."""

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "complex64": 8}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def parameters_hash(parameters: Mapping[str, int]) -> str:
    """Return a short hash of names and sizes, whatever their types and however they are sharded."""
    return _digest(sorted(parameters.items()))


def print_of(trace: OpTrace, layers: Sequence[str]) -> BlockPrint:
    """Return the fingerprint of a kind of block."""
    forms: dict[int, TensorRecord] = {}
    for op in trace.forward:
        for tensor in op.inputs:
            if tensor.storage is not None:
                forms.setdefault(tensor.storage, tensor)
    sizes: dict[str, int] = {}
    inputs: list[str] = []
    for storage in trace.storages:
        form = forms.get(storage.id)
        if storage.role == "parameter" and storage.name is not None:
            size = _BYTES.get(form.dtype, 1) if form is not None else 1
            sizes[storage.name] = storage.nbytes // size
        elif storage.role == "argument" and form is not None:
            inputs.append(f"{storage.name}: {form.dtype}{list(form.shape)}")
    operators = [(op.op, [(t.shape, t.dtype) for t in op.outputs]) for op in trace.forward]
    return BlockPrint(
        block=trace.block,
        layers=patterns_of(layers),
        count=max(1, len(layers)),
        parameters=sum(sizes.values()),
        parameters_hash=parameters_hash(sizes),
        inputs=tuple(inputs),
        operators=len(operators),
        operators_hash=_digest(operators),
    )


def check_model(plan: Plan, blocks: Mapping[str, BlockFacts]) -> None:
    """See that a model is the one that a plan was made for.

    Args:
        plan: the plan.
        blocks: the model's blocks by FQN.

    Raises:
        PolicyError: it is not; the message says what differs.
    """
    faults: list[str] = []
    claimed: set[str] = set()
    for kind in plan.blocks:
        found = sorted({name for names in match_fqns(kind.layers, list(blocks)).values() for name in names})
        claimed.update(found)
        if len(found) != kind.count:
            faults.append(f"{', '.join(kind.layers)}: {kind.count} layers in the plan, {len(found)} in the model")
        for name in found:
            block, parameters = blocks[name]
            if block != kind.block:
                faults.append(f"{name} is a {block}, in the plan a {kind.block}")
            elif parameters_hash(parameters) != kind.parameters_hash:
                faults.append(
                    f"{name} has {sum(parameters.values())} numbers in {len(parameters)} parameters, in the plan "
                    f"{kind.parameters}, or parameters of other names or sizes"
                )
    unplanned = [name for name in blocks if name not in claimed]
    if unplanned:
        faults.append(f"the plan says nothing of {listing(unplanned)}")
    if faults:
        raise PolicyError(
            f"this plan is for another model: {'; '.join(faults[:4])}"
            f"{f'; and {len(faults) - 4} more differences' if len(faults) > 4 else ''}. Make a plan for this one with "
            "`lowtide plan`"
        )
