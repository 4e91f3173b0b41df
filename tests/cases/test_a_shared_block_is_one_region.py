"""A block that stands at several places: one region, one set of parameters, gradients summed once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.errors import RefusedError
from lowtide.regions import Region
from tests.helpers import families, law, models, ops
from tests.helpers.families import FULL, SELECTIVE, both, spec_step
from tests.helpers.identity import identity
from tests.helpers.models import Spec

SPEC = Spec(stack="shared", dropout=0.2)


class Towers(nn.Module):
    """One block under two parents, and another reached through two attributes."""

    def __init__(self) -> None:
        super().__init__()
        spec = Spec(dropout=0.2)
        torch.manual_seed(77)
        shared = models.Block(spec)
        self.embed = nn.Embedding(spec.vocab, spec.d)
        self.left = nn.ModuleList([models.Block(spec), shared])
        self.right = nn.ModuleList([shared, models.Block(spec)])
        self.favourite = self.left[0]

    def forward(self, tokens: Tensor) -> Tensor:
        x = y = self.embed(tokens)
        for block in self.left:
            x = block(x)
        for block in self.right:
            y = block(y)
        return (x + self.favourite(y)) @ self.embed.weight.t()


@both
def test_a_recursive_stack(policy):
    found = law.assert_law(partial(models.build, SPEC), partial(spec_step, spec=SPEC), policy)
    assert [r.fqn for r in found.applied.regions] == ["layers.0", "layers.2", "layers.3"]
    assert found.applied.regions[0].aliases == ("layers.0", "layers.1")
    assert found.applied.blocks == 3


@both
def test_two_towers_hold_one_region(policy):
    found = law.assert_law(Towers, spec_step, policy)
    assert len(found.applied.regions) == 3
    model = Towers()
    before = identity(model)
    lowtide.apply(model, policy)
    assert model.left[1] is model.right[0]
    assert isinstance(model.left[1].forward, Region)
    assert model.left[1].forward is model.right[0].forward
    assert identity(model) == before


def test_every_call_of_a_shared_block_runs_again_once():
    spec = Spec(stack="shared")
    plain, model = models.build(spec), models.build(spec)
    lowtide.apply(model, FULL)
    tokens = models.tokens(spec)
    again = ops.ran_again(lambda: models.loss_of(plain(tokens), tokens), lambda: models.loss_of(model(tokens), tokens))
    assert again["aten.mm.default"] == 6 * 4


def test_choosing_only_some_places_of_a_shared_block_is_refused_by_name():
    model = models.build(SPEC)
    for policy in ({"kind": "every_nth_layer", "n": 2}, {"kind": "full", "layers": "layers.0"}):
        with pytest.raises(RefusedError, match=r"layers\.0 is the same module as layers\.1"):
            lowtide.apply(model, policy)
    assert not any(isinstance(b.__dict__.get("forward"), Region) for b in model.layers)


def test_choosing_all_of_its_places_or_none_works():
    model = models.build(SPEC)
    assert len(lowtide.apply(model, {"kind": "full", "layers": ["layers.{0-1}"]}).regions) == 1
    model = models.build(SPEC)
    assert len(lowtide.apply(model, {"kind": "some_layers", "checkpoint": [2, 3]}).regions) == 2


def test_two_models_that_share_a_block():
    first, second = models.build(), models.build()
    second.layers[0] = first.layers[0]
    lowtide.apply(first, FULL)
    with pytest.raises(RefusedError, match="shared with another model"):
        lowtide.apply(second, FULL)


def test_tied_parameters_stay_tied():
    model = families.build("gpt2")
    lowtide.apply(model, SELECTIVE)
    assert model.lm_head.weight is model.transformer.wte.weight
    families.step(model, 0)
    assert model.lm_head.weight.grad is model.transformer.wte.weight.grad


def _reduced(policy: object) -> list[str]:
    options = {"wrap": nn.parallel.DistributedDataParallel, "seed": 3 + dist.get_rank()}
    build, step = partial(models.build, SPEC), partial(spec_step, spec=SPEC)
    control = law.check_control(build, step, **options)
    return law.differences(control, law.run_steps(build, step, policy, **options))


@pytest.mark.parametrize("policy", [FULL, SELECTIVE], ids=["full", "selective_op"])
def test_reductions_fire_once(run_on, policy):
    assert run_on(2, _reduced, policy) == [[], []]
