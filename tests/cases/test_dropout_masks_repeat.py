"""A recompute that draws another mask computes the gradient of another sample: preserved, or refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.errors import RefusedError
from tests.helpers import law, models
from tests.helpers.families import FULL, SELECTIVE, both, spec_step
from tests.helpers.models import Spec

SPEC = Spec(dropout=0.5, layers=2)
build, step = partial(models.build, SPEC), partial(spec_step, spec=SPEC)


@both
def test_gradients_with_dropout_are_bitwise_equal(policy):
    law.assert_law(build, step, policy)


@both
def test_not_preserving_is_refused_where_dropout_draws(policy):
    model = build()
    lowtide.apply(model, {**policy, "preserve_rng": False})
    with pytest.raises(RefusedError, match="preserve_rng"):
        step(model, 0)
    assert all(p.grad is None for p in model.parameters())


@both
def test_not_preserving_is_fine_where_nothing_draws(policy):
    still = Spec(dropout=0.0)
    run = partial(spec_step, spec=still)
    law.assert_law(partial(models.build, still), run, {**policy, "preserve_rng": False})


def test_it_is_refused_as_soon_as_the_model_trains_after_eval():
    model = build().eval()
    lowtide.apply(model, {**FULL, "preserve_rng": False})
    step(model, 0)
    model.train()
    with pytest.raises(RefusedError, match="preserve_rng"):
        step(model, 0)


def test_it_is_refused_when_dropout_is_switched_on_after_some_steps():
    model = models.build(Spec(dropout=0.0))
    lowtide.apply(model, {**FULL, "preserve_rng": False})
    for i in range(2):
        step(model, i)
    for block in model.layers:
        block.drop.p = 0.3
    with pytest.raises(RefusedError, match="preserve_rng"):
        step(model, 2)


def test_letting_it_through_is_explicit_and_does_change_gradients():
    control = law.check_control(build, step, steps=1)
    found = law.run_steps(build, step, {**FULL, "preserve_rng": False, "allow_inexact": True}, steps=1)
    assert any("gradient" in line for line in law.differences(control, found))
    assert found.applied.policy.allow_inexact


def _ranks() -> list[str]:
    seed = 17 + 1000 * dist.get_rank()
    options = {"seed": seed, "wrap": nn.parallel.DistributedDataParallel}
    control = law.check_control(build, step, **options)
    return law.differences(control, law.run_steps(build, step, SELECTIVE, **options))


def test_ranks_with_seeds_of_their_own(run_on):
    assert run_on(2, _ranks) == [[], []]


def test_the_masks_are_those_of_forward_even_if_the_state_moved_since():
    model = build()
    lowtide.apply(model, FULL)
    masks: list[torch.Tensor] = []
    model.layers[0].drop.register_forward_hook(lambda m, a, out: masks.append(out.detach() == 0))
    tokens = models.tokens(SPEC)
    loss = models.loss_of(model(tokens), tokens)
    torch.rand(1000)
    loss.backward()
    # The second dropout is the last thing that backward needs, so recompute ends inside it, before its hook.
    assert len(masks) == 3
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])
