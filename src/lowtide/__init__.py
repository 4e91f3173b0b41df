"""lowtide decides which activations a PyTorch model keeps and which it recomputes, and proves it.

    module ─────────► regions.discover ──► blocks ─┐
                                                   ▼
    policy.yaml ────► policy ────────────► resolve ──► recipes ──► regions ──► the same module, checkpointed
                                                                     │
    config ─► build ─► parallelize ─► loop ─► events ─► tracking     ▼
    (training)                          └──────────► measurement ─► peak bytes, saved bytes

    module, or a whole step ─► tracing (fake tensors: no GPU, no memory) ─► OpTrace, Estimate
                                                          limit ─► planning ─► Plan ─► policy

    errors        the tree of errors
    units         bytes as people write them
    system/       whole files, processes, the state of a run                                            no torch
    records       OpTrace, Estimate: frozen values, JSON in and out                                     no torch
    inspect_report  InspectReport: what backward needs, and what a policy does with it              no torch
    plan_record   Plan: what every layer keeps, chosen for a memory limit                           no torch
    run_record    RunRecord: what became of one run, or of one cell of a sweep                          no torch
    policy/       kinds (tagged union) · match (globs on FQNs) · resolve (policy + blocks -> recipes)   no torch
    prediction/   hardware (the table of devices) · profiles · time · the memory of a step from traces  no torch
    planning/     every best choice for a kind of block · a choice for each layer under a limit · plan files  no torch
    ── torch starts here ──
    tracing/      one block's operators, or a whole training step, under fake tensors, as a target device would run them
    regions/      the only code that changes a model: discover · operators · apply and remove · recompute · replay
    measurement/  live bytes, saved bytes, the true peak of a step
    api/          the verbs, each joining the parts above
    training/     config registry mesh data model optim parallelize checkpoint events loop tracking entry launch
    ── torch ends ──
    sweeps/       grid · child (lowtide train, in its own session) · outcome · store: one RunRecord per cell
    reports/      tables · plots · page: what a folder of RunRecords says
    cli/          one thin file a verb

Public names load on first use, so that ``import lowtide`` costs nothing that is not needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lowtide.api import (
        Applied,
        SavedBytes,
        TrainSetup,
        apply,
        checkpoint_name,
        estimate,
        inspect,
        measure,
        plan,
        saved_bytes,
        trace,
    )
    from lowtide.inspect_report import InspectReport
    from lowtide.plan_record import Plan
    from lowtide.policy import EveryNthLayer, Full, MemoryBudget, NoPolicy, Rule, Rules, SelectiveOp, SomeLayers
    from lowtide.records import Estimate, Measurement, OpTrace
    from lowtide.reports import load_runs
    from lowtide.run_record import RunRecord

_HOMES = {
    "Applied": "lowtide.api",
    "SavedBytes": "lowtide.api",
    "TrainSetup": "lowtide.api",
    "apply": "lowtide.api",
    "checkpoint_name": "lowtide.api",
    "estimate": "lowtide.api",
    "measure": "lowtide.api",
    "inspect": "lowtide.api",
    "plan": "lowtide.api",
    "saved_bytes": "lowtide.api",
    "trace": "lowtide.api",
    "EveryNthLayer": "lowtide.policy",
    "Full": "lowtide.policy",
    "MemoryBudget": "lowtide.policy",
    "NoPolicy": "lowtide.policy",
    "Rule": "lowtide.policy",
    "Rules": "lowtide.policy",
    "SelectiveOp": "lowtide.policy",
    "SomeLayers": "lowtide.policy",
    "InspectReport": "lowtide.inspect_report",
    "Plan": "lowtide.plan_record",
    "Estimate": "lowtide.records",
    "Measurement": "lowtide.records",
    "OpTrace": "lowtide.records",
    "RunRecord": "lowtide.run_record",
    "load_runs": "lowtide.reports",
}

__all__ = [
    "Applied",
    "Estimate",
    "EveryNthLayer",
    "Full",
    "InspectReport",
    "Measurement",
    "MemoryBudget",
    "NoPolicy",
    "OpTrace",
    "Plan",
    "Rule",
    "Rules",
    "RunRecord",
    "SavedBytes",
    "SelectiveOp",
    "SomeLayers",
    "TrainSetup",
    "apply",
    "checkpoint_name",
    "estimate",
    "inspect",
    "load_runs",
    "measure",
    "plan",
    "saved_bytes",
    "trace",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
