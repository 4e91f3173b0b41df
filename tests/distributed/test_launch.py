"""The launcher with real processes: one exit code, one message, a true run.json, and nobody left behind."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.system.processes import identify
from lowtide.system.run_state import read_run
from tests.helpers.launched import PATIENCE_S, ROOT, all_gone, launched, wait_for

__all__ = ["launched"]


def test_a_run_that_is_done_is_0_and_says_nothing_more(launched):
    job = launched("done")
    code, out, err = job.end()
    assert (code, out, err) == (0, "progress of rank 0\n", "")
    assert read_run(job.folder / "runs" / "id-1").status == "done"
    assert job.names() == ["agent", "rank0", "rank1"]


def test_on_a_terminal_rank_0_writes_to_it(tmp_path):
    (tmp_path / "pids").mkdir()
    leader, follower = pty.openpty()
    argv = [sys.executable, "-m", "tests.helpers.rank_programs", "done", str(tmp_path), "1"]
    process = subprocess.Popen(argv, cwd=ROOT, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    text = ""
    with contextlib.suppress(OSError):
        while more := os.read(leader, 4096):
            text += more.decode()
    os.close(leader)
    assert process.wait(PATIENCE_S) == 0
    assert "progress of rank 0" in text
    assert (tmp_path / "tty0").read_text() == "True True False"


def test_an_error_of_the_user_is_2_and_one_message_not_one_a_rank(launched):
    code, out, err = launched("wrong_config").end()
    assert (code, out) == (2, "")
    assert err == "error: data.batch_size is -1, it must be at least 1\n"


def test_a_killed_rank_is_named_with_its_cause_and_run_json_is_corrected(launched):
    job = launched("killed_1")
    code, _, err = job.end()
    assert code == 1
    assert "error: rank 1 was killed by signal 9 (SIGKILL); out of memory on the host is a common cause" in err
    assert "Traceback" not in err
    state = read_run(job.folder / "runs" / "id-1")
    assert (state.status, state.exit_code, state.error_type) == ("failed", 1, "RankKilled")
    assert state.record["error"]["rank"] == 1
    all_gone([identify(pid) for pid in job.pids()])


def test_a_failed_allocation_on_another_rank_is_the_runs_status(launched):
    job = launched("out_of_memory_1")
    code, _, err = job.end()
    assert code == 1
    assert "out of memory on rank 1" in err
    assert "Connection closed" not in err
    state = read_run(job.folder / "runs" / "id-1")
    assert (state.status, state.error_type) == ("out_of_memory", "RunOutOfMemoryError")


def test_a_bug_on_one_rank_shows_its_traceback_once_and_ends_the_others(launched):
    job = launched("bug_1")
    code, _, err = job.end()
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.endswith("error: rank 1 failed: ZeroDivisionError: a bug of its own\n")
    all_gone([identify(pid) for pid in job.pids()])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_is_passed_on_once_and_every_rank_may_save(launched, number):
    job = launched("save_when_told")
    job.ready()
    job.process.send_signal(number)
    code, _, err = job.end()
    assert (code, err.splitlines()[0]) == (75, f"stopped: {number.name} came; saved at step 7")
    assert [(job.folder / f"saved{rank}").read_text() for rank in (0, 1)] == [number.name] * 2
    state = read_run(job.folder / "runs" / "id-1")
    assert (state.status, state.exit_code) == ("stopped", 75)


def test_ranks_that_do_not_stop_are_ended_after_the_grace(launched):
    job = launched("stubborn", TEST_GRACE_S="0.2")
    job.ready()
    told = job.identities("agent", "rank0", "rank1")
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.end()
    assert (code, err) == (1, "error: killed: it did not stop in time after SIGTERM\n")
    all_gone(told)


def test_ctrl_c_twice_ends_at_once(launched):
    job = launched("stubborn", TEST_GRACE_S="3600")
    job.ready()
    told = job.identities("agent", "rank0", "rank1")
    while job.process.poll() is None:  # two that come at the same moment are one to the kernel
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert job.end()[0] == 1
    all_gone(told)


def test_a_signal_before_any_rank_is_there_ends_the_launch(launched):
    job = launched("sleep_alone")
    wait_for(lambda: _has_child(job.process.pid), "the agent")
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.end()
    assert (code, err) == (1, "error: ended by SIGTERM before anything could be saved\n")
    all_gone([identify(pid) for pid in job.pids()])


def _has_child(pid: int) -> bool:
    return any(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def test_ranks_with_a_real_group_find_each_other(launched):
    job = launched("group")
    assert job.end() == (0, "sum 3.0, said by rank 0\n", "")


def test_a_rank_killed_inside_a_collective_is_the_cause_not_the_lost_connection(launched):
    job = launched("killed_in_group")
    code, _, err = job.end()
    assert code == 1
    assert err.startswith("error: rank 1 was killed by signal 9 (SIGKILL)")
    assert "Traceback" not in err
    all_gone([identify(pid) for pid in job.pids()])
