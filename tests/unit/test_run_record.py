"""Records of runs: numbers only where there are any, strict JSON, and read from a run folder as it stands."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from lowtide.errors import InputError
from lowtide.run_record import PeakOfRank, RunRecord, RunResult
from lowtide.system.cgroup import oom_kills
from lowtide.system.files import write_json
from lowtide.system.processes import identify
from lowtide.system.run_report import describe_run

SUMMARY = {
    "steps": 4,
    "loss_first": 5.5,
    "loss_last": None,
    "tokens_per_s": 100.0,
    "applied": "full: 2 of 2 blocks",
    "peaks": [
        {"rank": 0, "peak_bytes": 1000, "method": "allocator events", "note": ""},
        {"rank": 1, "peak_bytes": 1200, "method": "allocator events", "note": ""},
    ],
    "saved": [{"policy": "full", "checkpointed": 2, "total_bytes": 77}],
    "wall_s": 1.5,
}


def _folder(tmp_path, **fields):
    folder = tmp_path / "run-1"
    folder.mkdir(exist_ok=True)
    record = {"experiment_id": "run-1", "name": "tiny", "started_at": "2026-01-01T00:00:00Z", "world_size": 2}
    write_json(folder / "run.json", record | fields)
    (folder / "config.resolved.yaml").write_text("model: {kind: decoder}\n")
    write_json(folder / "environment.json", {"torch": {"version": "2.13.0", "devices": [{"name": "cpu x86_64"}]}})
    return folder


def test_a_record_survives_json_and_refuses_what_it_does_not_know():
    result = RunResult(steps=3, peaks=(PeakOfRank(rank=0, peak_bytes=7, method="allocator events"),))
    record = RunRecord(id="a", label="a", status="ok", result=result, settings={"data.batch_size": 2})
    assert RunRecord.from_json(record.to_json()) == record
    document = json.loads(record.to_json())
    with pytest.raises(InputError, match="statsu"):
        RunRecord.from_json(json.dumps({**document, "statsu": "ok"}))
    with pytest.raises(InputError, match="schema_version"):
        RunRecord.from_json(json.dumps({**document, "schema_version": 2}))


@pytest.mark.parametrize("status", ["out_of_memory", "error", "timeout", "skipped", "stopped", "running"])
def test_a_run_that_is_not_ok_has_a_reason_and_no_numbers(status):
    assert RunRecord(id="a", label="a", status=status, reason="because").result is None
    with pytest.raises(ValidationError, match="no reason"):
        RunRecord(id="a", label="a", status=status)
    with pytest.raises(ValidationError, match="a result"):
        RunRecord(id="a", label="a", status=status, reason="because", result=RunResult(steps=0))


def test_a_run_that_is_ok_has_numbers_and_no_reason():
    with pytest.raises(ValidationError, match="no result"):
        RunRecord(id="a", label="a", status="ok")


def test_the_peak_is_the_largest_over_ranks_and_unknown_where_one_is():
    known = PeakOfRank(rank=0, peak_bytes=7, method="x")
    assert RunResult(steps=1, peaks=(known, PeakOfRank(rank=1, peak_bytes=9, method="x"))).peak_bytes == 9
    assert RunResult(steps=1, peaks=(known, PeakOfRank(rank=1, method="not available"))).peak_bytes is None
    assert RunResult(steps=1).peak_bytes is None


def test_a_run_folder_reads_as_what_run_json_says(tmp_path):
    record = describe_run(_folder(tmp_path, status="done", summary=SUMMARY))
    assert (record.status, record.reason, record.world_size, record.device) == ("ok", None, 2, "cpu x86_64")
    assert record.config == {"model": {"kind": "decoder"}}
    assert record.result is not None
    assert (record.result.peak_bytes, record.result.loss_last, record.result.saved[0].total_bytes) == (1200, None, 77)


def test_done_without_numbers_is_an_error(tmp_path):
    record = describe_run(_folder(tmp_path, status="done"))
    assert (record.status, record.result) == ("error", None)
    assert "no summary" in record.reason


def test_a_run_whose_process_is_gone_is_an_error_and_not_running(tmp_path):
    gone = {**identify(), "start_ticks": 1}
    record = describe_run(_folder(tmp_path, status="running", process=gone))
    assert (record.status, record.error_type) == ("error", "ProcessLost")
    record = describe_run(_folder(tmp_path, status="running", process=identify()))
    assert record.status == "running"


def test_a_failed_run_keeps_the_error_of_its_rank_and_no_numbers(tmp_path):
    error = {"type": "ZeroDivisionError", "message": "a bug", "rank": 1}
    record = describe_run(_folder(tmp_path, status="failed", error=error, summary=SUMMARY))
    assert (record.status, record.reason, record.error_rank) == ("error", "ZeroDivisionError: a bug", 1)
    assert record.result is None


@pytest.mark.parametrize(
    ("line", "file"),
    [("0::/box/inner\n", "box/memory.events"), ("4:cpu,memory:/box/inner\n", "memory/box/inner/memory.oom_control")],
    ids=["version 2, the group above", "version 1"],
)
def test_the_kernels_kills_are_counted_from_the_control_group(tmp_path, line, file):
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{line}")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("low 0\noom 5\noom_kill 3\n")
    assert oom_kills(root=tmp_path, mine=tmp_path / "cgroup") == 3
    assert oom_kills(root=tmp_path / "elsewhere", mine=tmp_path / "cgroup") is None
    assert oom_kills(root=tmp_path, mine=tmp_path / "nowhere") is None
