"""Checkpoints that are broken, and saves that fail: passed over or raised on all ranks, never half believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lowtide.errors import FailedError, InputError, RankError
from lowtide.training import checkpoint
from lowtide.training.checkpoint import Progress, latest_complete, read_complete, save
from lowtide.training.optim_kinds import AdamWConfig
from tests.helpers.training import build, prepare


def _prepared() -> tuple[nn.Module, Optimizer]:
    made = prepare(build(), sharding="fsdp2")
    return made.model, AdamWConfig(lr=0.01).build(model=made.model, matrices=made.matrices)


def _saves(folder: Path, steps: list[int]) -> None:
    model, optimizer = _prepared()
    for step in steps:
        save(folder, model=model, optimizer=optimizer, progress=Progress(step, 64 * step, 4 * step))


def _break(path: Path, how: str) -> None:
    data = next(p for p in sorted((path / "data").iterdir()) if p.suffix == ".distcp")
    if how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "torn manifest":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text[: len(text) // 2])
    elif how == "manifest of another kind":
        (path / "manifest.json").write_text("{}")
    elif how == "of a later version":
        document = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**document, "schema_version": 99}))
    elif how == "missing file":
        data.unlink()
    elif how == "cut file":
        data.write_bytes(data.read_bytes()[:-1])
    else:
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("no manifest", "no manifest.json"),
        ("torn manifest", "cannot be understood"),
        ("manifest of another kind", "cannot be understood"),
        ("of a later version", "schema_version 99"),
        ("missing file", "missing: data/"),
        ("cut file", "bytes instead of"),
        ("flipped bit", "changed since it was written: data/"),
    ],
)
def test_a_broken_checkpoint_is_passed_over_with_the_reason(run_on, tmp_path, how, reason):
    run_on(2, _saves, tmp_path, [2, 4])
    _break(tmp_path / "step-00000004", how)
    heard: list[str] = []
    info = latest_complete(tmp_path, tell=heard.append)
    assert info is not None
    assert info.progress.step == 2
    assert len(heard) == 1
    assert "step-00000004 is passed over" in heard[0]
    assert reason in heard[0]
    with pytest.raises(InputError, match=r"no complete checkpoint.*there are: step-00000002, step-00000004"):
        read_complete(tmp_path / "step-00000004")


def test_where_there_is_none_none_is_found(tmp_path):
    assert latest_complete(tmp_path / "nowhere") is None
    (tmp_path / "step-12").mkdir()
    (tmp_path / ".tmp-step-00000001").mkdir()
    heard: list[str] = []
    assert latest_complete(tmp_path, tell=heard.append) is None
    assert heard == []
    with pytest.raises(InputError, match="there is no such folder"):
        read_complete(tmp_path / "step-00000007")


def _fail_to_write_on(rank: int, folder: Path, place: str) -> str:
    """Rank ``rank`` cannot write: what every rank hears, and that the older checkpoint stays."""
    model, optimizer = _prepared()
    save(folder, model=model, optimizer=optimizer, progress=Progress(1, 0, 0))
    if dist.get_rank() == rank:

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        setattr(checkpoint, place, refuse)
    try:
        save(folder, model=model, optimizer=optimizer, progress=Progress(2, 0, 0))
    except (FailedError, RankError) as error:
        return str(error)
    finally:
        import importlib

        importlib.reload(checkpoint)
    return "saved"


@pytest.mark.parametrize(("rank", "place"), [(0, "prepare"), (1, "write_json"), (1, "hash_file"), (0, "finish")])
def test_an_error_on_one_rank_is_raised_on_all_and_the_older_checkpoint_stays(run_on, tmp_path, rank, place):
    for message in run_on(2, _fail_to_write_on, rank, tmp_path, place):
        assert "No space left on device" in message
    info = latest_complete(tmp_path)
    assert info is not None
    assert info.progress.step == 1
    assert not (tmp_path / "step-00000002").exists()


def _unwritable_data(folder: Path) -> str:
    model, optimizer = _prepared()
    if dist.get_rank() == 1:
        import torch.distributed.checkpoint as dcp

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        original = dcp.FileSystemWriter.write_data
        dcp.FileSystemWriter.write_data = refuse  # type: ignore[method-assign]
    try:
        save(folder, model=model, optimizer=optimizer, progress=Progress(2, 0, 0))
    except FailedError as error:
        return str(error)
    finally:
        if dist.get_rank() == 1:
            dcp.FileSystemWriter.write_data = original  # type: ignore[method-assign]
    return "saved"


def test_dcps_own_failure_is_translated_and_names_the_rank(run_on, tmp_path):
    for message in run_on(2, _unwritable_data, tmp_path):
        assert "step 2 could not be saved" in message
        assert "rank 1: OSError: [Errno 28] No space left on device" in message
