"""Every shipped config is legal, and trains for some steps on two processes through the command."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lowtide.cli import run
from tests.e2e.command import EXAMPLES, ROOT, lowtide, records

SHIPPED = sorted(path for path in EXAMPLES.glob("*.yaml") if not path.name.startswith("sweep_"))
STEPS = 8
TINY = ["model.dim=32", "model.layers=3", "data.sequence_length=32"]
RUN = {
    "quickstart": ["model.heads=2", "model.kv_heads=2", *TINY],
    "ac_full": TINY,
    "ac_every_nth_layer": TINY,
    "ac_some_layers": TINY,
    "ac_selective_op": TINY,
    "ac_rules": TINY,
    "ac_fsdp1": TINY,
    "huggingface_llama": ["data.sequence_length=32"],
    "compile": ["model.layers=2", "data.sequence_length=32"],
}
ESTIMATED = ("quickstart", "huggingface_llama", "compile")
"""Those whose estimate is made, and held against what was measured."""
CHECKPOINTED = {"ac_every_nth_layer": 2, "ac_rules": 2, "ac_some_layers": 3, "huggingface_llama": 4, "compile": 2}


@pytest.mark.parametrize("config", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_is_legal(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check", str(config), "--allow-code"]) == 0
    assert capsys.readouterr().out == f"{config}: legal\n"


def test_every_shipped_config_is_run_here() -> None:
    assert {path.stem for path in SHIPPED} == set(RUN)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.compiler] * (n == "compile")) for n in RUN])
def test_it_trains_and_says_what_it_saved(name: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    changes = [f"training.steps={STEPS}", "schedule.warmup_steps=1", "logging.every=1", "evaluation.batches=2"]
    changes += [] if name in ESTIMATED else ["estimate=false"]
    sets = [part for text in [*changes, *RUN[name]] for part in ("--set", text)]
    ended = lowtide(tmp_path, "train", f"examples/{name}.yaml", *sets, "--nproc", "2")
    assert ended.code == 0, ended.err
    assert "Warning" not in ended.err
    state = ended.state
    assert (state.status, state.exit_code, state.record["world_size"]) == ("done", 0, 2)
    summary = state.record["summary"]
    assert [record["step"] for record in records(ended.run)] == list(range(1, STEPS + 1))
    assert summary["steps"] == STEPS
    assert summary["loss_last"] < summary["loss_first"]
    assert math.isfinite(summary["loss_held_out"])
    assert summary["tokens_per_s"] > 0
    assert len(summary["blocks"]) == CHECKPOINTED.get(name, 3)
    _peaks_are_there(summary, compiled=name == "compile")
    _saves_less_than_none(summary)
    _the_estimate_was_right(summary["forecast"], estimated=name in ESTIMATED)
    assert f"run folder: {ended.run.relative_to(tmp_path)}" in ended.out
    assert [path.name for path in (ended.run / "checkpoints").iterdir()] == [f"step-{STEPS:08d}"]
    assert (ended.run / "config.yaml").read_text() == (ROOT / "examples" / f"{name}.yaml").read_text()


def _peaks_are_there(summary: dict, *, compiled: bool) -> None:
    assert [row["rank"] for row in summary["peaks"]] == [0, 1]
    assert summary["peak_step"] == 2
    for row in summary["peaks"]:
        assert row["method"] == ("allocator events (upper bound)" if compiled else "storage tracker"), row
        assert row["peak_bytes"] > 0


def _the_estimate_was_right(told: dict | None, *, estimated: bool) -> None:
    assert (told is not None) == estimated
    if told is not None and told["predicted_bytes"] is not None:
        assert abs(told["error"]) <= 0.01
    elif told is not None:
        assert told["note"] == "compiled code is not estimated"


def _saves_less_than_none(summary: dict) -> None:
    rows = {row["policy"]: row for row in summary["saved"]}
    used = summary["saved"][-1]
    assert summary["saved_note"] == ""
    assert used["checkpointed"] == len(summary["blocks"])
    assert rows["full"]["total_bytes"] <= used["total_bytes"] < rows["none"]["total_bytes"]
    assert sum(row["peak_bytes"] for row in summary["peaks"]) > used["total_bytes"]
