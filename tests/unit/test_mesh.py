"""The process group of one process, and who a process is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lowtide.errors import InputError, StoppedError
from lowtide.training.mesh import Place, process_group, read_place
from lowtide.training.ranks import barrier, on_main, rank, share_string, world_size

LAUNCHED = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def test_one_process_needs_no_launcher_and_can_shard():
    with process_group(60, device="cpu") as world:
        assert (world.rank, world.world_size, world.is_main, world.device.type) == (0, 1, True, "cpu")
        assert (rank(), world_size(), share_string("x"), on_main(lambda: 3)) == (0, 1, "x", 3)
        barrier()
        layer = fully_shard(torch.nn.Linear(4, 4))
        assert isinstance(layer.weight, DTensor)
        layer(torch.ones(2, 4)).sum().backward()
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, StoppedError])
def test_the_group_is_gone_after_any_error_which_arrives_as_it_was(kind):
    error = kind("mine")
    with pytest.raises(kind) as caught, process_group(60, device="cpu"):
        raise error
    assert caught.value is error
    assert not dist.is_initialized()
    with process_group(60, device="cpu"):
        assert dist.is_initialized()


def test_a_group_that_was_there_before_is_used_and_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="mine"), process_group(60, device="cpu"):
            raise ValueError("mine")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_group_that_the_run_destroyed_itself_is_no_second_error():
    with process_group(60, device="cpu"):
        dist.destroy_process_group()


def test_who_we_are_is_read_from_the_environment():
    assert read_place({}) == Place(0, 0, 1, 1, launched=False)
    assert read_place(LAUNCHED) == Place(3, 3, 8, 8, launched=True)
    found = read_place({**LAUNCHED, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (found.local_rank, found.local_world_size) == (1, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"MASTER_ADDR": None}, "not MASTER_ADDR"),
        ({"WORLD_SIZE": None, "MASTER_PORT": None}, "not WORLD_SIZE, MASTER_PORT"),
        ({"RANK": "three"}, "RANK must be a whole number, it is 'three'"),
        ({"RANK": "8"}, "RANK=8 must be at least 0 and below WORLD_SIZE=8"),
    ],
)
def test_half_an_environment_is_refused_by_name(change, said):
    environ = {k: v for k, v in {**LAUNCHED, **change}.items() if v is not None}
    with pytest.raises(InputError, match=said):
        read_place(environ)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_an_error_of_the_user():
    with pytest.raises(InputError, match="torch sees none"), process_group(60, device="cuda"):
        pass
    assert not dist.is_initialized()


@pytest.mark.gpus(1)
def test_on_a_gpu_tensors_of_both_kinds_can_be_communicated():
    with process_group(60) as world:
        assert world.device == torch.device("cuda", 0)
        for device in ("cpu", world.device):
            value = torch.ones(2, device=device)
            dist.all_reduce(value)
            assert value.tolist() == [1.0, 1.0]
        assert share_string("x") == "x"
    assert not dist.is_initialized()
