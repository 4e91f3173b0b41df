"""Runs that go well: what they leave, trackers, ids, resuming, a foreign torchrun, one process."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.e2e.command import TINY, Ended, lowtide, records, started, write
from tests.helpers.launched import all_gone

STEPS = 40
TRACKERS = ["{kind: custom, target: 'tests.e2e.parts:Failing'}", "{kind: console, every_s: 0}", "{kind: jsonl}"]
OPTIONAL = {"tensorboard": "{kind: tensorboard}", "wandb": "{kind: wandb, wait_s: 20}"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run from its first step to its last, with every tracker, one of which breaks."""
    folder = tmp_path_factory.mktemp("whole")
    trackers = [*TRACKERS, *(text for name, text in OPTIONAL.items() if find_spec(name))]
    arguments = ["--set", f"logging.trackers=[{', '.join(trackers)}]", "--experiment-id", "given-1", "--json"]
    return lowtide(folder, "train", write(folder), *arguments)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The same run, told to stop in mid-training by a signal to the launcher."""
    folder = tmp_path_factory.mktemp("stopped")
    with started(folder, "train", write(folder), "--resume", "auto") as command:
        command.wait_for_step(3)
        command.process.send_signal(signal.SIGTERM)
        return command.end()


@pytest.fixture(scope="module")
def resumed(stopped: Ended) -> tuple[int, Ended]:
    """The stopped run, gone on with a changed setting; and the step at which it had stopped."""
    at = records(stopped.run)[-1]["step"]
    folder = stopped.folder
    return at, lowtide(folder, "train", "train.yaml", "--resume", "auto", "--set", "checkpoint.keep_last=1")


def test_json_is_one_document_on_stdout_and_the_rest_is_on_stderr(whole: Ended) -> None:
    document = whole.document()
    assert (whole.code, document["exit_code"], document["status"], document["error"]) == (0, 0, "done", None)
    assert document["run_folder"] == str(whole.run.resolve())
    assert document["summary"] == whole.state.record["summary"]
    assert f"step {STEPS}/{STEPS}" in whole.err


def test_the_run_folder_holds_what_it_should_under_the_id_that_was_given(whole: Ended) -> None:
    names = {path.name for path in whole.run.iterdir()}
    assert whole.run.name == whole.state.experiment_id == whole.document()["summary"]["experiment_id"] == "given-1"
    assert names >= {"config.yaml", "config.resolved.yaml", "metrics.jsonl", "evaluation.jsonl", "environment.json"}
    assert (whole.run / "config.yaml").read_text() == TINY
    assert yaml.safe_load((whole.run / "config.resolved.yaml").read_text())["training"]["steps"] == STEPS
    assert {path.name for path in (whole.run / "logs").iterdir()} == {"rank0.log", "rank1.log"}
    environment = json.loads((whole.run / "environment.json").read_text())
    assert environment["world_size"] == 2
    assert environment["torch"]["version"]


def test_a_tracker_that_raises_is_named_once_and_training_goes_on(whole: Ended) -> None:
    told = [line for line in whole.err.splitlines() if "on fire" in line]
    assert len(told) == 1
    assert "tests.e2e.parts:Failing failed on StepDone and gets no more events; training goes on" in told[0]


def test_tensorboard_writes_into_the_run_folder(whole: Ended) -> None:
    pytest.importorskip("tensorboard")
    (events,) = (whole.run / "tensorboard").glob("events.out.tfevents.*")
    assert events.stat().st_size > STEPS * 50


def test_wandb_writes_into_the_run_folder_without_a_network(whole: Ended) -> None:
    pytest.importorskip("wandb")
    (offline,) = whole.run.glob("wandb/offline-run-*/run-*.wandb")
    assert offline.stat().st_size > 0


def test_metrics_and_evaluations_are_records_of_their_own(whole: Ended) -> None:
    steps = records(whole.run)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    (evaluation,) = records(whole.run, "evaluation")
    assert evaluation["step"] == STEPS
    assert evaluation["loss"] == whole.document()["summary"]["loss_held_out"]


def test_a_signal_to_the_launcher_saves_and_ends_with_75(stopped: Ended) -> None:
    at = records(stopped.run)[-1]["step"]
    assert 3 <= at < STEPS
    assert stopped.code == 75
    assert (
        stopped.err.splitlines()[0] == f"stopped: stopped by SIGTERM after step {at}, saved; go on with --resume auto"
    )
    assert "Traceback" not in stopped.err
    assert (stopped.state.status, stopped.state.exit_code) == ("stopped", 75)
    assert [path.name for path in (stopped.run / "checkpoints").iterdir()] == [f"step-{at:08d}"]


def test_resume_auto_without_a_run_starts_fresh_and_says_so(stopped: Ended) -> None:
    assert "no run named 'tiny' in runs: starting fresh" in stopped.out


def test_a_resumed_run_goes_on_under_its_id_and_records_what_changed(resumed: tuple[int, Ended]) -> None:
    at, ended = resumed
    assert ended.code == 0, ended.err
    assert f"{STEPS} steps, from step {at}" in ended.out
    assert "config fields changed since the last attempt: checkpoint.keep_last" in ended.out
    first, second = ended.state.record["attempts"]
    assert first["changed"] == {}
    assert second["changed"] == {"checkpoint.keep_last": {"before": 2, "after": 1}}
    assert (ended.state.status, ended.state.exit_code) == ("done", 0)
    assert f"run {ended.run.name}" in ended.out
    assert [path.name for path in (ended.run / "checkpoints").iterdir()] == [f"step-{STEPS:08d}"]


def test_a_resumed_run_sees_the_losses_of_one_that_was_never_stopped(resumed: tuple[int, Ended], whole: Ended) -> None:
    _, ended = resumed
    ours, theirs = records(ended.run), records(whole.run)
    assert [record["step"] for record in ours] == list(range(1, STEPS + 1))
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5), (mine["step"], name)
    held_out = ended.state.record["summary"]["loss_held_out"]
    assert held_out == pytest.approx(whole.document()["summary"]["loss_held_out"], rel=1e-5)


def test_one_process_and_ctrl_c(tmp_path: Path) -> None:
    changes = ["--nproc", "1", "--set", "sharding.kind=none", "--set", "training.steps=4000"]
    with started(tmp_path, "train", write(tmp_path), *changes) as command:
        command.wait_for_step(2)
        rank = command.rank_pid(0)
        command.process.send_signal(signal.SIGINT)
        ended = command.end()
    assert ended.code == 75, ended.err
    assert "stopped by SIGINT after step" in ended.err
    assert ended.state.record["world_size"] == 1
    assert ended.state.record["process"]["pid"] == rank
    all_gone([ended.state.record["process"]])


def test_a_foreign_torchrun_works_and_rank_0_gives_the_one_document(tmp_path: Path) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lowtide")
    changes = ["--set", "training.steps=5", "--set", "estimate=true", "--experiment-id", "of-torchrun", "--json"]
    ended = lowtide(tmp_path, "train", write(tmp_path), *changes, module=torchrun)
    assert ended.code == 0, ended.err
    document = ended.document()
    assert (document["exit_code"], document["summary"]["steps"]) == (0, 5)
    assert (ended.run.name, ended.state.status, ended.state.record["world_size"]) == ("of-torchrun", "done", 2)
    told = document["summary"]["forecast"]
    assert told["measured_bytes"] == document["summary"]["peaks"][0]["peak_bytes"]
    assert abs(told["error"]) <= 0.01
    assert told["off"] == ""
    assert told["predicted_parts"]["parameters"] == told["measured_parts"]["parameters"] > 0
