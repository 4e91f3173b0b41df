"""Failed allocations are recognised, whatever raised them, and nothing else is."""

from __future__ import annotations

import errno
import subprocess
import sys

import numpy as np
import pytest
import torch

from lowtide.errors import (
    ConfigError,
    FailedError,
    RecomputeError,
    RunOutOfMemoryError,
    StoppedError,
)
from lowtide.training.mesh import process_group
from lowtide.training.out_of_memory import during, explain_out_of_memory, find_out_of_memory

CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB is free."
)

FAILED_ALLOCATIONS = {
    "cuda": lambda: torch.OutOfMemoryError(CUDA_TEXT),
    "cpu": lambda: RuntimeError(CPU_TEXT),
    "driver": lambda: RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "python": lambda: MemoryError(),
    "fork": lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
}


def chained(inner: BaseException, how: str) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as error:
            if how == "cause":
                raise RuntimeError("the pipeline stage failed") from error
            raise ExceptionGroup("several", [ValueError("other"), error]) from None
    except BaseException as outer:
        return outer


@pytest.mark.parametrize("name", FAILED_ALLOCATIONS)
def test_a_bare_failed_allocation_is_found(name):
    error = FAILED_ALLOCATIONS[name]()
    assert find_out_of_memory(error) is error


@pytest.mark.parametrize("how", ["cause", "group"])
@pytest.mark.parametrize("name", FAILED_ALLOCATIONS)
def test_a_wrapped_failed_allocation_is_found(name, how):
    error = FAILED_ALLOCATIONS[name]()
    assert find_out_of_memory(chained(chained(error, how), "cause")) is error


def test_one_that_was_raised_while_handling_a_failed_allocation_is_found():
    inner = torch.OutOfMemoryError(CUDA_TEXT)

    def handle_badly():
        try:
            raise inner
        except torch.OutOfMemoryError:
            {}["missing"]

    with pytest.raises(KeyError) as caught:
        handle_badly()
    assert find_out_of_memory(caught.value) is inner


@pytest.mark.parametrize(
    "other",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("the memory of the cache is out of date"),
        ValueError("CUDA out of memory is what this text only talks about"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: str(error)[:20],
)
def test_other_errors_are_not_labelled(other):
    assert find_out_of_memory(other) is None
    assert explain_out_of_memory(other, where="cpu") is None


@pytest.mark.parametrize("kind", [ConfigError, StoppedError, KeyboardInterrupt, SystemExit])
def test_what_was_raised_on_purpose_after_handling_one_stays_what_it_is(kind):
    error = kind("on purpose")
    error.__context__ = torch.OutOfMemoryError(CUDA_TEXT)
    assert find_out_of_memory(error) is None


@pytest.mark.parametrize("kind", [FailedError, RecomputeError])
def test_a_failure_of_ours_with_a_failed_allocation_behind_it_is_one(kind):
    error = kind("block 3 could not be recomputed")
    error.__cause__ = torch.OutOfMemoryError(CUDA_TEXT)
    assert find_out_of_memory(error) is error.__cause__


def test_a_loop_in_the_chain_ends():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert find_out_of_memory(one) is None


@pytest.mark.parametrize(
    ("text", "asked"),
    [(CUDA_TEXT, "2.00 GiB"), (CPU_TEXT, "4000000000 bytes")],
)
def test_the_message_names_place_phase_bytes_and_what_to_try(text, asked):
    with pytest.raises(RuntimeError) as caught, during("the run"), during("backward of step 3"):
        raise RuntimeError(text)
    clear = explain_out_of_memory(caught.value, where="cuda:1 (rank 1 of 2)")
    assert isinstance(clear, RunOutOfMemoryError)
    for part in ("cuda:1 (rank 1 of 2)", "during backward of step 3", f"asked for {asked}", "policy", "batch_size"):
        assert part in str(clear)


def test_numpy_says_how_much_too():
    with pytest.raises(MemoryError) as caught:
        np.empty((2**50,), dtype=np.float64)
    assert "asked for 8.00 PiB" in str(explain_out_of_memory(caught.value, where="cpu"))


def test_the_innermost_phase_counts_also_behind_a_wrapper():
    def wrapped():
        try:
            with during("forward of step 1"):
                raise torch.OutOfMemoryError(CUDA_TEXT)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("stage 0 failed") from error

    with pytest.raises(RuntimeError) as caught, during("training"):
        wrapped()
    assert "during forward of step 1" in str(explain_out_of_memory(caught.value, where="cpu"))


REAL = """
import resource
import torch
from pathlib import Path
from lowtide.errors import RunOutOfMemoryError
from lowtide.training.mesh import during, process_group

torch.zeros(1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
try:
    with process_group() as world:
        with during("building the model"):
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), hard))
            try:
                torch.empty(4 << 30, dtype=torch.uint8)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
except RunOutOfMemoryError as error:
    assert type(error.__cause__) is RuntimeError, type(error.__cause__)
    assert not torch.distributed.is_initialized()
    print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs an address-space limit")
def test_a_real_failure_of_the_allocator_leaves_the_group_as_a_clear_error():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "out of memory on cpu (rank 0 of 1) during building the model: asked for 4294967296 bytes" in done.stdout


def test_leaving_the_group_keeps_other_errors_as_they_are():
    with pytest.raises(LookupError) as caught, process_group(60, device="cpu"):
        raise LookupError("mine")
    assert caught.value.__cause__ is None
