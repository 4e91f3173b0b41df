"""The process group of a run: made on entering, destroyed on leaving, whatever happens between.

    environment (RANK, WORLD_SIZE, ...) ──► Place ──► init_process_group ──► World ──► the run ──► destroy

Under ``torchrun`` the environment says who we are; without it the run is one process with a group of its own,
so that FSDP2 works all the same. GPUs get "cpu:gloo,cuda:nccl" (CPU tensors can be communicated too), else
gloo. A group that exists already is used and left alone. A failed allocation leaves as RunOutOfMemoryError,
anything else as it came; nothing is swallowed. After an error an NCCL group is aborted, not destroyed:
destroying waits for collectives that the other ranks may never join (torch's ``_abort_process_group``, there
in 2.11 to 2.14).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from lowtide.errors import InputError, RankError
from lowtide.training.out_of_memory import during, explain_out_of_memory, mark
from lowtide.training.ranks import barrier, on_main

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "World", "barrier", "during", "on_main", "process_group", "read_place"]

_LOG = logging.getLogger(__name__)
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Which process of how many this is, as the launcher told it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launched: bool = False


@dataclass(frozen=True)
class World:
    """The group as the run sees it."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0


def read_place(environ: Mapping[str, str] | None = None) -> Place:
    """Read who we are from torchrun's variables.

    Raises:
        InputError: some of them are there and others missing, or one is no number.
    """
    env = os.environ if environ is None else environ
    present = [name for name in _NEEDED if name in env]
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return Place()
    if len(present) < len(_NEEDED):
        missing = ", ".join(name for name in _NEEDED if name not in env)
        raise InputError(
            f"the environment has {', '.join(present)} but not {missing}: set all of them (torchrun does) "
            f"for a run of several processes, or none for a run of one"
        )
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise InputError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world}")
    local_rank = _number(env, "LOCAL_RANK", default=0 if world == 1 else rank)
    local_world = _number(env, "LOCAL_WORLD_SIZE", default=world)
    return Place(rank, local_rank, world, local_world, launched=True)


@contextlib.contextmanager
def process_group(timeout_s: float = 600.0, *, device: Literal["auto", "cpu", "cuda"] = "auto") -> Generator[World]:
    """Set up the group, yield the World, always destroy what was set up.

    Raises:
        RunOutOfMemoryError: an allocation failed inside, on a device or on the host.
        RankError: the processes did not find each other.
        InputError: the environment, or the number of GPUs, does not fit.
    """
    import torch.distributed as dist

    ours = not dist.is_initialized()
    where = f"rank {os.environ.get('RANK', '0')}"
    clean = False
    try:
        world = _start(timeout_s, device) if ours else _join(device)
        where = f"{world.device} (rank {world.rank} of {world.world_size})"
        yield world
        clean = True
    except BaseException as error:
        # Before the group goes: its end makes the other ranks fail too, and the first to fail is the cause.
        mark(error, "lowtide_raised_at", time.time())
        clear = explain_out_of_memory(error, where=where)
        if clear is None or clear is error:
            raise
        mark(clear, "lowtide_raised_at", time.time())
        raise clear from error
    finally:
        if ours and dist.is_initialized():
            _stop(clean=clean)


def _start(timeout_s: float, device: str) -> World:
    import torch
    import torch.distributed as dist

    place = read_place()
    chosen = _choose_device(device, place)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" and dist.is_nccl_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        if place.launched:
            dist.init_process_group(backend, timeout=timeout, rank=place.rank, world_size=place.world_size)
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    except (dist.DistError, ValueError) as error:
        raise RankError(
            f"rank {place.rank} could not set up the group of {place.world_size} processes at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within {timeout_s:g} s: {error}"
        ) from error
    return World(place.rank, place.local_rank, place.world_size, chosen)


def _join(device: str) -> World:
    """Describe a group that somebody else made and will destroy."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if "nccl" not in str(dist.get_backend_config()):
        device = "cpu" if device == "auto" else device
    return World(rank, local_rank, size, _choose_device(device, Place(rank, local_rank, size, local_size)))


def _choose_device(wanted: str, place: Place) -> torch.device:
    import torch

    if wanted == "cpu":
        return torch.device("cpu")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if present == 0 and wanted == "auto":
        return torch.device("cpu")
    if present == 0:
        raise InputError("a GPU was asked for and torch sees none; `lowtide doctor` says what is there")
    if place.local_rank >= present:
        raise InputError(
            f"{place.local_world_size} processes on this machine but torch sees {present} GPU(s): start "
            f"at most {present} (--nproc {present}), or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    return torch.device("cuda", place.local_rank)


def _stop(*, clean: bool) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    abort = getattr(distributed_c10d, "_abort_process_group", None)
    try:
        if not clean and abort is not None and "nccl" in str(dist.get_backend_config()):
            abort()
        else:
            dist.destroy_process_group()
    except Exception as error:
        # The run's own result or error is what counts, and the group goes with the process.
        _LOG.warning("the process group did not close in order: %s: %s", type(error).__name__, error)


def _number(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise InputError(f"the environment variable {name} must be a whole number, it is {text!r}") from None
