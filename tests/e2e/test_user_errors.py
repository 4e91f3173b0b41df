"""What the user got wrong and only a rank can see: the same error of the user on both ranks, and run.json says so.

In the pool of workers, where a run starts in milliseconds; that these errors become exit code 2 and one message of the
command is shown in test_faults.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import write

HF = Path(__file__).parents[1] / "data" / "hf"
RunOn = Callable[..., list[Any]]


def train(path: str, overrides: list[str], experiment_id: str | None, resume: str | None) -> dict[str, Any]:
    """Be one rank: what the run returned, or the error."""
    from lowtide.errors import LowtideError
    from lowtide.training import load_config, run

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            summary = run(load_config(path, overrides), experiment_id, resume=resume, json_output=True)
    except LowtideError as error:
        return {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
    return {"summary": summary.as_json(), "exit_code": 0}


@pytest.fixture
def attempt(run_on: RunOn, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Train on two ranks in a folder of the test's own; both must end alike."""
    config = str(tmp_path / write(tmp_path))

    def act(*overrides: str, experiment_id: str | None = None, resume: str | None = None) -> dict[str, Any]:
        given = [f"run.directory={tmp_path / 'runs'}", "training.steps=3", *overrides]
        first, second = run_on(2, train, config, given, experiment_id, resume, group=False)
        if first["exit_code"]:
            assert second == first
        else:
            assert second["summary"]["experiment_id"] == first["summary"]["experiment_id"]
        return first

    return act


def _record(folder: Path) -> dict[str, Any]:
    (only,) = (folder / "runs").glob("*/run.json")
    return json.loads(only.read_text())


@pytest.mark.parametrize(
    ("overrides", "kind", "said"),
    [
        (["policy.save=[aten.mmm]"], "NothingMatchedError", ["aten.mmm", "aten.mm"]),
        (["policy.layers=blocks.*"], "NothingMatchedError", ["blocks.*", "layers"]),
        (["policy.save=[sdpa, aten.addmm]"], "NothingMatchedError", ["aten.addmm", "aten.mm"]),
        (["model={kind: huggingface, config: nowhere/config.json}"], "InputError", ["nowhere/config.json"]),
        (["model={kind: huggingface, directory: nowhere}"], "InputError", ["nowhere"]),
        (["model.vocab_size=100"], "ConfigError", ["255", "100 rows", "256"]),
        (["data.sequence_length=1000000"], "InputError", ["1000000", "too long", "docstrings: true"]),
        (["sharding.kind=none"], "ConfigError", ["sharding.kind is none", "--nproc 1", "fsdp2"]),
    ],
    ids=[
        "an unknown operator",
        "layers that match nothing",
        "an operator that never runs",
        "a missing model config",
        "a missing model folder",
        "a vocabulary too small",
        "too little text",
        "processes that share nothing",
    ],
)
def test_it_is_named_on_both_ranks(
    attempt: Callable[..., dict[str, Any]], tmp_path: Path, overrides: list[str], kind: str, said: list[str]
) -> None:
    ended = attempt(*overrides)
    assert ended["exit_code"] == 2
    assert ended["kind"] == kind, ended["message"]
    for text in said:
        assert text in ended["message"]
    if list(tmp_path.glob("runs/*")):
        record = _record(tmp_path)
        assert (record["status"], record["exit_code"], record["error"]["type"]) == ("failed", 2, kind)
        assert record["error"]["message"] == ended["message"]


def test_a_folder_for_runs_that_cannot_be_written(attempt: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = attempt(f"run.directory={tmp_path / 'file' / 'runs'}")
    assert (ended["exit_code"], ended["kind"]) == (2, "InputError")
    assert "set run.directory" in ended["message"]


def test_a_folder_that_is_no_run_cannot_be_resumed(attempt: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    ended = attempt(resume=str(tmp_path / "foreign"))
    assert (ended["exit_code"], ended["kind"]) == (2, "InputError")
    assert str(tmp_path / "foreign" / "run.json") in ended["message"]


def test_the_id_of_another_run_is_refused_in_both_ways(attempt: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert attempt(experiment_id="one")["summary"]["experiment_id"] == "one"
    taken = attempt(experiment_id="one")
    assert taken["exit_code"] == 2
    assert "exists already" in taken["message"]
    other = attempt(experiment_id="two", resume="auto")
    assert other["exit_code"] == 2
    assert "leave one of them out" in other["message"]
    assert _record(tmp_path)["status"] == "done"


def test_a_run_that_is_done_is_not_trained_again_and_goes_on_when_given_more_steps(
    attempt: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    attempt()
    again = attempt(resume="auto")["summary"]
    assert (again["steps"], again["loss_last"]) == (3, None)
    more = attempt("training.steps=5", resume=str(tmp_path / "runs" / again["experiment_id"]))["summary"]
    assert more["experiment_id"] == again["experiment_id"]
    assert more["steps"] == 5
    changed = [list(attempt["changed"]) for attempt in _record(tmp_path)["attempts"]]
    assert changed == [[], [], ["training.steps"]]


def test_another_model_cannot_take_over_a_run(attempt: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    attempt()
    ended = attempt("model.layers=3", resume="auto")
    assert (ended["exit_code"], ended["kind"]) == (2, "InputError")
    assert "is of another model" in ended["message"]


def test_a_loss_that_is_no_number_is_null_with_a_mark(attempt: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    summary = attempt("optimizer.lr=1.0e+30", "schedule.kind=constant", "training.steps=4")["summary"]
    assert summary["loss_last"] is None
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["loss"] is None
    assert "loss" in last["non_finite"]
    assert _record(tmp_path)["status"] == "done"
