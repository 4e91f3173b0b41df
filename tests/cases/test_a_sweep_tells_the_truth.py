"""Sweeps whose cells die: no zeros, one row for each key, an exit code that says so, and nobody left alive."""

from __future__ import annotations

import json
import socket

import pytest

from lowtide.reports import find_records, rows_of, to_csv
from lowtide.sweeps import run_sweep
from lowtide.sweeps._outcome import Ended, judge_child
from lowtide.system.files import write_json
from lowtide.system.processes import is_alive
from tests.helpers.launched import ROOT
from tests.helpers.sweep_driver import COMMAND, plan, sweep_of

NO_RESULT = "it ended with exit code 0 and left no result"
_NUMBERS = ("peak_bytes", "tokens_per_s", "loss_last", "steps", "saved_bytes", "wall_s", "mfu", "hfu")


class _Quiet:
    def started(self, cell, attempt):
        pass

    def ended(self, cell, record):
        pass


def _run(folder, cells, *, resume=False, **fields):
    sweep = sweep_of(cells, **fields)
    planned = plan(sweep, folder)
    done = run_sweep(sweep, planned, folder / "sweep", command=COMMAND, watcher=_Quiet(), resume=resume)
    return planned, done


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    return tmp_path


def test_a_failed_cell_is_no_row_of_zeros_and_a_resumed_one_no_second_row(here):
    cells = [{"do": do} for do in ("ok", "out_of_memory", "killed", "no_numbers")]
    planned, done = _run(here, cells)
    assert done.exit_code == 1
    _, again = _run(here, [*cells, {"do": "ok", "size": 2}], resume=True, skip=["out_of_memory"])
    assert again.exit_code == 1
    rows = rows_of(find_records(here / "sweep"))
    keys = [row["id"] for row in rows]
    assert len(set(keys)) == len(keys) == 5
    assert {cell.key for cell in planned} < set(keys)
    failed = [row for row in rows if row["status"] != "ok"]
    assert [row["status"] for row in failed] == ["out_of_memory", "error", "error"]
    assert all(row[name] is None for row in failed for name in _NUMBERS)
    assert all(row["reason"] for row in failed)
    assert len(to_csv(find_records(here / "sweep")).splitlines()) == 6


def test_a_sweep_with_a_cell_that_has_no_record_is_not_done(here):
    cells = [{"do": "ok"}, {"do": "ok", "size": 2}]
    planned, done = _run(here, cells)
    assert done.exit_code == 0
    (here / "sweep" / "cells" / planned[1].key / "record.json").unlink()
    found = find_records(here / "sweep")
    assert (len(found.records), found.unfinished) == (1, 1)
    _, again = _run(here, cells, resume=True)
    assert sorted(again.records) == sorted(cell.key for cell in planned)


def test_a_cell_that_hangs_leaves_no_rank_in_another_session_and_no_port(here):
    _, done = _run(here, [{"do": "hang"}], timeout_s=1.5)
    (record,) = done.records.values()
    assert record.status == "timeout"
    notes = [json.loads(file.read_text()) for file in (here / "pids").glob("*.json")]
    assert len(notes) == 2
    assert [note for note in notes if is_alive(note) is not False] == []
    assert {note["pid"] for note in notes} <= set(record.attempts[0].pids)
    (port,) = [note["port"] for note in notes if "port" in note]
    with socket.create_server(("127.0.0.1", port)):
        pass


def _ended(**fields):
    given = {"exit_code": 1, "signal": None, "timed_out": False, "oom_kills": 0, "stdout": "", "stderr": ""}
    return Ended(**{**given, **fields})


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"exit_code": None, "signal": 9}, "error", "SIGKILL, cause unknown (the launcher was killed)"),
        ({"exit_code": 137}, "error", "SIGKILL, cause unknown (the launcher was killed)"),
        (
            {"exit_code": 137, "oom_kills": 2},
            "out_of_memory",
            "the kernel's out-of-memory killer struck while it ran (2 times); the launcher was killed",
        ),
        ({"oom_kills": 1, "stderr": "a\nE: x\n"}, "error", "exit code 1, and it left no result; its last words: E: x"),
        ({"exit_code": None, "signal": 11}, "error", "killed by SIGSEGV, and it left no result"),
        ({"exit_code": 0}, "error", f"{NO_RESULT}: there is no readable nowhere/run.json"),
    ],
    ids=["SIGKILL", "137", "the kernel's killer", "another error meanwhile", "SIGSEGV", "0 without a result"],
)  # fmt: skip
def test_a_cell_without_a_run_folder_is_told_by_how_it_ended(tmp_path, fields, status, reason):
    outcome = judge_child(_ended(**fields), tmp_path / "nowhere")
    assert (outcome.status, outcome.reason, outcome.result) == (status, reason, None)


def test_a_rank_that_was_killed_is_out_of_memory_only_where_the_kernel_counted_it(tmp_path):
    error = {"type": "RankKilled", "message": "rank 1 was killed by signal 9 (SIGKILL); look", "rank": 1}
    write_json(tmp_path / "run.json", {"status": "failed", "error": error})
    plain = judge_child(_ended(), tmp_path)
    assert (plain.status, plain.reason) == ("error", "SIGKILL, cause unknown (rank 1 was killed)")
    counted = judge_child(_ended(oom_kills=1), tmp_path)
    assert (counted.status, counted.error_rank) == ("out_of_memory", 1)


def test_fewer_steps_than_were_asked_for_are_no_result(tmp_path):
    write_json(tmp_path / "run.json", {"status": "done", "summary": {"steps": 3}})
    (tmp_path / "config.resolved.yaml").write_text("training: {steps: 4}\n")
    outcome = judge_child(_ended(exit_code=0), tmp_path)
    assert (outcome.status, outcome.result) == ("error", None)
    assert outcome.reason.endswith("it did 3 of 4 steps")
