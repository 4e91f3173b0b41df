"""``lowtide.estimate`` on any model and mesh: against the allocator, and shards by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide
from lowtide.errors import PolicyError, UserError
from lowtide.measurement import measure_peak
from tests.helpers import models
from tests.helpers.models import Spec

SPEC = Spec(d=64, hidden=96, layers=3, length=32, batch=2)
TOKENS = torch.zeros(SPEC.batch, SPEC.length, dtype=torch.int64)


def loss_of(out):
    return models.loss_of(out, torch.zeros(SPEC.batch, SPEC.length, dtype=torch.int64))


def estimated(model=None, *, policy=None, inputs=TOKENS, **options):
    setup = lowtide.TrainSetup(**{"loss": loss_of, "threads": 1, **options})
    return lowtide.estimate(models.Decoder(SPEC) if model is None else model, inputs, policy=policy, setup=setup)


def measured(*, policy=None, first=False, accumulation=1):
    model = models.Decoder(SPEC).train()
    if policy is not None:
        lowtide.apply(model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step():
        for _ in range(accumulation):
            (loss_of(model(torch.zeros_like(TOKENS))) / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()

    if not first:
        step()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure_peak(step, static=(model, optimizer), device="cpu", processes=1).bytes
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("policy", [None, lowtide.Full(), {"kind": "selective_op", "save": ["matmul"]}], ids=str)
def test_the_peak_is_that_of_the_allocator(policy):
    real = measured(policy=policy)
    found = estimated(policy=policy)
    assert abs(found.peak_bytes - real) <= 0.001 * real
    assert found.policy == ("none" if policy is None else getattr(policy, "kind", "selective_op"))
    assert found.tokens_per_s == pytest.approx(64 / found.step_ms * 1000)


def test_the_first_step_of_the_optimizer_and_accumulation():
    for options, real in (({"first_step": True}, {"first": True}), ({"grad_accumulation": 2}, {"accumulation": 2})):
        expected = measured(**real)
        assert abs(estimated(**options).peak_bytes - expected) <= 0.001 * expected
    assert estimated(first_step=True).at_peak.optimizer_state < estimated().at_peak.optimizer_state


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_model_is_not_touched_wherever_it_is(device):
    with torch.device(device):
        model = models.Decoder(SPEC)
    before = {name: (id(p), p.device) for name, p in model.named_parameters()}
    found = estimated(model, policy=lowtide.Full())
    assert found.peak_bytes == estimated(policy=lowtide.Full()).peak_bytes
    assert {name: (id(p), p.device) for name, p in model.named_parameters()} == before
    assert all("forward" not in vars(module) for module in model.modules())
    assert not dist.is_initialized()


def test_axes_of_a_mesh_shard_or_replicate():
    one, four = estimated(mesh=1), estimated(mesh=4)
    both = estimated(mesh={"replicate": 2, "shard": 4})
    assert one.at_peak.parameters == 4 * four.at_peak.parameters == 4 * both.at_peak.parameters
    assert (four.world_size, both.world_size) == (4, 8)
    # Replicas sum their gradients besides.
    assert both.time.communication_ms > four.time.communication_ms


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(64, 256, bias=False), "down": nn.Linear(256, 64, bias=False)})
            for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return x


def split(model, mesh):
    plan = {f"layers.{i}.{name}": kind() for i in range(3) for name, kind in
            (("up", ColwiseParallel), ("down", RowwiseParallel))}  # fmt: skip
    parallelize_module(model, mesh, plan)


def products(**options):
    setup = lowtide.TrainSetup(loss=lambda out: out.sum(), threads=1, **options)
    return lowtide.estimate(Products(), torch.zeros(8, 64), setup=setup)


def test_tensor_parallelism_splits_parameters_activations_and_products():
    whole, split_in_4 = products(), products(mesh={"tp": 4}, tensor_parallel=split)
    assert whole.at_peak.parameters == 4 * split_in_4.at_peak.parameters
    assert whole.time.model_flops == 4 * split_in_4.time.model_flops
    assert split_in_4.time.communication_ms > 0
    two = products(mesh={"shard": 2, "tp": 4}, tensor_parallel=split)
    assert (two.world_size, whole.at_peak.parameters) == (8, 8 * two.at_peak.parameters)


def test_what_cannot_be_meant_is_one_clear_error():
    for options, says in (
        ({"mesh": {"rows": 2}}, "axis 'rows' is not known"),
        ({"mesh": {"tp": 2}}, "`tensor_parallel` says nothing"),
        ({"mesh": 0}, "at least 1"),
        ({"optimizer": "lion"}, "optimizer 'lion' is not known"),
        ({"precision": "bfloat16 mixed"}, "give a mesh"),
        ({"device": "H10"}, "Did you mean"),
        ({"mesh": 2, "rank": 2}, "rank 2"),
        ({"mesh": {"replicate": 2}}, "needs shard"),
    ):
        with pytest.raises(UserError, match=says):
            estimated(**options)
    with pytest.raises(PolicyError):
        estimated(policy={"kind": "some_layers", "checkpoint": [9]})


def test_routing_by_values_is_an_error_that_names_the_way_out():
    with pytest.raises(UserError, match="depends on the values of tensors"):
        estimated(models.Decoder(SPEC.but(feed="moe")))


def test_an_operator_without_a_formula_is_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(8, 8))

        def forward(self, x):
            return torch.linalg.inv(x @ self.w)

    setup = lowtide.TrainSetup(threads=1)
    found = lowtide.estimate(Odd(), torch.zeros(8, 8), setup=setup)
    assert any("linalg_inv" in text and "no FLOP formula" in text for text in found.assumptions)
