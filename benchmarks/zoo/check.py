"""One architecture under one policy and executor: gradients, losses and buffers against those without a policy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lowtide
from benchmarks.zoo.architectures import Architecture, loss_of
from lowtide.measurement import measure_saved_bytes
from lowtide.policy import parse_policy
from lowtide.regions import Applied, find_blocks, slots

POLICIES: dict[str, dict[str, object]] = {
    "full": {"kind": "full"},
    "every second": {"kind": "every_nth_layer", "n": 2},
    # Optional: models without attention or without fused attention have one of the two only.
    "selective": {
        "kind": "selective_op",
        "save": [{"op": "sdpa", "optional": True}, {"op": "matmul", "keep": "1/2", "optional": True}],
    },
    "rules": {},
    "pointwise_only": {},
}
"""Columns of the page -> policy; the last two are made for each architecture (``policies_of``)."""
EXECUTORS = ("recompute", "replay")
_STEPS = 2

Results = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Cell:
    """What came of one policy on one executor."""

    policy: str
    executor: str
    differing: tuple[str, ...]
    """Names of losses, gradients and buffers that are not bitwise equal; empty is what the law asks for."""
    regions: int
    native: int
    """Regions that the executor asked for carried out itself."""
    reason: str
    """Why another executor carried out a region."""
    saved_bytes: int
    """Bytes that backward needs at the end of forward, in all blocks."""


@dataclass(frozen=True)
class Report:
    """An architecture."""

    blocks: tuple[str, ...]
    saved_bytes: int
    """Without a policy."""
    cells: tuple[Cell, ...]


def policies_of(architecture: Architecture) -> dict[str, dict[str, object]]:
    """Name the policies; ``rules`` recomputes one part of each block, and the preset's rules may match nothing."""
    part = {"modules": list(architecture.part), "action": "recompute"}
    preset = parse_policy("pointwise_only").model_dump(mode="json", exclude_defaults=True)
    preset = {**preset, "kind": "rules", "rules": [{**rule, "optional": True} for rule in preset["rules"]]}
    return {**POLICIES, "rules": {"kind": "rules", "default": "save", "rules": [part]}, "pointwise_only": preset}


def check(architecture: Architecture, *, policies: Mapping[str, object] | None = None) -> Report:
    """Try every policy with every executor.

    Args:
        architecture: what to build.
        policies: name -> policy; all of ``policies_of`` where left out.

    Returns:
        What came of each.

    Raises:
        AssertionError: two runs without a policy differ, so that nothing can be said.
    """
    bare = architecture.build()
    control, again = (_run(copy.deepcopy(bare), architecture.feed) for _ in range(2))
    assert not _differing(control, again), "the control differs from itself"
    blocks = tuple(block.fqn for block in find_blocks(bare))
    cells = [
        _cell(bare, architecture, control, blocks, name, policy, executor)
        for name, policy in (policies or policies_of(architecture)).items()
        for executor in EXECUTORS
    ]
    return Report(blocks, _saved(copy.deepcopy(bare), architecture, blocks), tuple(cells))


def _cell(
    bare: nn.Module,
    architecture: Architecture,
    control: Results,
    blocks: tuple[str, ...],
    name: str,
    policy: object,
    executor: str,
) -> Cell:
    model = copy.deepcopy(bare)
    applied: Applied = lowtide.apply(model, {**dict(policy), "executor": executor})  # type: ignore[call-overload]
    differing = _differing(control, _run(model, architecture.feed))
    reasons = [r.reason for r in applied.regions if r.executor != executor]
    return Cell(
        policy=name,
        executor=executor,
        differing=differing,
        regions=len(applied.regions),
        native=len(applied.regions) - len(reasons),
        reason=reasons[0] if reasons else "",
        saved_bytes=_saved(model, architecture, blocks),
    )


def _run(model: nn.Module, feed: str) -> Results:
    results: Results = []
    for seed in range(_STEPS):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = loss_of(model, feed)
        loss.backward()
        found = {"loss": loss.detach().clone()}
        found |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
        results.append(found)
    return results


def _differing(expected: Results, found: Results) -> tuple[str, ...]:
    names: list[str] = []
    for step, (a, b) in enumerate(zip(expected, found, strict=True)):
        names += [f"step {step}: {n}" for n in {*a, *b} if n not in a or n not in b or not _same(a[n], b[n])]
    return tuple(sorted(names))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def _saved(model: nn.Module, architecture: Architecture, blocks: tuple[str, ...]) -> int:
    torch.manual_seed(0)
    modules = {s.fqn: s.module for s in slots(model) if s.fqn in blocks}
    measured = measure_saved_bytes(model, lambda: loss_of(model, architecture.feed), modules)
    return sum(block.saved_bytes for block in measured.blocks)
