"""Runs that go wrong: one clear message, a true run.json, the exit code, nobody left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lowtide.system.processes import identify
from tests.e2e.command import TINY, Ended, lowtide, started, write
from tests.helpers.launched import all_gone


def custom(target: str, **fields: int) -> str:
    """The tiny config with random data that makes trouble."""
    lines = [line for line in TINY.splitlines() if not line.startswith("data:")]
    given = ", ".join(f"{name}: {value}" for name, value in fields.items())
    data = f"data: {{kind: custom, target: 'tests.e2e.parts:{target}', config: {{{given}}}}}"
    return "\n".join([*lines, data]) + "\n"


def _one_message(ended: Ended, *, code: int) -> str:
    """Check that there is one message, without a traceback, and return it."""
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    told = [line for line in ended.err.splitlines() if line.startswith(("error: ", "lowtide: "))]
    assert len(told) == 1, ended.err
    return told[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(tmp_path: Path, rank: int) -> None:
    with started(tmp_path, "train", write(tmp_path), "--set", "training.steps=4000") as command:
        command.wait_for_step(3)
        told = [identify(command.rank_pid(each)) for each in (0, 1)]
        os.kill(told[rank]["pid"], signal.SIGKILL)
        ended = command.end()
    message = _one_message(ended, code=1)
    assert message.startswith(f"error: rank {rank} was killed by signal 9 (SIGKILL)")
    state = ended.state
    assert (state.status, state.exit_code, state.error_type) == ("failed", 1, "RankKilled")
    assert state.record["error"]["rank"] == rank
    assert state.record.get("summary") is None
    all_gone(told)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_allocation_is_out_of_memory(tmp_path: Path, rank: int) -> None:
    ended = lowtide(tmp_path, "train", write(tmp_path, custom("Hungry", rank=rank)), "--json")
    message = _one_message(ended, code=1)
    assert message.startswith(f"error: out of memory on cpu (rank {rank} of 2) during step 3: asked for ")
    state = ended.state
    assert (state.status, state.exit_code, state.error_type) == ("out_of_memory", 1, "RunOutOfMemoryError")
    assert state.record["error"]["rank"] == rank
    document = ended.document()
    assert (document["status"], document["exit_code"], document["summary"]) == ("out_of_memory", 1, None)
    all_gone([state.record["process"]])


@pytest.mark.parametrize(
    ("target", "status", "kind"),
    [("Broken", "failed", "ZeroDivisionError"), ("Hungry", "out_of_memory", "RunOutOfMemoryError")],
)
def test_under_a_foreign_torchrun_run_json_names_the_rank_that_began_it(
    tmp_path: Path, target: str, status: str, kind: str
) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lowtide")
    ended = lowtide(tmp_path, "train", write(tmp_path, custom(target)), module=torchrun)
    assert ended.code != 0
    state = ended.state
    assert (state.status, state.exit_code, state.error_type) == (status, 1, kind)
    assert state.record["error"]["rank"] == 1
    all_gone([state.record["process"]])


def test_an_operator_that_never_runs_is_named_and_the_code_is_2(tmp_path: Path) -> None:
    config = Path(__file__).parents[1] / "data" / "hf" / "gpt2" / "config.json"
    text = TINY.replace("{kind: decoder, dim: 32, layers: 2, heads: 2}", f"{{kind: huggingface, config: {config}}}")
    ended = lowtide(tmp_path, "train", write(tmp_path, text))
    message = _one_message(ended, code=2)
    assert "aten.mm" in message
    assert "aten.addmm" in message
    state = ended.state
    assert (state.status, state.exit_code, state.error_type) == ("failed", 2, "NothingMatchedError")


def test_compile_without_a_compiler_is_said_before_anything_is_built(tmp_path: Path) -> None:
    arguments = ["--set", "compile=true", "--nproc", "1"]
    ended = lowtide(tmp_path, "train", write(tmp_path), *arguments, environ={"CXX": "/nonexistent/g++"})
    message = _one_message(ended, code=2)
    assert message.startswith("error: compile: true needs a C++ compiler on a CPU")
    assert (ended.state.status, ended.state.exit_code, ended.state.error_type) == ("failed", 2, "InputError")


def test_a_missing_config_starts_nothing(tmp_path: Path) -> None:
    ended = lowtide(tmp_path, "train", "nowhere.yaml")
    assert _one_message(ended, code=2).startswith("lowtide: nowhere.yaml: no such file.")
    assert ended.runs == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "training.stps=3"], "unknown key"),
        (["--nproc", "0"], "at least 1"),
        (["--experiment-id", "../else"], "is not legal"),
    ],
    ids=["an unknown key", "no processes", "an id that leaves the folder"],
)
def test_a_wrong_command_starts_nothing(tmp_path: Path, arguments: list[str], said: str) -> None:
    ended = lowtide(tmp_path, "train", write(tmp_path), *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert ended.runs == []
