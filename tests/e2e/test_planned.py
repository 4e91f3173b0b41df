"""From a memory limit to a run that keeps it: plan, train with the plan, or with the limit alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowtide.cli import run
from lowtide.planning import read_plan
from tests.e2e.command import lowtide
from tests.helpers.configs import write

CONFIG = {
    "run": {"name": "planned"},
    "model": {"kind": "decoder", "dim": 64, "layers": 3, "heads": 2, "kv_heads": 2},
    "data": {"kind": "random", "sequence_length": 64, "batch_size": 8},
    "training": {"steps": 3},
    "schedule": {"warmup_steps": 1},
    "optimizer": {"kind": "adamw", "lr": 1e-3},
    "evaluation": {"batches": 1},
}
LIMIT = "7MiB"


def _config(tmp_path: Path) -> Path:
    return write(tmp_path, yaml.safe_dump(CONFIG), "planned.yaml")


def _keeps(state: Mapping[str, Any], limit_bytes: int) -> None:
    summary = state["summary"]
    assert all(0.8 * limit_bytes < row["peak_bytes"] <= limit_bytes for row in summary["peaks"]), summary["peaks"]


def test_a_plan_is_made_reviewed_and_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(_config(tmp_path))
    out = tmp_path / "plan.yaml"
    assert run(["plan", config, "--nproc", "2", "--limit", LIMIT, "--out", str(out)]) == 0
    assert "with policy none the peak is" in capsys.readouterr().out
    plan = read_plan(out)
    assert plan.peak_bytes + plan.margin_bytes <= plan.limit_bytes
    ended = lowtide(tmp_path, "train", config, "--nproc", "2", "--plan", str(out))
    assert ended.code == 0, ended.err
    _keeps(ended.state.record, plan.limit_bytes)
    assert read_plan(ended.run / "plan.yaml") == plan
    other = lowtide(tmp_path, "train", config, "--nproc", "1", "--plan", str(out), "--set", "model.layers=4")
    assert other.code == 2
    assert "this plan is for another model: the plan says nothing of layers.3" in other.err


@pytest.mark.full
def test_a_limit_in_the_config_is_planned_for_at_the_start(tmp_path: Path) -> None:
    config = str(_config(tmp_path))
    ended = lowtide(tmp_path, "train", config, "--nproc", "2", "--set", f"policy={{kind: plan, limit: {LIMIT}}}")
    assert ended.code == 0, ended.err
    plan = read_plan(ended.run / "plan.yaml")
    _keeps(ended.state.record, plan.limit_bytes)
    small = lowtide(tmp_path, "train", config, "--nproc", "2", "--set", "policy={kind: plan, limit: 1MiB}")
    assert small.code == 3
    assert "the least possible peak is" in small.err
