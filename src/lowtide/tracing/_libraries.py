"""Libraries that look for fake tensors and then take another way than with real ones: here they do not.

transformers (5.24) reads position ids to see whether sequences are packed into one; under fake tensors it cannot, and
builds a mask for the worst case, which changes the attention kernel, repeats grouped heads and keeps more. A run whose
position ids are the model's own has no packed sequences, so that is what is traced, and said.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

NOT_PACKED = "transformers: no sequences are packed into one, so attention is causal without a mask"


@contextmanager
def as_with_real_tensors(assumptions: dict[str, None]) -> Generator[None]:
    """Let libraries that are loaded go the way of real tensors; what is taken for granted is added."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        if not isinstance(position_ids, FakeTensor):
            return original(position_ids)
        assumptions[NOT_PACKED] = None
        return None

    masks.find_packed_sequence_indices = find_packed_sequence_indices
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = original
