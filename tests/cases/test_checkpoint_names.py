"""Names in checkpoints, groups and filters: always those of the bare model (field cases 08, 09 and 21)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import lowtide
from lowtide.training.checkpoint import Progress, latest_complete, load, save
from lowtide.training.optim import matrix_names, named_bare_parameters
from lowtide.training.optim_kinds import AdamWConfig
from lowtide.training.parallelize_kinds import PrecisionConfig
from tests.helpers.training import SHARDINGS, batch, build, loss_of, parallelize

FULL = {"kind": "full"}
ORDERS = [
    "policy, compiled in place",
    "compiled in place, policy",
    "policy, wrapped",
    "wrapped, policy",
    "slots, policy",
]


def _in_order(order: str) -> tuple[nn.Module, nn.Module]:
    """Return the model to call, and the bare one inside it, after a policy and a compile in some order."""
    model: Any = build()
    outer = model
    for word in order.split(", "):
        if word == "policy":
            lowtide.apply(outer, FULL)
        elif word == "compiled in place":
            for block in model.layers:
                block.compile(backend="eager")
        elif word == "wrapped":
            outer = torch.compile(model, backend="eager")
        else:
            for i, block in enumerate(model.layers):
                model.layers[i] = torch.compile(block, backend="eager")
    return outer, model


@pytest.mark.parametrize("order", ORDERS)
def test_keys_of_the_distributed_helper_are_bare_in_every_order(order):
    outer, _ = _in_order(order)
    bare = build(seed=99)
    keys = get_model_state_dict(outer)
    assert set(keys) == set(bare.state_dict())
    set_model_state_dict(bare, keys, options=StateDictOptions(strict=True))
    for (name, a), (_, b) in zip(bare.named_parameters(), named_bare_parameters(outer), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("order", [o for o in ORDERS if "slots" not in o])
def test_plain_keys_are_bare_and_load_strictly(order):
    _, model = _in_order(order)
    bare = build(seed=99)
    bare.load_state_dict(model.state_dict(), strict=True)
    assert list(model.state_dict()) == list(bare.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in bare.named_parameters()]


@pytest.mark.parametrize("order", ORDERS)
def test_names_that_are_matched_against_are_those_of_the_state(order):
    """A filter made from parameter names keeps every trainable key: with a wrapper's names it would keep none."""
    outer, model = _in_order(order)
    for name, parameter in named_bare_parameters(outer):
        parameter.requires_grad_(".query." in name)
    trainable = {name for name, p in named_bare_parameters(outer) if p.requires_grad}
    kept = {key: value for key, value in get_model_state_dict(outer).items() if key in trainable}
    assert len(kept) == len(trainable) == 3
    bare = build(seed=99)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.fill_(0.5)
    kept = {key: value for key, value in get_model_state_dict(outer).items() if key in trainable}
    missing = bare.load_state_dict(kept, strict=False)
    assert missing.unexpected_keys == []
    assert all(bool((p == 0.5).all()) for n, p in bare.named_parameters() if n in trainable)


@pytest.mark.parametrize("order", ORDERS)
def test_decay_groups_do_not_see_the_order(order):
    def groups(model: nn.Module) -> list[list[str]]:
        optimizer = AdamWConfig().build(model=model, matrices=matrix_names(model))
        names = {id(p): n for n, p in named_bare_parameters(model)}
        return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    assert groups(_in_order(order)[0]) == groups(build())


GRAINS: dict[str, Any] = {"none": {"kind": "none"}, "block": FULL, "mlp": {"kind": "full", "layers": "layers.*.mlp"}}


def _saved(folder: Path, sharding: str, grain: str) -> dict[str, torch.Tensor]:
    model, optimizer = _made(sharding, grain, seed=3)
    for step in range(2):
        _step(model, optimizer, step)
    save(folder, model=model, optimizer=optimizer, progress=Progress(2, 0, 0))
    _step(model, optimizer, 2)
    return _whole(model)


def _resumed(folder: Path, sharding: str, grain: str) -> dict[str, torch.Tensor]:
    model, optimizer = _made(sharding, grain, seed=99)
    info = latest_complete(folder)
    assert info is not None
    load(info, model=model, optimizer=optimizer)
    _step(model, optimizer, 2)
    return _whole(model)


def _made(sharding: str, grain: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = parallelize(
        build(seed=seed),
        policy=GRAINS[grain],
        sharding=SHARDINGS[sharding],
        precision=PrecisionConfig(),
        device=torch.device("cpu"),
    )
    return made.model, AdamWConfig().build(model=made.model, matrices=made.matrices)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, batch(dist.get_rank(), step)).backward()
    optimizer.step()


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    shared = [get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


@pytest.mark.parametrize("loading", list(GRAINS))
@pytest.mark.parametrize("saving", list(GRAINS))
@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp1"])
def test_a_run_resumes_at_another_granularity(run_on, tmp_path, sharding, saving, loading):
    """The step after the checkpoint is bit by bit the same, so weights and moments both came back."""
    went_on = run_on(2, _saved, tmp_path, sharding, saving)[0]
    for found in run_on(2, _resumed, tmp_path, sharding, loading):
        assert list(found) == list(went_on) == list(build().state_dict())
        assert [n for n in went_on if not torch.equal(found[n], went_on[n])] == []
