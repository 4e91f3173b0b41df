"""Windows of the embedded text, in a global order that depends on the seed and on nothing else.

Sample number g of a run is window ``permutation(epoch)[g mod windows]`` with ``epoch = g div windows``; an
epoch also shifts where windows begin, so that later epochs see other cuts. Ranks share each global batch:
rank r of W takes samples r*B to (r+1)*B of its W*B. So W ranks with B samples each see what one rank with
W*B sees, any step can be computed without those before it, and a run resumed on another number of ranks goes
on with the next sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowtide.errors import InputError
from lowtide.training.data.corpus import load_corpus
from lowtide.training.data.kinds import EmbeddedTextConfig

__all__ = ["EmbeddedText"]


class EmbeddedText:
    """Batches of byte-level text for one rank; see the module."""

    vocab_size = 256

    def __init__(self, config: EmbeddedTextConfig, *, rank: int, world_size: int, seed: int) -> None:
        assert 0 <= rank < world_size
        corpus = load_corpus(docstrings=config.docstrings, held_out=config.held_out)
        self.batch_size = config.batch_size
        self.sequence_length = config.sequence_length
        self.global_batch_size = config.batch_size * world_size
        self._rank, self._seed = rank, seed
        self._training, self._held_out = corpus.training, corpus.held_out
        # A shift of up to one window must leave every window whole.
        self.windows = (len(self._training) - 1) // self.sequence_length - 1
        self.held_out_windows = (len(self._held_out) - 1) // self.sequence_length
        if self.windows < 1 or self.held_out_windows < 1:
            raise InputError(
                f"data.sequence_length: {self.sequence_length} is too long for the embedded text: "
                f"{len(self._training)} bytes to train on and {len(self._held_out)} held out; use "
                f"{min(len(self._training) // 2, len(self._held_out)) - 1} or less, or `docstrings: true`"
            )
        self._epoch: tuple[int, npt.NDArray[np.int64], int] | None = None

    def batches(self, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets), each int64 [B, T], without end, from a number of batches already taken."""
        return self.batches_from(start_step * self.global_batch_size)

    def batches_from(self, sample: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches from a number of samples that all ranks together have taken already."""
        first = sample + self._rank * self.batch_size
        while True:
            yield self._stack([self._window(g) for g in range(first, first + self.batch_size)])
            first += self.global_batch_size

    def evaluation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the held-out windows in the order of the text; every rank yields equally many batches.

        Windows that fill no global batch are left out; where there are fewer than one batch, some are
        repeated.
        """
        count = max(1, self.held_out_windows // self.global_batch_size)
        for batch in range(count):
            first = batch * self.global_batch_size + self._rank * self.batch_size
            chosen = (g % self.held_out_windows for g in range(first, first + self.batch_size))
            yield self._stack([self._cut(self._held_out, w * self.sequence_length) for w in chosen])

    def _window(self, sample: int) -> npt.NDArray[np.uint8]:
        epoch, place = divmod(sample, self.windows)
        if self._epoch is None or self._epoch[0] != epoch:
            chance = np.random.default_rng([self._seed, epoch])
            order = chance.permutation(self.windows)
            self._epoch = (epoch, order, int(chance.integers(self.sequence_length)))
        _, order, shift = self._epoch
        return self._cut(self._training, int(order[place]) * self.sequence_length + shift)

    def _cut(self, tokens: npt.NDArray[np.uint8], start: int) -> npt.NDArray[np.uint8]:
        return tokens[start : start + self.sequence_length + 1]

    def _stack(self, windows: list[npt.NDArray[np.uint8]]) -> tuple[Tensor, Tensor]:
        both = torch.from_numpy(np.stack(windows).astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
