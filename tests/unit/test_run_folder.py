"""The run folder, and what run.json truthfully says."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lowtide.errors import ConfigError, InputError, RunOutOfMemoryError, StoppedError, UserError
from lowtide.system.files import write_text
from lowtide.system.processes import identify
from lowtide.system.run_state import RUN_FILE, find_latest, finish_run, read_run
from lowtide.training.environment import describe_environment
from lowtide.training.run_folder import RunFolder

RESOLVED = {"run": {"name": "demo", "seed": 1}, "optimizer": {"betas": (0.9, 0.95), "lr": 1e-4}, "path": Path("a/b")}


def make(runs: Path, experiment_id: str = "id-1", name: str = "demo", **resolved: object) -> RunFolder:
    return RunFolder.create(
        runs, experiment_id=experiment_id, name=name, given="run: {}  # mine\n", resolved={**RESOLVED, **resolved}
    )


def record_of(folder: Path) -> dict:
    return json.loads((folder / RUN_FILE).read_text())


def forge(folder: Path, **fields: object) -> None:
    """Write a run.json as another process would have left it."""
    (folder / RUN_FILE).write_text(json.dumps({**record_of(folder), **fields}))


def gone_process() -> dict:
    """The identity of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told = identify(child.pid)
    child.communicate()
    return told


def test_a_new_run_has_its_config_its_environment_and_runs(tmp_path):
    folder = make(tmp_path / "deep" / "runs").path
    assert (folder / "config.yaml").read_text() == "run: {}  # mine\n"
    resolved = yaml.safe_load((folder / "config.resolved.yaml").read_text())
    assert resolved["optimizer"] == {"betas": [0.9, 0.95], "lr": 1e-4}
    assert resolved["path"] == "a/b"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["world_size"] == 1
    assert environment["packages"]["pydantic"]
    state = read_run(folder)
    assert (state.status, state.verified, state.name, state.experiment_id) == ("running", True, "demo", "id-1")
    assert state.record["process"]["pid"] == os.getpid()
    assert not list(folder.glob(".*"))


def test_an_id_that_is_taken_or_not_legal_is_refused(tmp_path):
    made = make(tmp_path)
    before = sorted(p.name for p in made.path.iterdir())
    with pytest.raises(ConfigError, match=r"exists already.*--resume"):
        make(tmp_path)
    assert sorted(p.name for p in made.path.iterdir()) == before
    with pytest.raises(ConfigError, match="not legal"):
        make(tmp_path, "../outside")
    assert [p.name for p in tmp_path.iterdir()] == ["id-1"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (None, "done", 0),
        (UserError("wrong"), "failed", 2),
        (ValueError("bug"), "failed", 1),
        (RunOutOfMemoryError("too much"), "out_of_memory", 1),
        (StoppedError("SIGTERM"), "stopped", 75),
    ],
)
def test_the_end_is_written_with_its_error(tmp_path, error, status, code):
    made = make(tmp_path)
    made.finish(error)
    state = read_run(made.path)
    assert (state.status, state.exit_code) == (status, code)
    assert state.ended_at is not None
    if error is not None:
        assert (state.error_type, state.error_message) == (type(error).__name__, str(error))


def test_a_run_whose_process_is_gone_is_lost_though_it_says_running(tmp_path):
    made = make(tmp_path)
    told = gone_process()
    forge(made.path, process=told)
    state = read_run(made.path)
    assert (state.status, state.verified, state.exit_code) == ("lost", True, None)
    assert f"process {told['pid']}" in str(state.error_message)
    assert record_of(made.path)["status"] == "running"  # reading changes nothing


@pytest.mark.parametrize(
    ("change", "status", "verified"),
    [
        ({"start_ticks": 1}, "lost", True),  # the id was used again
        ({"boot_id": "earlier"}, "lost", True),
        ({"hostname": "elsewhere"}, "running", False),
        ({"pid_namespace": "pid:[1]"}, "running", False),
    ],
)
def test_a_process_is_known_by_its_start_machine_and_boot(tmp_path, change, status, verified):
    made = make(tmp_path)
    forge(made.path, process={**identify(), **change})
    state = read_run(made.path)
    assert (state.status, state.verified) == (status, verified)


def test_a_zombie_is_gone(tmp_path):
    made = make(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", ""])
    told = identify(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    forge(made.path, process=told)
    assert read_run(made.path).status == "lost"
    child.wait()


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"status": "odd"}'])
def test_no_run_or_a_damaged_one_is_the_users_error(tmp_path, text):
    if text is not None:
        (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(InputError, match=r"run\.json"):
        read_run(tmp_path)


def test_going_on_keeps_the_id_and_records_what_changed(tmp_path):
    make(tmp_path).finish(StoppedError("SIGTERM"))
    changed = {**RESOLVED, "optimizer": {"betas": (0.9, 0.99), "lr": 1e-4}, "new": 1}
    again = RunFolder.resume(tmp_path / "id-1", given="run: {}\n", resolved=changed)
    assert (again.experiment_id, again.resumed, again.changed) == ("id-1", True, ("new", "optimizer.betas"))
    record = record_of(again.path)
    assert (record["status"], record["error"], record["ended_at"]) == ("running", None, None)
    assert [attempt["changed"] for attempt in record["attempts"]] == [
        {},
        {"optimizer.betas": {"before": [0.9, 0.95], "after": [0.9, 0.99]}, "new": {"before": None, "after": 1}},
    ]
    assert yaml.safe_load((again.path / "config.resolved.yaml").read_text())["new"] == 1
    same = None
    again.finish(None)
    same = RunFolder.resume(again.path, given="run: {}\n", resolved=changed)
    assert same.changed == ()


def test_the_config_of_the_attempt_before_stays_where_fields_change(tmp_path):
    folder = make(tmp_path)
    folder.finish(UserError("stop"))
    before = (folder.path / "config.yaml").read_text(), (folder.path / "config.resolved.yaml").read_text()
    again = RunFolder.resume(folder.path, given="run: {}  # other\n", resolved={**RESOLVED, "path": Path("c")})
    assert again.changed == ("path",)
    kept = folder.path / "config.attempt1.yaml", folder.path / "config.attempt1.resolved.yaml"
    assert tuple(file.read_text() for file in kept) == before
    again.finish()
    RunFolder.resume(folder.path, given="run: {}  # other\n", resolved={**RESOLVED, "path": Path("c")})
    assert not list(folder.path.glob("config.attempt2.*")), "nothing changed, nothing to keep"


def test_a_run_that_still_runs_is_not_resumed(tmp_path):
    made = make(tmp_path)
    with pytest.raises(InputError, match=f"written by process {os.getpid()}"):
        RunFolder.resume(made.path, given="", resolved=RESOLVED)
    forge(made.path, process=gone_process())
    assert RunFolder.resume(made.path, given="", resolved=RESOLVED).resumed


def test_resuming_what_is_no_run_is_the_users_error(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        RunFolder.resume(tmp_path / "none", given="", resolved={})


def test_the_latest_run_of_a_name_is_found(tmp_path):
    assert find_latest(tmp_path / "runs", "demo") is None
    for number, name in enumerate(["demo", "demo", "other"]):
        make(tmp_path, f"id-{number}", name)
        forge(tmp_path / f"id-{number}", started_at=f"2026-01-0{number + 1}T00:00:00.000000Z")
    forge(tmp_path / "id-0", started_at="2026-01-03T00:00:00.000000Z")
    (tmp_path / "half").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / RUN_FILE).write_text("{")
    found = find_latest(tmp_path, "demo")
    assert found is not None
    assert found.experiment_id == "id-0"
    assert find_latest(tmp_path, "nothing") is None


def test_more_can_be_written_beside_the_status(tmp_path):
    made = make(tmp_path)
    made.update(summary={"loss": 1.5})
    made.finish()
    assert record_of(made.path)["summary"] == {"loss": 1.5}


def test_a_rank_that_is_not_main_writes_only_its_log(tmp_path):
    made = make(tmp_path)
    before = (made.path / RUN_FILE).read_text()
    other = RunFolder(made.path, rank=1)
    other.update(summary={})
    other.finish(ValueError("x"))
    assert (made.path / RUN_FILE).read_text() == before
    with other.logging() as file:
        logging.getLogger("lowtide.part").info("hello")
    assert file == made.path / "logs" / "rank1.log"
    assert "INFO lowtide.part: hello" in file.read_text()


def test_an_error_that_passes_is_in_the_log_and_logging_is_put_back(tmp_path):
    made = make(tmp_path)
    logger = logging.getLogger("lowtide")
    before = (logger.level, list(logger.handlers))
    with pytest.raises(ValueError, match="bug"), made.logging() as file:
        raise ValueError("bug")
    assert (logger.level, list(logger.handlers)) == before
    assert "Traceback" in file.read_text()
    assert "ValueError: bug" in file.read_text()


def test_only_listed_variables_are_written():
    environ = {"OMP_NUM_THREADS": "2", "WANDB_API_KEY": "secret", "HF_TOKEN": "secret", "NCCL_SECRET": "secret"}
    text = json.dumps(describe_environment(world_size=2, environ=environ))
    assert "secret" not in text
    assert '"OMP_NUM_THREADS": "2"' in text


def test_the_end_survives_a_write_that_fails(tmp_path, monkeypatch):
    made = make(tmp_path)
    before = (made.path / RUN_FILE).read_text()

    def fail(_: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        finish_run(made.path, status="done", exit_code=0)
    assert (made.path / RUN_FILE).read_text() == before
    assert not list(made.path.glob(".*"))


def test_writing_replaces_in_one_step(tmp_path):
    file = tmp_path / "x"
    file.write_text("old")
    with file.open() as reader:
        write_text(file, "new \ud800")
        assert reader.read() == "old"
    assert file.read_text() == "new \\ud800"
