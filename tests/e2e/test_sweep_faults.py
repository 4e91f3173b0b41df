"""Sweeps in which cells raise, run out of memory, hang, die and lie, and which are killed themselves.

One truthful record per cell, nobody left behind, every port free, and the same records whenever the sweep was killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lowtide.run_record import RunRecord
from lowtide.sweeps import PlainProgress, Tally, run_sweep
from lowtide.system.processes import is_alive
from tests.helpers.launched import ROOT, wait_for
from tests.helpers.sweep_driver import CELLS, COMMAND, facts, plan, sweep_of

PATIENCE_S = 240  # a bound against hanging, not a measurement

EXPECTED = {
    "ok": ("ok", None),
    "raise": ("error", "ZeroDivisionError: a bug in the data"),
    "out_of_memory": ("out_of_memory", "out of memory on rank 1 during step 3"),
    "hang": ("timeout", "not done within 2 s, and ended"),
    "killed": ("error", "SIGKILL, cause unknown (the launcher was killed)"),
    "nothing": ("error", "it ended with exit code 0 and left no result: run.json says that it still runs"),
    "cannot_write": ("error", "exit code 1, and it left no result; its last words: OSError: [Errno 27] File too large"),
    "no_numbers": (
        "error",
        "it ended with exit code 0 and left no result: run.json says that the run is done, and holds no summary of it",
    ),
}


def _drive(folder: Path, fatal: str | None = None, count: int = 24) -> int:
    folder.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "tests.helpers.sweep_driver", str(folder), str(count)]
    argv += [] if fatal is None else [fatal]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if fatal is None:
        assert done.returncode in (0, 1), done.stderr
    return done.returncode


def _records(folder: Path) -> dict[str, RunRecord]:
    found = {}
    for file in sorted((folder / "sweep" / "cells").glob("*/record.json")):
        record = RunRecord.from_json(file.read_bytes())
        assert record.id == file.parent.name
        found[record.id] = record
    return found


def _check_records(records: dict[str, RunRecord], count: int = 24) -> None:
    """Compare each record with what was done to its cell; the keys are those of the plan."""
    assert sorted((r.settings["do"], r.settings["size"]) for r in records.values()) == sorted(
        (c["do"], c["size"]) for c in CELLS[:count]
    )
    for record in records.values():
        do, size = record.settings["do"], record.settings["size"]
        if do == "out_of_memory" and size > 1:
            assert record.status == "skipped"
            assert record.reason == "larger in size than do=out_of_memory size=1, which ran out of memory"
            assert record.attempts == ()
            continue
        assert (record.status, record.reason) == EXPECTED[do]
        assert len(record.attempts) == 1
        peak = None if record.result is None else record.result.peak_bytes
        assert peak == (size * 1000 if do == "ok" else None)


def _check_nothing_is_left(folder: Path) -> None:
    notes = [json.loads(file.read_text()) for file in (folder / "pids").glob("*.json")]
    assert len(notes) >= 44  # a launcher and a rank of each of the 22 cells that ran
    wait_for(lambda: not any(is_alive(note) for note in notes), "the end of every process of every cell")
    for port in [note["port"] for note in notes if "port" in note]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    assert list(folder.glob("sweep/cells/*/running.json")) == []
    assert list(folder.glob("sweep/**/.*.tmp")) == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert _drive(folder) == 1
    return folder


def test_every_cell_has_one_truthful_record_and_nobody_is_left(undisturbed):
    records = _records(undisturbed)
    _check_records(records)
    assert Counter(r.status for r in records.values()) == {
        "ok": 3, "error": 15, "out_of_memory": 1, "timeout": 3, "skipped": 2,
    }  # fmt: skip
    _check_nothing_is_left(undisturbed)


def _kills(folder: Path, count: int) -> list[str]:
    """Choose moments by a seed: a write, a rename and a start are among them, each after a few of its kind."""
    total = len((folder / "moments").read_text().splitlines())
    draw = random.Random(20261201)
    chosen = [f"{kind}:{draw.randint(2, 12)}" for kind in ("write", "rename", "start")]
    return [*chosen, *(f"any:{number}" for number in draw.sample(range(1, total + 1), count - 3))]


def _check_against(folder: Path, undisturbed: Path) -> None:
    assert {k: facts(r) for k, r in _records(folder).items()} == {k: facts(r) for k, r in _records(undisturbed).items()}
    _check_nothing_is_left(folder)


def test_a_sweep_killed_three_times_and_resumed_has_the_same_records(tmp_path, undisturbed):
    for fatal in _kills(undisturbed, 3):
        assert _drive(tmp_path, fatal) == -signal.SIGKILL
        assert set(_records(tmp_path)) <= set(_records(undisturbed))
    assert _drive(tmp_path) == 1
    _check_against(tmp_path, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("nth", range(20))
def test_a_sweep_killed_at_any_moment_and_resumed_has_the_same_records(tmp_path, undisturbed, nth):
    assert _drive(tmp_path, _kills(undisturbed, 20)[nth]) == -signal.SIGKILL
    assert set(_records(tmp_path)) <= set(_records(undisturbed))
    assert _drive(tmp_path) == 1
    _check_against(tmp_path, undisturbed)


class _Told:
    def __init__(self) -> None:
        self.starts: list[tuple[str, int]] = []

    def started(self, cell, attempt):
        self.starts.append((cell.label, attempt))

    def ended(self, cell, record):
        pass


def _run(folder, cells, *, resume=False, **fields):
    folder.mkdir(exist_ok=True)
    sweep = sweep_of(cells, **fields)
    told = _Told()
    planned = plan(sweep, folder)
    done = run_sweep(sweep, planned, folder / "sweep", command=COMMAND, watcher=told, resume=resume)
    return done, told


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    return tmp_path


def test_a_cell_that_failed_is_tried_again_as_often_as_was_asked(here):
    cells = [{"do": "flaky"}, {"do": "raise"}, {"do": "refuse"}]
    done, told = _run(here, cells, retry={"error": 2})
    flaky, failing, refused = done.records.values()
    assert (flaky.status, [a.status for a in flaky.attempts]) == ("ok", ["error", "ok"])
    assert (failing.status, [a.folder for a in failing.attempts]) == ("error", ["attempt-1", "attempt-2", "attempt-3"])
    assert (refused.status, refused.reason) == ("error", "ConfigError: data.batch_size is wrong")
    assert len(refused.attempts) == 1  # wrong input stays wrong
    assert told.starts == [("do=flaky", 1), ("do=flaky", 2), *(("do=raise", n) for n in (1, 2, 3)), ("do=refuse", 1)]


def test_on_resume_what_is_ok_stays_and_what_is_not_in_skip_runs_again(here):
    cells = [{"do": "ok"}, {"do": "raise"}, {"do": "out_of_memory"}]
    first, _ = _run(here, cells)
    again, told = _run(here, cells, resume=True)
    assert told.starts == []
    assert again.records == first.records
    third, told = _run(here, cells, resume=True, skip=["out_of_memory"])
    assert told.starts == [("do=raise", 2)]
    assert [len(r.attempts) for r in third.records.values()] == [1, 2, 1]
    assert (here / "sweep/cells" / list(third.records)[1] / "attempt-1").is_dir()


def test_a_resumed_sweep_with_more_cells_runs_those(here):
    _run(here, [{"do": "ok"}])
    done, told = _run(here, [{"do": "ok"}, {"do": "ok", "size": 2}], resume=True)
    assert told.starts == [("do=ok size=2", 1)]
    assert (len(done.records), done.exit_code) == (2, 0)


def test_a_damaged_record_is_none_and_its_cell_runs_again(here):
    done, _ = _run(here, [{"do": "ok"}])
    (key,) = done.records
    (here / "sweep/cells" / key / "record.json").write_text('{"kind": "RunRecord", ')
    done, told = _run(here, [{"do": "ok"}], resume=True)
    assert told.starts == [("do=ok", 1)]
    assert done.records[key].status == "ok"


def test_pruning_can_be_turned_off(here):
    cells = [{"do": "out_of_memory", "size": 1}, {"do": "out_of_memory", "size": 2}]
    done, _ = _run(here, cells, prune=False, prune_fields=["size"])
    assert [r.status for r in done.records.values()] == ["out_of_memory"] * 2


def test_a_place_that_a_cell_had_is_free_for_the_next(here):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    cells = [{"do": "takes_a_port", "port": port, "size": size} for size in (1, 2, 3)]
    done, _ = _run(here, cells)
    assert [r.status for r in done.records.values()] == ["ok"] * 3


def test_cells_at_once_have_devices_of_their_own(here):
    cells = [{"do": "sees_devices", "size": size} for size in range(4)]
    done, _ = _run(here, cells, at_once=2, devices=["0,1", "2,3"])
    assert [r.status for r in done.records.values()] == ["ok"] * 4
    seen = [(here / "sweep/cells" / key / "attempt-1/devices").read_text() for key in done.records]
    assert set(seen) == {"0,1", "2,3"}
    assert seen[0] != seen[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_ends_the_sweep_in_order_and_resume_goes_on(here, number):
    argv = [sys.executable, "-m", "tests.helpers.sweep_driver", str(here), "8"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(_records(here)) >= 2, "two records")
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, err
    before = _records(here)
    assert 2 <= len(before) < 8
    assert list(here.glob("sweep/cells/*/running.json")) == []
    notes = [json.loads(file.read_text()) for file in (here / "pids").glob("*.json")]
    assert [note for note in notes if is_alive(note)] == []
    if number == signal.SIGINT:
        assert _drive(here, count=8) == 1
        after = _records(here)
        _check_records(after, count=8)
        assert {key: after[key] for key in before} == before


def test_one_sweep_at_a_time_has_the_folder(here):
    from lowtide.errors import InputError
    from lowtide.sweeps import Store

    sweep = sweep_of([{"do": "ok"}])
    cells = plan(sweep, here)
    store = Store(here / "sweep")
    store.open("stubs", cells, resume=False)
    with pytest.raises(InputError, match="being written by another process"):
        run_sweep(
            sweep,
            cells,
            here / "sweep",
            command=COMMAND,
            watcher=PlainProgress(Tally(1, {}, 1), sys.stdout),
            resume=True,
        )
    store.close()
    with pytest.raises(InputError, match="go on with --resume"):
        Store(here / "sweep").open("stubs", cells, resume=False)


def test_as_an_array_job_every_cell_is_a_job_and_has_the_same_record(here):
    pytest.importorskip("submitit", reason="needs submitit")
    from lowtide.sweeps import submit

    cells = [{"do": "ok"}, {"do": "raise"}, {"do": "killed"}]
    sweep = sweep_of(cells)
    planned = plan(sweep, here)
    submitted = submit(sweep, planned, here / "sweep", command=COMMAND, cluster="local")
    assert len(submitted.job_ids) == 3
    done = submitted.wait()
    submitted.close()
    assert [(r.status, r.reason) for r in done.records.values()] == [EXPECTED[c["do"]] for c in cells]
    assert done.exit_code == 1
    plain, _ = _run(here / "plain", cells)
    assert [facts(r) for r in plain.records.values()] == [facts(r) for r in done.records.values()]
    again = submit(sweep, planned, here / "sweep", command=COMMAND, cluster="local", resume=True)
    assert again.job_ids == []
    again.close()


def test_a_cell_that_a_job_runs_is_left_alone(here):
    from lowtide.errors import InputError
    from lowtide.sweeps import Store

    sweep = sweep_of([{"do": "ok"}])
    (cell,) = plan(sweep, here)
    (here / "sweep" / "cells").mkdir(parents=True)
    job = Store(here / "sweep", job="node7 job 12")
    job.prepare(cell, 1)
    job.note_running(cell, "mark", here / "scratch")
    with pytest.raises(InputError, match="runs in node7 job 12"):
        _run(here, [{"do": "ok"}], resume=True)
