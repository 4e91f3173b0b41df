"""Random batches: shapes, types and ranges from the config, one stream for each rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from pydantic import ValidationError

from lowtide.training.data.kinds import RandomConfig


def _source(*, rank=0, world_size=2, seed=0, **fields):
    return RandomConfig(**fields).build(rank=rank, world_size=world_size, seed=seed)


def test_tokens_fill_the_range_and_nothing_beyond():
    source = _source(sequence_length=512, batch_size=8, vocab_size=20)
    inputs, targets = next(source.batches())
    assert inputs.shape == targets.shape == (8, 512)
    assert inputs.dtype == targets.dtype == torch.int64
    assert set(inputs.unique().tolist()) == set(range(20)) == set(targets.unique().tolist())
    assert not torch.equal(inputs, targets)
    assert source.vocab_size == 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_shapes_types_and_ranges_are_those_of_the_config(dtype):
    source = _source(
        batch_size=4,
        inputs={"shape": [30, 40], "dtype": dtype, "low": -2.0, "high": -1.0},
        targets={"shape": [3], "dtype": "int32", "low": 5, "high": 7},
    )
    inputs, targets = next(source.batches())
    assert inputs.shape == (4, 30, 40)
    assert inputs.dtype == getattr(torch, dtype)
    assert -2.0 <= inputs.min().item() < -1.9
    assert -1.1 < inputs.max().item() < -1.0
    assert targets.shape == (4, 3)
    assert targets.dtype == torch.int32
    assert set(targets.unique().tolist()) <= {5, 6}


def test_floats_without_a_range_lie_between_0_and_1():
    inputs, _ = next(_source(inputs={"dtype": "float32"}).batches())
    assert inputs.min().item() >= 0.0
    assert inputs.max().item() < 1.0


def test_ranks_steps_and_seeds_see_other_values_and_each_can_be_made_again():
    streams = {
        (rank, seed): [x for x, _ in itertools.islice(_source(rank=rank, seed=seed).batches(), 3)]
        for rank in (0, 1)
        for seed in (0, 1)
    }
    every = [batch for stream in streams.values() for batch in stream]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(every, 2))
    assert torch.equal(next(_source(rank=1).batches(2))[0], streams[1, 0][2])


def test_evaluation_is_the_same_each_time_and_not_the_training_data():
    source = _source(evaluation_batches=3)
    first, second = ([x for x, _ in source.evaluation_batches()] for _ in range(2))
    assert len(first) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], next(source.batches())[0])


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    next(_source().batches())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_goes_on_with_the_next_whole_batch():
    source = _source(batch_size=4)
    assert torch.equal(next(source.batches_from(16))[0], next(source.batches(2))[0])
    assert torch.equal(next(source.batches_from(17))[0], next(source.batches(3))[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": {"low": 5, "high": 5}}, "low 5 must be below high 5"),
        ({"inputs": {"low": 300}}, "inputs: low 300 must be below 256"),
        ({"targets": {"dtype": "float32", "low": 2}}, "targets: low 2 must be below 1"),
        ({"inputs": {"low": 0.5}}, "whole numbers"),
        ({"inputs": {"shape": [3, 0]}}, "sizes are 1 or more"),
        ({"inputs": {"dtype": "int8"}}, "dtype"),
    ],
)
def test_ranges_without_values_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        RandomConfig(**fields)
