"""A process group of any size in one process: collectives have shapes and no partners.

torch's own fake backend (``torch.testing._internal.distributed.fake_pg``, used by torch's tests; there in 2.11 to
2.14). With fake tensors on top, real ``fully_shard`` runs as on rank ``rank`` of ``world_size``.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.errors import UserError


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Generator[None]:
    """Pretend to be one rank of a group until the context ends.

    Raises:
        UserError: a process group exists already, or the rank does not.
    """
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} must be at least 0 and below the number of processes, {world_size}")
    if dist.is_initialized():
        raise UserError(
            "a process group exists in this process, and a step of another group is estimated in a process "
            "of its own: estimate before the group is made"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_building(mode: FakeTensorMode) -> Generator[None]:
    """Let ``model.to(...)`` work while a model is made under ``mode``.

    torch swaps fake parameters in place and refuses to while a weak reference points at one; the mode's own memo of
    conversions holds such references (torch 2.11 to 2.14), and nothing made so far needs it.
    """
    original = torch.utils.swap_tensors

    def swap(first: torch.Tensor, second: torch.Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        original(first, second)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original
