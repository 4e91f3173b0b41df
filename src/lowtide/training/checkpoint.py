"""Save and load a training run with torch.distributed.checkpoint (DCP), whatever policy, wrapper or rank count.

Names in a checkpoint are those of the bare model (DCP's state-dict helpers give them), and tensors are saved in
pieces that any sharding can read, so a run saved under one policy, compiled or not, on two ranks, loads under
another, on one. The optimizer's hyperparameters are not saved: those of the config that resumes apply. An
optimizer that keeps state in its parameter groups, and not per parameter, is therefore not resumed exactly.

Every function is collective; an error on one rank is raised on all. DCP's ``CheckpointException`` is no
``Exception`` (torch 2.11 to 2.14), so it is turned into one of ours at this edge.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lowtide.errors import FailedError, InputError, LowtideError, RankError, listing, nearest
from lowtide.system.files import read_json, write_json
from lowtide.training.checkpoint_folder import (
    CheckpointInfo,
    FileRecord,
    Progress,
    checkpoint_name,
    finish,
    hash_file,
    latest_complete,
    list_files,
    prepare,
    read_complete,
)
from lowtide.training.ranks import on_main, rank, world_size

__all__ = [
    "CheckpointInfo",
    "Loaded",
    "Progress",
    "checkpoint_name",
    "latest_complete",
    "load",
    "read_complete",
    "save",
]

T = TypeVar("T")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_GROUPS = "param_groups."


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gave back."""

    progress: Progress
    random_state_restored: bool
    """False on ranks that the saving run did not have; they keep the random state that they had."""

    notes: Mapping[str, Any]


def save(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    keep_last: int | None = None,
    notes: Mapping[str, Any] | None = None,
) -> CheckpointInfo:
    """Write ``folder/step-...``: beside its place, renamed when complete and on the disk. Collective.

    Args:
        folder: holds the run's checkpoints; all ranks see the same one.
        model: in any wrapper, or none.
        optimizer: of this model.
        progress: where the run is.
        keep_last: how many complete checkpoints stay; all, where it is left out.
        notes: JSON values to keep with it.

    Raises:
        FailedError: something could not be written; older checkpoints are as they were.
    """
    with _translated(f"the checkpoint of step {progress.step} could not be saved in {folder}"):
        beside = Path(on_main(lambda: str(prepare(folder, progress.step))))
        state = {"model": get_model_state_dict(model), "optimizer": _optimizer_state(model, optimizer)}
        writer = dcp.FileSystemWriter(beside / "data", sync_files=True)
        dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())
        _on_every(lambda: write_json(beside / "rng" / f"rank-{rank()}.json", _random_state()))
        files = _hash_together(beside)
        size = world_size()

        def publish() -> str:
            place = finish(
                beside,
                progress=progress,
                world_size=size,
                files=files,
                notes=notes or {},
                keep_last=keep_last,
            )
            return str(place)

        place = Path(on_main(publish))
    size_bytes = sum(record.size_bytes for record in files.values())
    return CheckpointInfo(place, progress, size, size_bytes, dict(notes or {}))


def load(info: CheckpointInfo, *, model: nn.Module, optimizer: Optimizer) -> Loaded:
    """Fill model, optimizer and random state from a complete checkpoint. Collective.

    Call it after ``parallelize`` and after the optimizer is built. Gradients are dropped. Where the saving run had
    fewer ranks than this one, the ranks beyond keep their random state.

    Raises:
        InputError: the checkpoint is of another model or another optimizer; the message names what differs.
        FailedError: it could not be read.
    """
    reader = dcp.FileSystemReader(info.path / "data")
    with _translated(f"checkpoint {info.path} could not be loaded"):
        optimizer.zero_grad(set_to_none=True)
        model_state = get_model_state_dict(model)
        optimizer_state = _optimizer_state(model, optimizer)
        saved = on_main(lambda: _saved_shapes(reader))
        _check_same("model", model_state, saved, info.path)
        _check_same("optimizer", optimizer_state, saved, info.path)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
        set_model_state_dict(model, model_state)
        groups = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        own = {name: value for name, value in groups.items() if name.startswith(_GROUPS)}
        set_optimizer_state_dict(model, optimizer, {**optimizer_state, **own}, options=_FLAT)
        restored = _on_every(lambda: _restore_random_state(info.path))[rank()]
    return Loaded(info.progress, restored, info.notes)


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of every parameter by its bare name, without hyperparameters."""
    flat = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return {name: value for name, value in flat.items() if not name.startswith(_GROUPS)}


def _saved_shapes(reader: dcp.FileSystemReader) -> dict[str, list[int] | None]:
    found = reader.read_metadata().state_dict_metadata
    return {
        name: list(entry.size) if isinstance(entry, TensorStorageMetadata) else None for name, entry in found.items()
    }


def _check_same(part: str, own: Mapping[str, Any], saved: Mapping[str, list[int] | None], path: Path) -> None:
    prefix = f"{part}."
    theirs = {n.removeprefix(prefix): shape for n, shape in saved.items() if n.startswith(prefix)}
    mine = {n: list(v.shape) if isinstance(v, torch.Tensor) else None for n, v in own.items()}
    missing, unknown = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    reshaped = [n for n in mine if n in theirs and theirs[n] is not None and mine[n] != theirs[n]]
    problems: list[str] = []
    if missing:
        near = nearest(missing[0], theirs, count=2)
        problems.append(f"it lacks {listing(missing, limit=4)}" + (f" (nearest: {listing(near)})" if near else ""))
    if unknown:
        problems.append(f"it has {listing(unknown, limit=4)}, which this {part} lacks")
    if reshaped:
        told = (f"{n} is {theirs[n]} there and {mine[n]} here" for n in reshaped)
        problems.append(listing(told, limit=3))
    if problems:
        raise InputError(f"checkpoint {path} is of another {part}: {'; '.join(problems)}")


def _hash_together(beside: Path) -> dict[str, FileRecord]:
    """Hash all files, each on one rank; ranks that see different files have no folder in common."""

    def hash_my_share() -> dict[str, FileRecord | None]:
        names = list_files(beside)
        mine = set(names[rank() :: world_size()])
        return {name: hash_file(beside / name) if name in mine else None for name in names}

    shares = _on_every(hash_my_share)
    if any(set(share) != set(shares[0]) for share in shares):
        raise FailedError(
            f"the ranks see different files in {beside.parent}: runs.directory must be one folder that all hosts share"
        )
    return {name: record for share in shares for name, record in share.items() if record is not None}


def _on_every(act: Callable[[], T]) -> list[T]:
    """Run ``act`` on every rank and return all results by rank; an error on one is raised on all."""
    if world_size() == 1:
        return [act()]
    result: T | None = None
    problem: str | None = None
    mine: Exception | None = None
    try:
        result = act()
    except Exception as error:
        mine, problem = error, f"{type(error).__name__}: {error}"
    told: list[Any] = [None] * world_size()
    dist.all_gather_object(told, (result, problem))
    failed = {r: text for r, (_, text) in enumerate(told) if text is not None}
    if failed:
        raise RankError("; ".join(f"rank {r}: {text}" for r, text in failed.items())) from mine
    return [value for value, _ in told]


@contextmanager
def _translated(what: str) -> Generator[None]:
    """Say what failed and where, once, in our own errors; what is one already keeps its class."""
    try:
        yield
    except LowtideError:
        raise
    except CheckpointException as error:
        failures = {r: failure[0] for r, failure in error.failures.items()}
        told = "; ".join(f"rank {r}: {type(e).__name__}: {e}" for r, e in sorted(failures.items()))
        raise FailedError(f"{what}: {told}") from next(iter(failures.values()), error)
    except (OSError, RuntimeError, ValueError) as error:
        raise FailedError(f"{what}: {type(error).__name__}: {error}") from error


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    device = _device_generator()
    return {
        "torch": _encoded(torch.get_rng_state()),
        "device": None if device is None else _encoded(device.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": numpy_state,
    }


def _restore_random_state(path: Path) -> bool:
    source = path / "rng" / f"rank-{rank()}.json"
    if not source.exists():
        return False
    state = read_json(source)
    torch.set_rng_state(_decoded(state["torch"]))
    device = _device_generator()
    if device is not None and state["device"] is not None:
        device.set_rng_state(_decoded(state["device"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    state["numpy"]["state"]["key"] = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(state["numpy"])
    return True


def _device_generator() -> Any:
    return torch.cuda if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decoded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
