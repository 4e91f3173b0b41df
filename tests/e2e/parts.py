"""Parts of one's own, as configs of these tests name them: ``target: tests.e2e.parts:Hungry``."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

from lowtide.training.data.kinds import RandomConfig
from lowtide.training.events import Event, StepDone


class Failing:
    """A tracker that breaks at the first step."""

    def __init__(self, *, run_folder: Path) -> None:
        self.events = 0

    def handle(self, event: Event) -> None:
        if isinstance(event, StepDone):
            raise ConnectionError("the dashboard is on fire")

    def close(self) -> None:
        raise ConnectionError("and cannot be put out")


class _Troubled:
    """Random data with trouble on one rank, at one batch."""

    class Config(BaseModel):
        rank: int = 1
        at_batch: int = 3

    def __init__(self, config: Config, *, rank: int, world_size: int, seed: int) -> None:
        self._mine = rank == config.rank
        self._at = config.at_batch
        self._data = RandomConfig(sequence_length=16, batch_size=2).build(rank=rank, world_size=world_size, seed=seed)
        self._long = RandomConfig(sequence_length=4096, batch_size=8).build(rank=rank, world_size=world_size, seed=seed)
        self.vocab_size = self._data.vocab_size

    def batches(self, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(self._data.batches(start_step), start=1):
            yield self.trouble() if self._mine and number == self._at else batch

    def evaluation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._data.evaluation_batches()

    def trouble(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Broken(_Troubled):
    """Raises."""

    def trouble(self) -> tuple[Tensor, Tensor]:
        raise ZeroDivisionError("a bug in the data")


class Hungry(_Troubled):
    """Leaves room for 64 MiB more, then gives a batch whose activations need more."""

    def trouble(self) -> tuple[Tensor, Tensor]:
        batch = next(self._long.batches())
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        room = pages * os.sysconf("SC_PAGE_SIZE") + 64 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (room, hard))
        return batch


class CudaHungry(_Troubled):
    """Fails as CUDA's allocator does, wrapped by a library."""

    def trouble(self) -> tuple[Tensor, Tensor]:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("the pipeline's stage failed") from error


class Hanging(_Troubled):
    """Waits for ever, and hears no signal."""

    def trouble(self) -> tuple[Tensor, Tensor]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)


class Killed(_Troubled):
    """Dies of SIGKILL."""

    def trouble(self) -> tuple[Tensor, Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Leaving(_Troubled):
    """Ends with exit code 0 in the middle of the run."""

    def trouble(self) -> tuple[Tensor, Tensor]:
        os._exit(0)


class CannotWrite(_Troubled):
    """May write no file of more than 4 KiB from then on."""

    def trouble(self) -> tuple[Tensor, Tensor]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return next(self._data.batches())
