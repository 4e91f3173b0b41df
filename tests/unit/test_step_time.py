"""Time and utilisation of a whole step: products counted exactly, recompute in hardware FLOPs only."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.prediction import DeviceProfile, RatePoint, collective_ms, peak_flops
from lowtide.tracing import StepSetup, fake_building, fake_world, trace_step
from tests.unit.test_prediction_time import ENVIRONMENT, profile
from tests.unit.test_trace_step import SPEC, estimated

H100 = StepSetup(device="H100", tokens=1000)


def linears(sizes, batch, *, frozen=(), setup=H100):
    with FakeTensorMode() as mode:
        with fake_building(mode):
            layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)]
            for i in frozen:
                layers[i].weight.requires_grad_(False)
            model = nn.Sequential(*layers)
        return trace_step(lambda: model(torch.zeros(batch, sizes[0])).sum().backward(), model=model, setup=setup)


def test_model_flops_are_those_of_the_products_and_of_the_gradients_that_are_asked_for():
    time = linears([8, 16, 32], 4).time
    first, second = 2 * 4 * 8 * 16, 2 * 4 * 16 * 32
    # The input needs no gradient, so the first layer has one product in backward.
    assert time.model_flops == 2 * first + 3 * second == time.hardware_flops
    frozen = linears([8, 16, 32], 4, frozen=[0]).time
    assert frozen.model_flops == first + 2 * second == frozen.hardware_flops


@pytest.mark.parametrize("executor", ["recompute", "replay"])
def test_recompute_counts_in_hardware_flops_only(executor):
    none, full = (estimated(policy=policy).time for policy in (None, lowtide.Full(executor=executor)))
    assert full.model_flops == none.model_flops
    assert full.hardware_flops > none.hardware_flops >= none.model_flops
    assert full.hfu > full.mfu
    assert full.backward_ms > none.backward_ms
    assert full.forward_ms == pytest.approx(none.forward_ms, rel=0.05)


def test_utilisation_is_the_share_of_the_peak_in_the_time_of_the_step():
    time = linears([4096, 4096], 4096).time
    assert time.step_ms == pytest.approx(time.forward_ms + time.backward_ms + time.optimizer_ms)
    assert time.mfu == pytest.approx(time.model_flops / peak_flops("H100", "float32") / (time.step_ms / 1000))
    assert 0 < time.mfu < 1
    assert time.tokens_per_s == pytest.approx(1000 / time.step_ms * 1000)


def test_a_profile_takes_the_place_of_the_table_and_is_named():
    slow = DeviceProfile(
        device="cpu",
        kernels="cpu",
        rates=tuple(RatePoint(operators=k, dtype="float32", size=1, per_s=1e6) for k in ("matmul", "pointwise")),
        operator_us=0,
        view_us=0,
        environment=ENVIRONMENT,
    )
    found = linears([64, 64], 64, setup=StepSetup(profile=slow))
    # Products are bound by operations at these speeds, and one operation takes a microsecond.
    assert found.time.step_ms >= found.time.hardware_flops / 1e6 * 1000
    assert "speeds are those measured on cpu (1 thread(s)) by lowtide calibrate" in found.assumptions
    nominal = linears([64, 64], 64, setup=StepSetup())
    assert any("nominal CPU core" in text for text in nominal.assumptions)


def sharded(device):
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        with FakeTensorMode() as mode:
            with fake_building(mode):
                model = nn.Linear(64, 64, bias=False)
            fully_shard(model, mesh=mesh)

            def step():
                model(torch.zeros(2, 64)).sum().backward()

            return trace_step(step, model=model, setup=StepSetup(device=device, world_size=4)).time


def test_sharding_communicates_what_fsdp_sends_and_hides_it_on_a_gpu_only():
    gpu, cpu = sharded("H100"), sharded("cpu")
    nbytes = 64 * 64 * 4
    for device, time in (("H100", gpu), ("cpu", cpu)):
        # The root keeps its parameters after forward: one gather, one reduction.
        expected = sum(collective_ms(k, nbytes, ranks=4, device=device) for k in ("all_gather", "reduce_scatter"))
        assert time.communication_ms == pytest.approx(expected)
    assert cpu.forward_ms > cpu.communication_ms / 2
    assert cpu.step_ms > cpu.communication_ms
    gather = collective_ms("all_gather", nbytes, ranks=4, device="H100")
    assert gather <= gpu.forward_ms < gather + 0.1


def test_a_gpus_allocator_hands_out_and_counts_multiples_of_512_bytes():
    on_cpu, on_gpu = (linears([3, 5], 2, setup=StepSetup(device=device)) for device in ("cpu", "H100"))
    assert on_gpu.at_peak.parameters == 512
    assert on_cpu.at_peak.parameters == 3 * 5 * 4
    assert on_gpu.peak_bytes % 512 == 0


def test_the_optimizer_takes_its_bytes():
    time = estimated(setup=StepSetup(profile=profile())).time
    assert time.optimizer_ms > 0
    assert estimated(spec=SPEC.but(layers=6), setup=StepSetup(profile=profile())).time.optimizer_ms > time.optimizer_ms
