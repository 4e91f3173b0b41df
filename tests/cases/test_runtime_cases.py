"""Cases from the field about ids, run folders, out of memory, processes and logs."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from lowtide.errors import ConfigError, InputError, RunOutOfMemoryError
from lowtide.system.run_state import read_run, status_of
from lowtide.training.events import Bus, EvaluationDone, StepDone
from lowtide.training.ids import agree_on_id, new_experiment_id
from lowtide.training.mesh import during, process_group
from lowtide.training.rank_status import run_rank
from lowtide.training.ranks import share_string
from lowtide.training.run_folder import RunFolder
from lowtide.training.tracking.jsonl import JsonLines
from tests.helpers.launched import Launched, all_gone, launched

__all__ = ["launched"]

# ── 36: ranks build different run directories ──────────────────────────────────────────────────────────────────────


def _id_with_own_clock(moments: list[str]) -> tuple[str, str]:
    import torch.distributed as dist

    mine = new_experiment_id({"a": 1}, now=datetime.fromisoformat(moments[dist.get_rank()]))
    return mine, share_string(mine)


def _id_after_sleeping() -> str:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(1.1)  # its second is certainly another one
    return agree_on_id({"a": 1})


def test_ranks_with_skewed_clocks_get_one_id(run_on):
    before = datetime(2026, 12, 31, 23, 59, 59, 900_000, tzinfo=UTC)
    moments = [before.isoformat(), (before + timedelta(seconds=0.2)).isoformat()]
    (mine_0, shared_0), (mine_1, shared_1) = run_on(2, _id_with_own_clock, moments)
    assert mine_0[:15] == "20261231-235959"
    assert mine_1[:15] == "20270101-000000"
    assert shared_0 == shared_1 == mine_0


def test_a_rank_that_starts_in_the_next_second_gets_the_same_id(run_on):
    one, two = run_on(2, _id_after_sleeping)
    assert one == two


def test_an_id_needs_no_group():
    assert agree_on_id({}, experiment_id="x") == share_string("x") == "x"


# ── 38: ranks race in making the run folder ────────────────────────────────────────────────────────────────────────


def _make_folder(runs: str, experiment_id: str) -> tuple[str, bool, list[str]]:
    folder = RunFolder.create(Path(runs), experiment_id=experiment_id, name="n", given="a: 1\n", resolved={"a": 1})
    # Every rank may use it at once, without a barrier of its own.
    text = (folder.path / "config.resolved.yaml").read_text()
    with folder.logging() as file:
        return text, folder.rank == 0, [file.name]


def _resume_folder(path: str) -> tuple[bool, tuple[str, ...]]:
    folder = RunFolder.resume(Path(path), given="a: 2\n", resolved={"a": 2})
    return folder.resumed, folder.changed


def _finish(runs: str) -> None:
    folder = RunFolder.create(Path(runs), experiment_id="id-1", name="n", given="a: 1\n", resolved={"a": 1})
    folder.finish(ValueError(f"of rank {folder.rank}"))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_only_rank_0_makes_the_folder_and_all_find_it_ready(run_on, tmp_path, n):
    found = run_on(n, _make_folder, str(tmp_path), "id-1")
    assert found == [("a: 1\n", rank == 0, [f"rank{rank}.log"]) for rank in range(n)]
    assert len(json.loads((tmp_path / "id-1" / "run.json").read_text())["attempts"]) == 1


def test_when_rank_0_fails_every_rank_stops_with_its_error(run_on, tmp_path):
    (tmp_path / "id-1").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        run_on(2, _make_folder, str(tmp_path), "id-1")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        run_on(2, _make_folder, str(tmp_path / "file"), "id-1")


def test_all_ranks_go_on_in_the_same_folder_and_only_rank_0_writes_the_end(run_on, tmp_path):
    run_on(2, _finish, str(tmp_path))
    assert read_run(tmp_path / "id-1").error_message == "of rank 0"
    assert run_on(2, _resume_folder, str(tmp_path / "id-1")) == [(True, ("a",))] * 2


# ── 39: out of memory is swallowed, or not recognised when wrapped ─────────────────────────────────────────────────


def _train_until(error: Exception, *, wrapped: bool) -> None:
    with process_group(60, device="cpu"), during("backward of step 2"):
        try:
            raise error
        except Exception as cause:
            if wrapped:
                raise RuntimeError("pipeline stage 0 failed") from cause
            raise


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_out_of_memory_error_ends_the_run_with_a_code_and_its_status(tmp_path, wrapped, capsys):
    import torch

    folder = RunFolder.create(tmp_path, experiment_id="id-1", name="n", given="", resolved={})

    def train() -> None:
        try:
            with folder.logging():
                _train_until(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), wrapped=wrapped)
        except BaseException as error:
            folder.finish(error)
            raise

    assert run_rank(train) == 1
    state = read_run(folder.path)
    assert (state.status, state.exit_code, state.error_type) == ("out_of_memory", 1, "RunOutOfMemoryError")
    said = capsys.readouterr().err
    assert "during backward of step 2: asked for 2.00 GiB" in said
    assert "Traceback" not in said
    # The diagnosis is in the log, the allocator's own error and all.
    assert "OutOfMemoryError: CUDA out of memory" in (folder.path / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize("wrapped", [False, True])
def test_another_error_is_not_labelled_out_of_memory(wrapped):
    error = ValueError("shape mismatch after the cache ran out of memory of its past")
    with pytest.raises((ValueError, RuntimeError)) as caught:
        _train_until(error, wrapped=wrapped)
    assert not isinstance(caught.value, RunOutOfMemoryError)
    assert status_of(caught.value) == "failed"


# ── 42: a killed launcher leaves its children behind ───────────────────────────────────────────────────────────────


def test_a_killed_launcher_leaves_no_rank_behind(launched):
    job: Launched = launched("sleep_alone")
    told = job.identities("agent", "rank0", "rank1")
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    all_gone(told)


def test_a_killed_agent_leaves_no_rank_behind_and_is_told(launched):
    job: Launched = launched("sleep_alone")
    told = job.identities("agent", "rank0", "rank1")
    os.kill(next(pid for pid, name in job.pids().items() if name == "agent"), signal.SIGKILL)
    code, _, err = job.end()
    assert code == 1
    assert err == "error: torch's launcher was killed by signal 9 (SIGKILL), and every rank with it\n"
    all_gone(told)


def test_what_a_rank_itself_started_in_another_session_ends_with_the_launch(launched):
    job: Launched = launched("sleep")
    told = job.identities("agent", "rank0", "rank1", "helper", "helper")
    job.process.terminate()
    code, _, err = job.end()
    assert code == 1
    assert "ended by SIGTERM before anything could be saved" in err
    assert read_run(job.folder / "runs" / "id-1").status == "failed"
    all_gone(told)


# ── 44: NaN makes the log invalid JSON, NumPy and tensor scalars crash the logger ──────────────────────────────────


def _publish_odd_values(folder: str) -> int:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(torch.tensor(0.5), mesh, [Replicate()])
    partial = DTensor.from_local(torch.tensor(0.5), mesh, [Partial()])
    bus = Bus()
    if mesh.get_rank() == 0:
        bus.subscribe(JsonLines(Path(folder)))
    values = [float("nan"), np.float32("inf"), np.float32(0.5), torch.tensor(0.5), torch.tensor(0.5).bfloat16()]
    for step, loss in enumerate([*values, whole, partial, object()], start=1):
        bus.publish(StepDone(step=step, loss=loss, extra={"again": loss}))
    bus.publish(EvaluationDone(step=8, loss=torch.tensor(float("nan"), dtype=torch.bfloat16)))
    left = len(bus.names)
    bus.close()
    return left


def test_whatever_is_logged_the_file_is_strict_json_and_logging_goes_on(run_on, tmp_path):
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert run_on(2, _publish_odd_values, str(tmp_path)) == [1, 0]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [r["loss"] for r in records[:7]] == [None, None, 0.5, 0.5, 0.5, 0.5, None]
    assert records[0]["non_finite"] == {"loss": "nan", "extra.again": "nan"}
    assert records[1]["non_finite"] == {"loss": "inf", "extra.again": "inf"}
    assert "full_tensor" in records[6]["non_finite"]["loss"]
    assert records[7]["loss"].startswith("<object object")
    (evaluation,) = (tmp_path / "evaluation.jsonl").read_text().splitlines()
    assert json.loads(evaluation, parse_constant=refuse)["non_finite"] == {"loss": "nan"}
