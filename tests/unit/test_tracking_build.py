"""From the trackers in a config to a bus; TensorBoard and Weights & Biases as their own readers see them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter

from lowtide.errors import ConfigError
from lowtide.training.events import EvaluationDone, Message, RunEnded, RunStarted, StepDone
from lowtide.training.registry import Component, Family, Reading
from lowtide.training.tracking import build_bus
from lowtide.training.tracking.kinds import ConsoleConfig, JsonlConfig, TensorBoardConfig, WandbConfig

STARTED = RunStarted(
    experiment_id="id-1",
    name="n",
    folder="runs/id-1",
    world_size=1,
    device="cpu",
    total_steps=2,
    resolved={"model": {"layers": 2}},
)


def trackers(*mappings: dict) -> list[Component]:
    adapter = TypeAdapter(list[Annotated[Component, Family("tracker")]])
    return adapter.validate_python(list(mappings), context=Reading(allow_code=True))


def custom(name: str, **config: object) -> dict:
    mapping: dict = {"kind": "custom", "target": f"tests.helpers.trackers:{name}"}
    return {**mapping, "config": config} if config else mapping


def test_every_kind_can_be_named_in_a_config():
    read = trackers({"kind": "console"}, {"kind": "jsonl"}, {"kind": "tensorboard"}, {"kind": "wandb"})
    assert [type(each) for each in read] == [ConsoleConfig, JsonlConfig, TensorBoardConfig, WandbConfig]


def test_a_tracker_of_ones_own_is_a_class_and_an_entry(tmp_path):
    bus = build_bus(trackers(custom("Listing", file="seen.txt")), run_folder=tmp_path)
    bus.publish(STARTED)
    bus.publish(StepDone(step=1, loss=1.0))
    bus.close()
    assert (tmp_path / "seen.txt").read_text().split() == ["RunStarted", "StepDone", "closed"]


def test_one_that_fails_to_start_is_left_out_and_the_others_hear_of_it(tmp_path, capsys):
    bus = build_bus(trackers(custom("FailsToStart"), {"kind": "console"}), run_folder=tmp_path)
    assert bus.names == ("console",)
    assert "tests.helpers.trackers:FailsToStart could not start" in capsys.readouterr().out


def test_a_class_that_is_no_tracker_is_the_users_error_and_leaves_nothing_open(tmp_path):
    with pytest.raises(ConfigError, match="NoTracker made a NoTracker"):
        build_bus(trackers({"kind": "jsonl"}, custom("NoTracker")), run_folder=tmp_path)
    build_bus(trackers({"kind": "jsonl"}), run_folder=tmp_path).close()


def test_with_json_all_progress_goes_to_stderr(tmp_path, capsys):
    bus = build_bus(trackers({"kind": "console"}), run_folder=tmp_path, json_output=True)
    bus.publish(Message(text="hello"))
    out, err = capsys.readouterr()
    assert (out, err) == ("", "hello\n")


@pytest.mark.parametrize(("config", "package"), [(TensorBoardConfig(), "tensorboard"), (WandbConfig(), "wandb")])
def test_an_extra_that_is_not_installed_is_named(tmp_path, monkeypatch, config, package):
    for name in [n for n in sys.modules if n.split(".")[0] == package or n.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'lowtide\[{package}\]'"):
        build_bus([config], run_folder=tmp_path)


def test_tensorboard_files_hold_the_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    bus = build_bus([TensorBoardConfig()], run_folder=tmp_path)
    bus.publish(STARTED)
    for step in (1, 2):
        bus.publish(StepDone(step=step, loss=3.0 - step, learning_rate=0.1, extra={"mine": step}))
    bus.publish(EvaluationDone(step=2, loss=0.5))
    bus.publish(RunEnded(status="done", steps=2))
    bus.close()
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    assert [(e.step, e.value) for e in seen.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [e.value for e in seen.Scalars("train/mine")] == [1.0, 2.0]
    assert [(e.step, e.value) for e in seen.Scalars("evaluation/loss")] == [(2, 0.5)]
    assert "train/grad_norm" not in seen.Tags()["scalars"]


def run_wandb(folder: Path, config: dict, **environ: str | None) -> subprocess.CompletedProcess[str]:
    """Run a small training's events through wandb in a process of its own, with nothing to read on stdin."""
    code = (
        "import json, sys; from pathlib import Path\n"
        "from lowtide.training.tracking import build_bus; from lowtide.training.tracking.kinds import WandbConfig\n"
        "from lowtide.training.events import *\n"
        "bus = build_bus([WandbConfig(**json.loads(sys.argv[2]))], run_folder=Path(sys.argv[1]))\n"
        "bus.publish(RunStarted(experiment_id='id-1', name='n', folder='x', world_size=1, device='cpu',\n"
        "                       total_steps=2, resolved={'model': {'layers': 2}}))\n"
        "for step in (1, 2): bus.publish(StepDone(step=step, loss=float(step)))\n"
        "bus.publish(RunEnded(status='done', steps=2)); print(bus.names); bus.close()\n"
    )
    keep = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), json.dumps(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        stdin=subprocess.DEVNULL,
        env={**keep, "NETRC": str(folder / "no-netrc"), **{k: v for k, v in environ.items() if v is not None}},
    )


def test_wandb_writes_offline_without_network_or_account(tmp_path):
    pytest.importorskip("wandb")
    done = run_wandb(tmp_path, {"project": "p"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "('wandb',)\n"
    (file,) = tmp_path.glob("wandb/offline-run-*/run-id-1.wandb")
    assert file.stat().st_size > 0


def test_wandb_online_without_a_key_is_an_error_and_no_question(tmp_path):
    pytest.importorskip("wandb")
    done = run_wandb(tmp_path, {"mode": "online"})
    assert done.returncode == 1
    assert "ConfigError: the tracker wandb is online but there is no key" in done.stderr


def test_wandb_online_with_a_service_that_never_answers_is_left_out(tmp_path):
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    held.append(server.accept()[0])
            except OSError:
                pass

        threading.Thread(target=accept, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        config = {"mode": "online", "wait_s": 1}
        done = run_wandb(tmp_path, config, WANDB_API_KEY="k" * 40, WANDB_BASE_URL=address)
        server.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "()\n"
    assert "the tracker wandb failed on RunStarted" in done.stderr
