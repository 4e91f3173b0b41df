"""The pool of worker processes that all distributed tests stand on."""

from __future__ import annotations

import os
import time

import pytest

from tests.helpers.gang import RankFailedError


def _rank_and_sum(value: int) -> tuple[int, float, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), torch.get_num_threads()


def _fail_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise LookupError(f"rank {rank} failed on purpose")
    dist.barrier()


def _die_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os._exit(9)
    dist.barrier()


def _sleep_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        time.sleep(600)


def _environment() -> dict[str, str]:
    import torch.distributed as dist

    assert not dist.is_initialized()
    return {k: os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


class _Unpicklable(Exception):  # noqa: N818
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.hook = lambda: a


def _raise_unpicklable() -> None:
    raise _Unpicklable(1, 2)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_rank_answers(run_on, n):
    assert run_on(n, _rank_and_sum, 10) == [(r, 10.0 * n + sum(range(n)), 1) for r in range(n)]


def test_an_error_keeps_its_type_and_tells_its_rank(run_on):
    with pytest.raises(LookupError, match="on purpose") as caught:
        run_on(2, _fail_on, 1)
    assert "raised on rank 1" in caught.value.__notes__[0]
    assert "_fail_on" in caught.value.__notes__[0]
    assert run_on(2, _rank_and_sum, 0)[1][1] == 1.0


def test_an_error_that_cannot_be_pickled_still_tells(run_on):
    with pytest.raises(RankFailedError, match="_Unpicklable: 1 and 2"):
        run_on(1, _raise_unpicklable)


def test_a_dead_rank_is_reported_and_replaced(run_on):
    with pytest.raises(RankFailedError, match="rank 1: the process died"):
        run_on(2, _die_on, 1)
    assert run_on(2, _rank_and_sum, 0)[0][1] == 1.0


def test_a_rank_that_hangs_is_reported_with_its_stack_and_replaced(run_on):
    with pytest.raises(RankFailedError, match="rank 0: no answer after") as caught:
        run_on(2, _sleep_on, 0, timeout_s=2)
    assert "_sleep_on" in str(caught.value)
    assert run_on(2, _rank_and_sum, 0)[0][1] == 1.0


def test_without_a_group_the_environment_is_torchruns(run_on):
    first, second = run_on(2, _environment, group=False)
    assert (first["RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


def _pid(_: int = 0) -> int:
    return os.getpid()


def test_workers_are_reused_and_failures_cost_only_those_that_took_part(run_on):
    first = run_on(3, _pid)
    assert run_on(3, _pid) == first
    with pytest.raises(LookupError):
        run_on(2, _fail_on, 0)
    assert set(run_on(3, _pid)) & set(first) == {first[2]}
