"""The law over transformers' architectures: a seeded slice here, all of them under the `full` mark."""

from __future__ import annotations

import random

import pytest
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.check import check

# Two that every change must pass (experts; two stacks with relative positions), and four drawn by seed.
_ALWAYS = ["qwen3_moe", "t5"]
_SLICE = _ALWAYS + random.Random(2026).sample([name for name in ARCHITECTURES if name not in _ALWAYS], 4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in _SLICE else [pytest.mark.full]) for name in ARCHITECTURES],
)
def test_every_policy_keeps_gradients_and_lowers_saved_bytes(name):
    report = check(ARCHITECTURES[name])
    assert {cell.differing for cell in report.cells} == {()}
    assert all(cell.native == cell.regions for cell in report.cells), [cell.reason for cell in report.cells]
    assert all(cell.saved_bytes < report.saved_bytes for cell in report.cells)


def test_there_are_at_least_forty_architectures():
    assert len(ARCHITECTURES) >= 40
