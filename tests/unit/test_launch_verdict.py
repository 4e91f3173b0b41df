"""Many reports, one cause: pure judgements, and what the launcher decides before it starts anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lowtide.errors import ConfigError
from lowtide.training.launch import choose_nproc, under_torchrun
from lowtide.training.verdict import judge


def ended(rank: int, *, at: float = 0.0, error: str | None = None, message: str = "", **fields: object) -> dict:
    told = None
    if error is not None:
        flags = {"ours": False, "user": False, "elsewhere": False, "traceback": "Traceback\n"}
        told = {"type": error, "message": message, **flags}
        told |= {k: fields.pop(k) for k in list(fields) if k in told}
    report = {"rank": rank, "pid": 1, "ended": True, "status": "failed" if error else "done", "at": at, "error": told}
    return {**report, "exit_code": 1 if error else 0, **fields}


def begun(rank: int) -> dict:
    return {"rank": rank, "pid": 1, "ended": False}


def failed(*deaths: tuple[int, int, int]) -> dict:
    return {"failures": [{"rank": r, "exit_code": c, "pid": 1, "at": at} for r, c, at in deaths]}


def test_all_done_is_0_also_when_a_rank_crashed_while_leaving():
    reports = {0: ended(0), 1: ended(1)}
    assert judge(reports, agent={}, nproc=2).exit_code == 0
    assert judge(reports, agent=failed((1, -11, 0)), nproc=2).exit_code == 0


@pytest.mark.parametrize("code", [2, 3])
def test_an_error_of_ours_keeps_its_code_and_message(code):
    wrong = {"error": "ConfigError", "message": "x must be 1", "ours": True, "exit_code": code}
    found = judge({0: ended(0, **wrong), 1: ended(1, **wrong, elsewhere=True)}, agent=failed((0, code, 0)), nproc=2)
    assert (found.exit_code, found.message, found.rank, found.traceback) == (code, "x must be 1", 0, "")


def test_a_killed_rank_comes_before_what_its_neighbour_says():
    told = ended(0, error="RuntimeError", message="Connection closed by peer [127.0.0.1]:1")
    found = judge({0: told, 1: begun(1)}, agent=failed((0, 1, 5), (1, -9, 5)), nproc=2)
    assert (found.exit_code, found.rank, found.error_type) == (1, 1, "RankKilled")
    assert found.message.startswith("rank 1 was killed by signal 9 (SIGKILL); out of memory on the host")


def test_a_rank_that_the_agent_ended_is_not_the_cause():
    told = ended(0, error="ValueError", message="my bug")
    for death in ((1, -15, 5), (1, -9, 35)):
        found = judge({0: told, 1: begun(1)}, agent=failed((0, 1, 5), death), nproc=2)
        assert (found.rank, found.message) == (0, "rank 0 failed: ValueError: my bug")
        assert found.traceback == "Traceback\n"


def test_the_first_own_error_is_the_cause_not_the_lost_connection():
    lost = ended(0, at=1.0, error="RuntimeError", message="[gloo] Connection closed by peer")
    oom = ended(1, at=1.1, error="RunOutOfMemoryError", message="no memory", ours=True, status="out_of_memory")
    found = judge({0: lost, 1: oom}, agent=failed((0, 1, 1), (1, 1, 1)), nproc=2)
    assert (found.rank, found.status, found.exit_code, found.message) == (1, "out_of_memory", 1, "no memory")
    both = {0: ended(0, at=2.0, error="KeyError", message="b"), 1: ended(1, at=1.0, error="KeyError", message="a")}
    assert judge(both, agent={}, nproc=2).rank == 1


def test_a_neighbours_loss_alone_is_still_told():
    lost = ended(0, error="DistNetworkError", message="Connection reset by peer")
    found = judge({0: lost, 1: begun(1)}, agent=failed((0, 1, 0), (1, -15, 0)), nproc=2)
    assert (found.exit_code, found.rank) == (1, 0)


def test_stopped_after_saving_is_75_also_when_the_agent_ended_the_slower_rank():
    stop = {"error": "StoppedError", "message": "saved at step 3", "ours": True, "exit_code": 75, "status": "stopped"}
    both = {0: ended(0, **stop), 1: ended(1, **stop)}
    assert judge(both, agent={}, nproc=2, stopped_by="SIGTERM").exit_code == 75
    found = judge({0: ended(0, **stop), 1: begun(1)}, agent=failed((1, -15, 0)), nproc=2, stopped_by="SIGTERM")
    assert (found.exit_code, found.status, found.message) == (75, "stopped", "saved at step 3")


def test_a_stop_that_failed_while_saving_is_not_75():
    stop = {"error": "StoppedError", "message": "saved", "ours": True, "exit_code": 75, "status": "stopped"}
    bad = ended(1, error="OSError", message="no space left")
    found = judge({0: ended(0, **stop), 1: bad}, agent=failed((1, 1, 0)), nproc=2, stopped_by="SIGTERM")
    assert (found.exit_code, found.rank) == (1, 1)


def test_a_stop_before_anything_was_saved_says_so():
    found = judge({}, agent={"failures": [], "stopped": "15"}, nproc=2, stopped_by="SIGTERM")
    assert (found.exit_code, found.message) == (1, "ended by SIGTERM before anything could be saved")
    interrupted = ended(0, error="KeyboardInterrupt", message="KeyboardInterrupt()")
    found = judge({0: interrupted, 1: begun(1)}, agent=failed((0, 1, 0)), nproc=2, stopped_by="SIGINT")
    assert found.message == "ended by SIGINT before anything could be saved"
    found = judge({0: begun(0)}, agent={}, nproc=1, stopped_by="SIGTERM", gave_up=True)
    assert (found.exit_code, found.message) == (1, "killed: it did not stop in time after SIGTERM")


def test_a_rank_that_left_without_a_word_is_named():
    found = judge({0: ended(0), 1: begun(1)}, agent=failed((1, 3, 0)), nproc=2)
    assert (found.exit_code, found.message) == (1, "rank 1 exited with code 3 without a word")
    found = judge({0: ended(0), 1: begun(1)}, agent={}, nproc=2)
    assert (found.exit_code, found.rank) == (1, 1)
    found = judge({}, agent=failed((0, 1, 0), (1, 1, 0)), nproc=2)
    assert found.message == "rank 0 exited with code 1 before it had begun; its own output is above"


def test_an_agent_that_broke_says_how():
    found = judge({}, agent={"failures": [], "broken": "Traceback: no store\n"}, nproc=2)
    assert (found.exit_code, found.error_type, found.traceback) == (1, "LaunchFailed", "Traceback: no store\n")


def test_where_we_run_is_read_from_the_environment():
    assert not under_torchrun({})
    assert not under_torchrun({"WORLD_SIZE": "2"})
    assert under_torchrun({"RANK": "0", "WORLD_SIZE": "1"})
    assert under_torchrun({"TORCHELASTIC_RUN_ID": "x"})


def test_the_number_of_processes(monkeypatch):
    assert choose_nproc(3) == 3
    for present, chosen in ((0, 2), (1, 1), (8, 8)):
        monkeypatch.setattr("lowtide.training.launch.count_gpus", lambda n=present: n)
        assert choose_nproc(None) == chosen
    with pytest.raises(ConfigError, match="at least 1"):
        choose_nproc(0)


@pytest.mark.parametrize(
    "module", ["launch", "agent", "run_folder", "rank_status", "ids", "mesh", "events", "tracking"]
)
def test_what_launchers_sweeps_and_reports_read_imports_no_torch(module):
    code = f"import sys, lowtide.training.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
