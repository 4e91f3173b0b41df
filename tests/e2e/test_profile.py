"""``lowtide profile`` and ``profile:`` in a run: phases, peaks, operators by module, traces; counted exactly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from lowtide.system.run_report import describe_run
from tests.e2e.command import lowtide

BASE = """\
model: {kind: decoder, dim: 32, layers: 2, heads: 2}
data: {kind: embedded_text, sequence_length: 16, batch_size: 2}
sharding: {kind: none}
policy: {kind: full, executor: recompute}
training: {steps: 6}
evaluation: {batches: 1}
"""
FORWARD_PRODUCTS = 2 * 7 + 1
"""Of two blocks (query, key, value, output, gate, up, down) and the head."""


def _calls(rows: list[dict], op: str, phase: str) -> int:
    return sum(row["calls"] for row in rows if (row["op"], row["phase"]) == (op, phase))


def _modules(rows: list[dict], op: str, phase: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows:
        if (row["op"], row["phase"]) == (op, phase):
            found[row["module"]] += row["calls"]
    return found


def test_a_step_is_told_by_phase_operator_and_module_and_its_peak_is_the_trainings(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    ended = lowtide(tmp_path, "profile", "base.yaml", "--repeats", "2", "--warmup", "1", "--json")
    assert ended.code == 0, ended.err
    told = ended.document()
    (rank,) = told["ranks"]
    assert (told["phase"], told["world_size"], told["data"], told["repeats"]) == ("step", 1, "random", 2)
    assert all(rank["ms"][phase] > 0 for phase in ("data", "forward", "backward", "optimizer"))
    assert rank["ms"]["step"] >= rank["ms"]["forward"]
    peaks = rank["phase_peak_bytes"]
    assert list(peaks) == ["data", "forward", "backward", "optimizer"]
    assert max(peaks.values()) == rank["peak_bytes"]
    assert told["tokens_per_s"] == pytest.approx(2 * 16 / (rank["ms"]["step"] / 1000))
    assert (told["mfu"], told["hfu"]) == (None, None)
    # Recompute is not the model's work: a third of the blocks' products more, which run in backward.
    assert told["hardware_flops"] > told["model_flops"] > 0
    rows = told["operators"]
    assert _calls(rows, "aten.mm", "forward") == FORWARD_PRODUCTS
    assert _calls(rows, "aten.mm", "backward") == 2 * FORWARD_PRODUCTS + 2 * 7
    forward = _modules(rows, "aten.mm", "forward")
    assert set(forward.values()) == {1}
    assert len(forward) == FORWARD_PRODUCTS
    assert "layers.0.mlp.gate" in forward
    backward = _modules(rows, "aten.mm", "backward")
    assert {name: backward[name] for name in forward} == {name: 2 if name.startswith("head") else 3 for name in forward}
    assert [Path(path).name for path in told["traces"]] == ["trace-rank0.json"]
    trace = json.loads((tmp_path / "profile/trace-rank0.json").read_text())
    assert {"lowtide.phase:forward", "lowtide.module:layers.0.mlp.gate"} <= {
        e.get("name") for e in trace["traceEvents"]
    }


@pytest.mark.full
def test_the_forward_alone_has_no_backward(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    arguments = ["--phase", "forward", "--data", "config", "--repeats", "1", "--warmup", "0", "--no-trace"]
    # A policy whose regions run under a dispatch mode, through which every operator passes twice.
    selective = ["--set", "policy={kind: selective_op, executor: recompute, save: [sdpa]}"]
    ended = lowtide(tmp_path, "profile", "base.yaml", *arguments, *selective)
    assert ended.code == 0, ended.err
    told = json.loads((tmp_path / "profile/profile.json").read_text())
    assert (told["phase"], told["data"]) == ("forward", "config")
    assert list(told["ranks"][0]["phase_peak_bytes"]) == ["data", "forward"]
    assert _calls(told["operators"], "aten.mm", "forward") == FORWARD_PRODUCTS
    assert _calls(told["operators"], "aten.mm", "backward") == 0
    assert not list((tmp_path / "profile").glob("trace*"))
    assert "base.yaml: forward alone, 1 processes on cpu" in ended.out
    assert "MFU and HFU are not known" in ended.out


def test_wrong_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    ended = lowtide(tmp_path, "profile", "base.yaml", "--repeats", "0")
    assert ended.code == 2
    assert "--repeats 0: at least 1" in ended.err


def test_steps_of_a_real_run_are_profiled_and_stand_in_its_record(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE + "profile: {wait: 2, warmup: 1, active: 2}\n")
    ended = lowtide(tmp_path, "train", "base.yaml", "--json")
    assert ended.code == 0, ended.err
    record = describe_run(ended.run)
    assert record.result is not None
    assert record.result.peak_bytes is not None  # measured in the second step, before the profiler
    rows = [row.model_dump() for row in record.operators]
    assert rows == json.loads((ended.run / "profile.json").read_text())["operators"][:50]
    rows = json.loads((ended.run / "profile.json").read_text())["operators"]
    assert _calls(rows, "aten.mm", "forward") == FORWARD_PRODUCTS  # of one step, though two were kept
    assert (ended.run / "logs/rank0.trace.json").exists()


@pytest.mark.full
def test_several_ranks_each_have_a_row_and_a_trace(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE.replace("kind: none", "kind: fsdp2"))
    ended = lowtide(tmp_path, "profile", "base.yaml", "--nproc", "2", "--repeats", "1", "--json")
    assert ended.code == 0, ended.err
    told = ended.document()
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert [Path(path).name for path in told["traces"]] == ["trace-rank0.json", "trace-rank1.json"]
    assert any("upper bounds" in note for note in told["notes"])
    assert _calls(told["operators"], "aten.mm", "forward") == FORWARD_PRODUCTS
