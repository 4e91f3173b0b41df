"""From a config to the objects that train: model, data, optimizer, all on this rank's device.

    seed ─► model ─► parallelize (policy, compile, shard) ─► optimizer ─► random state of this rank

Every rank builds the same weights from the same seed; afterwards each rank's random state is its own, so that
dropout differs between ranks and repeats between runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.errors import ConfigError, InputError
from lowtide.training.config import TrainConfig
from lowtide.training.mesh import World, during
from lowtide.training.model.flops import model_flops_per_token
from lowtide.training.model.forward import vocabulary_size
from lowtide.training.parallelize import Parallelized, parallelize
from lowtide.training.registry import Builder

__all__ = ["Built", "DataSource", "build", "build_bare"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DataSource(Protocol):
    """What the loop asks of data."""

    vocab_size: int

    def batches(self, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets) without end, from a number of batches already taken."""
        ...

    def evaluation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield held-out (inputs, targets); every rank equally many."""
        ...


@dataclass(frozen=True)
class Built:
    """Everything that the loop trains with, on one rank."""

    config: TrainConfig
    world: World
    parallelized: Parallelized
    optimizer: Optimizer
    data: DataSource
    tokens_per_batch: int
    """Tokens of one batch over all ranks."""
    samples_per_batch: int
    """Samples of one batch over all ranks."""
    flops_per_token: int
    """Model FLOPs of forward and backward; recompute is not counted."""

    @property
    def model(self) -> nn.Module:
        """What to call."""
        return self.parallelized.model


def build(config: TrainConfig, world: World, *, policy: object = None) -> Built:
    """Build model, data and optimizer for this rank, under the config's policy or another one.

    Raises:
        ConfigError: model and data do not fit together.
        InputError: no compiler where blocks are to be compiled.
        PolicyError: from applying the policy.
    """
    builder = Builder()
    if config.compile and world.device.type == "cpu":
        check_compiler()
    with during("reading the data"):
        data: Any = builder.build(config.data, rank=world.rank, world_size=world.world_size, seed=config.run.seed)
        inputs, _ = next(iter(data.batches()))
    with during("building the model"):
        torch.manual_seed(config.run.seed)
        model = builder.build(config.model)
        check_vocabulary(model, data)
        tokens = inputs[0].numel() if inputs.ndim > 1 else 1
        flops = model_flops_per_token(model, sequence_length=tokens)
        parallelized = parallelize(
            model,
            policy=config.policy if policy is None else policy,
            sharding=config.sharding,
            precision=config.precision,
            device=world.device,
            compile_blocks=config.compile,
        )
        optimizer: Any = builder.build(config.optimizer, model=parallelized.model, matrices=parallelized.matrices)
    torch.manual_seed(rank_seed(config.run.seed, world.rank))
    return Built(
        config=config,
        world=world,
        parallelized=parallelized,
        optimizer=optimizer,
        data=data,
        tokens_per_batch=math.prod(inputs.shape[:2]) * world.world_size,
        samples_per_batch=inputs.shape[0] * world.world_size,
        flops_per_token=flops,
    )


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank's dropout: another for each rank, the same in every run."""
    return (seed * 1_000_003 + rank + 1) % 2**63


def check_vocabulary(model: nn.Module, data: DataSource) -> None:
    """Refuse data whose tokens the model cannot embed: on a GPU that ends the process without a word."""
    size = vocabulary_size(model)
    if size is not None and data.vocab_size > size:
        raise ConfigError(
            f"data has token ids up to {data.vocab_size - 1}, and the model's embedding has {size} rows: set the "
            f"model's vocabulary to at least {data.vocab_size}"
        )


def check_compiler() -> None:
    """Refuse to compile without a compiler, before the model is built (torch 2.11 to 2.14 look for one like this)."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise InputError(
            f"compile: true needs a C++ compiler on a CPU, and torch found none ({error}): install g++, set CXX to "
            "one, or set compile: false; `lowtide doctor` looks closer"
        ) from error


def build_bare(config: TrainConfig) -> nn.Module:
    """Build the model in the type that it computes in, without policy or sharding.

    Under ``FakeTensorMode`` this takes no memory. Mixed precision casts parameters as they are gathered, so in
    forward the model is what this returns.
    """
    model: nn.Module = Builder().build(config.model)
    dtype = _DTYPES[config.precision.compute]
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.train()
