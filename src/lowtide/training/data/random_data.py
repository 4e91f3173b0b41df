"""Random batches of given shapes, types and ranges.

Every batch has a generator of its own, seeded by the run's seed, the number of the batch and the rank: ranks
see different values, any batch can be made without those before it, and torch's global random state is left
alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lowtide.training.data.kinds import RandomConfig, Values

__all__ = ["RandomData"]

_TRAINING, _EVALUATION = 0, 1


class RandomData:
    """Batches of random values for one rank; see the module."""

    def __init__(self, config: RandomConfig, *, rank: int, world_size: int, seed: int) -> None:
        assert 0 <= rank < world_size
        self.vocab_size = config.vocab_size
        self.batch_size = config.batch_size
        self.sequence_length = config.sequence_length
        self.global_batch_size = config.batch_size * world_size
        self._config, self._rank, self._seed = config, rank, seed

    def batches(self, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets), each [B, *shape], without end, from a number of batches already taken."""
        step = start_step
        while True:
            yield self._batch(_TRAINING, step)
            step += 1

    def batches_from(self, sample: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches from a number of samples that all ranks together have taken already, rounded up."""
        return self.batches(-(-sample // self.global_batch_size))

    def evaluation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same few batches every time, none of which training sees."""
        for step in range(self._config.evaluation_batches):
            yield self._batch(_EVALUATION, step)

    def _batch(self, purpose: int, step: int) -> tuple[Tensor, Tensor]:
        entropy = np.random.SeedSequence([self._seed, purpose, step, self._rank]).generate_state(1, np.uint64)[0]
        # manual_seed takes 64 bits and reads the upper half as negative numbers.
        chance = torch.Generator().manual_seed(int(entropy) >> 1)
        return self._draw(self._config.inputs, chance), self._draw(self._config.targets, chance)

    def _draw(self, values: Values, chance: torch.Generator) -> Tensor:
        shape = (self.batch_size, *self._config.shape_of(values))
        dtype, high = getattr(torch, values.dtype), self._config.high_of(values)
        if values.dtype.startswith("int"):
            return torch.randint(int(values.low), int(high), shape, dtype=dtype, generator=chance)
        drawn = torch.rand(shape, generator=chance, dtype=torch.float64) * (high - values.low) + values.low
        rounded = drawn.to(dtype)
        # Rounding to fewer bits can reach the upper end, which is excluded.
        below = torch.nextafter(torch.tensor(high, dtype=dtype), torch.tensor(values.low, dtype=dtype))
        return torch.where(rounded >= high, below, rounded)
