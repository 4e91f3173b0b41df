"""DDP: a block that runs twice in one forward, and unused blocks; each gradient is ready exactly once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from tests.helpers import law, models
from tests.helpers.families import FULL, SELECTIVE, spec_step
from tests.helpers.models import Spec

POLICIES = pytest.mark.parametrize("policy", [FULL, SELECTIVE], ids=["full", "selective_op"])


class Twice(models.Decoder):
    """Every block runs twice; the last one only in even steps."""

    skip_last = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        blocks = self.blocks()[:-1] if self.skip_last else self.blocks()
        for block in blocks:
            x = block(block(x))
        return self.head(self.norm(x))


def _build(skip: bool) -> nn.Module:
    torch.manual_seed(41)
    model = Twice(Spec(dropout=0.2))
    model.skip_last = skip
    return models.randomized(model)


def _run(policy: Any, options: dict[str, bool], skip: bool, last: bool) -> list[str]:
    run = {
        "wrap": partial(nn.parallel.DistributedDataParallel, **options),
        "seed": 5 + dist.get_rank(),
        "apply_last": last,
    }
    build = partial(_build, skip)
    control = law.check_control(build, spec_step, **run)
    return law.differences(control, law.run_steps(build, spec_step, policy, **run))


@POLICIES
@pytest.mark.parametrize(
    ("options", "skip"),
    [
        ({}, False),
        ({"find_unused_parameters": True}, False),
        ({"find_unused_parameters": True}, True),
        ({"static_graph": True}, False),
        ({"gradient_as_bucket_view": True}, False),
    ],
    ids=str,
)
def test_blocks_that_run_twice_or_never(run_on, policy, options, skip):
    assert run_on(2, _run, policy, options, skip, False) == [[], []]
    assert run_on(2, _run, policy, options, skip, True) == [[], []]


@POLICIES
@pytest.mark.parametrize("skip", [False, True])
def test_a_gradient_accumulates_once_per_backward(policy, skip):
    model = _build(skip)
    lowtide.apply(model, policy)
    counts: dict[str, int] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: counts.update({name: counts.get(name, 0) + 1}))
    spec_step(model, 0)
    unused = [n for n in counts if n.startswith("layers.2")]
    assert set(counts.values()) == {1}
    assert bool(unused) != skip


def _no_sync(policy: Any) -> list[str]:
    def step(model: Any, i: int) -> Tensor:
        with model.no_sync():
            first = spec_step(model, 2 * i)
        return first + spec_step(model, 2 * i + 1)

    run = {"wrap": nn.parallel.DistributedDataParallel, "seed": 5 + dist.get_rank()}
    build = partial(models.build, Spec(dropout=0.2))
    control = law.check_control(build, step, **run)
    return law.differences(control, law.run_steps(build, step, policy, **run))


@POLICIES
def test_accumulation_without_synchronisation(run_on, policy):
    assert run_on(2, _no_sync, policy) == [[], []]
