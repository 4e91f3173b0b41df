"""What importing costs and gives: the pure parts never load torch, no module shadows a public name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import lowtide

PURE = [
    "lowtide",
    "lowtide.cli",
    "lowtide.errors",
    "lowtide.plan_record",
    "lowtide.planning",
    "lowtide.policy",
    "lowtide.prediction",
    "lowtide.records",
    "lowtide.reports",
    "lowtide.inspect_report",
    "lowtide.run_record",
    "lowtide.sweeps",
    "lowtide.system.files",
    "lowtide.system.processes",
    "lowtide.system.run_state",
    "lowtide.training",
    "lowtide.training.checkpoint_folder",
    "lowtide.training.config",
    "lowtide.training.ids",
    "lowtide.training.launch",
    "lowtide.training.run_folder",
    "lowtide.training.summary",
    "lowtide.training.tracking",
    "lowtide.units",
]

PUBLIC = [
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


def _fresh(code: str) -> object:
    """Run code in a fresh process; what its last line prints, as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", PURE)
def test_the_pure_parts_never_import_torch_even_indirectly(name):
    code = f"import json, sys; import {name}; print(json.dumps(sorted(sys.modules)))"
    loaded = _fresh(code)
    assert name in loaded
    heavy = {"torch", "transformers", "pandas", "wandb", "tensorboard"}
    assert not heavy & set(loaded)


def test_policies_are_made_and_resolved_without_torch():
    code = (
        "import json, sys, lowtide; from lowtide.policy import Block, resolve\n"
        "p = lowtide.SelectiveOp(save=['sdpa', {'op': 'matmul', 'keep': '1/2'}])\n"
        "r = resolve(p, [Block('layers.0', 'layers', 0)])\n"
        "print(json.dumps([r.total, 'torch' in sys.modules]))"
    )
    assert _fresh(code) == [1, False]


def test_the_public_names_are_these():
    assert sorted(lowtide.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(lowtide))


PARTS = {
    "lowtide.api": [
        "Applied", "SavedBytes", "SavedColumn", "TrainSetup", "apply", "as_policy", "checkpoint_name", "estimate",
        "inspect", "measure", "plan", "saved_bytes", "trace",
    ],
    "lowtide.planning": [
        "Assigned", "BlockFacts", "Call", "Choice", "Executor", "Frontier", "Graph", "Kind", "MARGIN", "Menu",
        "Planner", "Point", "Step", "assign", "best_under", "check_model", "evaluate", "frontier_of", "graph_of",
        "keep_all", "least_peak", "menus_of", "parameters_hash", "patterns_of", "peak_of", "plan_table", "plan_text",
        "policy_of", "read_plan", "step_of", "write_plan",
    ],
    "lowtide.measurement": [
        "AllocatorEvents", "BlockSaved", "EventAccount", "LiveStorages", "Peak", "PeakMeter", "SavedMeasurement",
        "StepProfiler", "StorageRecord", "calibrate", "mark_phase", "measure_peak", "measure_saved_bytes", "phase_mark",
        "places_in", "tensors_in",
    ],
    "lowtide.policy": [
        "ALIASES", "Block", "EveryNthLayer", "Full", "Keep", "LayerPolicy", "MemoryBudget", "NoPolicy", "Pattern",
        "PlanPolicy", "Policy", "ROUTING_OPS", "RegionRecipe", "Resolution", "Rule", "Rules", "SaveRule", "SelectiveOp",
        "SomeLayers", "expand", "match_fqns", "named_policy", "parse_policy", "preset_names", "resolve", "rules_of",
    ],
    "lowtide.regions": [
        "Applied", "Region", "Slot", "apply", "bare_fqn", "checkpoint_name", "compress_names", "find_blocks",
        "innermost", "slots",
    ],
    "lowtide.reports": [
        "Found", "estimate_page", "find_records", "frontier_of", "load_runs", "plot_frontier", "plot_prediction",
        "plot_timeline", "rows_of", "to_csv", "to_frame", "to_parquet", "to_png", "write_estimate_page",
        "write_inspect_page", "write_page",
    ],
    "lowtide.sweeps": [
        "Cell", "Finished", "LiveProgress", "PlainProgress", "Resolved", "Store", "Submitted", "SweepConfig", "Tally",
        "Watcher", "estimate_cells", "plan_cells", "run_sweep", "submit",
    ],
    "lowtide.training": ["LoadedConfig", "Summary", "TrainConfig", "load_config", "run"],
    "lowtide.training.config": [
        "LoadedConfig", "TrainConfig", "config_hash", "load", "load_config", "reference_page", "to_yaml",
    ],
    "lowtide.units": ["format_bytes", "parse_bytes"],
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_the_names_of_the_parts_are_these(part):
    module = importlib.import_module(part)
    assert sorted(module.__all__) == PARTS[part]
    assert [name for name in PARTS[part] if not hasattr(module, name)] == []


def test_every_submodule_imports_and_none_shadows_a_public_name():
    code = (
        "import importlib, json, pkgutil, sys, types, lowtide\n"
        "found = pkgutil.walk_packages(lowtide.__path__, 'lowtide.')\n"
        "names = [m.name for m in found if '__main__' not in m.name]\n"
        "[importlib.import_module(n) for n in names]\n"
        "bad = [n for n in lowtide.__all__ if isinstance(getattr(lowtide, n), types.ModuleType)]\n"
        "print(json.dumps([len(names), bad]))"
    )
    count, shadowed = _fresh(code)
    assert count > 5
    assert shadowed == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="aply"):
        lowtide.aply  # noqa: B018
