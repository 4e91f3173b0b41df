"""GPUs are counted as torch counts them, without importing it."""

from __future__ import annotations

import torch

from lowtide.training.gpus import _built_for, count_gpus


def test_the_count_is_torchs_own():
    assert count_gpus() == torch.cuda.device_count()


def test_what_torch_was_built_for_is_read_from_its_version():
    expected = "hip" if torch.version.hip else "cuda" if torch.version.cuda else None
    assert _built_for() == expected
