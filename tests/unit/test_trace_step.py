"""A whole step under fake tensors: live bytes by category, and the peak, against what a real step does."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.errors import UserError
from lowtide.measurement import measure_peak
from lowtide.tracing import StepSetup, fake_building, fake_world, trace_step
from lowtide.tracing._libraries import NOT_PACKED
from tests.helpers import families, models
from tests.helpers.models import Spec

SPEC = Spec(d=64, hidden=96, layers=3, length=32, batch=2)


def assemble(spec=SPEC, *, policy=None, family=None):
    """Model, optimizer and step, the same with real and with fake tensors."""
    model = models.Decoder(spec).to(spec.dtype).train() if family is None else families.build(family)
    if policy is not None:
        lowtide.apply(model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        tokens = torch.zeros(spec.batch, spec.length, dtype=torch.int64)
        loss = models.loss_of(families.logits_of(model, tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def estimated(**options):
    setup = options.pop("setup", None)
    with FakeTensorMode() as mode:
        with fake_building(mode):
            model, optimizer, step = assemble(**options)
        return trace_step(step, model=model, optimizer=optimizer, setup=setup)


def measured(**options):
    model, optimizer, step = assemble(**options)
    step()
    return measure_peak(step, static=(model, optimizer), device="cpu", processes=1).bytes


@pytest.mark.parametrize(
    "policy", [None, lowtide.Full(), lowtide.EveryNthLayer(n=2), lowtide.SelectiveOp(save=["matmul"])], ids=str
)
@pytest.mark.parametrize("spec", [SPEC, SPEC.but(dropout=0.2, bias=True)], ids=["plain", "dropout"])
def test_the_peak_is_that_of_the_allocator(policy, spec):
    estimate = estimated(spec=spec, policy=policy)
    real = measured(spec=spec, policy=policy)
    assert abs(estimate.peak_bytes - real) <= 0.001 * real


def test_a_hugging_face_model_takes_the_way_of_real_tensors():
    estimate = estimated(family="llama", spec=SPEC.but(vocab=64))
    real = measured(family="llama", spec=SPEC.but(vocab=64))
    assert abs(estimate.peak_bytes - real) <= 0.001 * real
    assert NOT_PACKED in estimate.assumptions


def test_what_is_there_before_is_counted_by_what_it_is_for():
    estimate = estimated()
    model, optimizer, step = assemble()
    step()
    parameters = sum(p.nbytes for p in model.parameters())
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert estimate.at_peak.parameters == parameters
    assert estimate.at_peak.optimizer_state == states
    assert estimate.category_peaks.gradients == parameters
    assert estimate.category_peaks.communication == 0
    # Token ids, the model's input and the loss's target at once.
    assert estimate.category_peaks.inputs == 2 * 32 * 8


def test_saved_activations_are_what_forward_keeps():
    from lowtide.measurement import measure_saved_bytes

    model, _, _ = assemble()
    tokens = torch.zeros(2, 32, dtype=torch.int64)

    def forward():
        return model(tokens)

    kept = measure_saved_bytes(model, forward, [f"layers.{i}" for i in range(3)]).total_bytes
    assert estimated().category_peaks.saved_activations == kept


def test_checkpointing_moves_bytes_from_saved_to_transient():
    none, full = estimated(), estimated(policy=lowtide.Full())
    assert full.category_peaks.saved_activations < none.category_peaks.saved_activations / 3
    assert full.category_peaks.transient > none.category_peaks.transient
    assert full.peak_bytes < none.peak_bytes


def test_the_timeline_runs_through_the_phases_and_holds_the_peak():
    estimate = estimated()
    phases = [point.phase for point in estimate.timeline]
    changes = [b for a, b in itertools.pairwise(phases) if a != b]
    assert [phases[0], *changes] == ["forward", "backward", "optimizer"]
    assert max(point.live.total for point in estimate.timeline) == estimate.peak_bytes
    assert [point.event for point in estimate.timeline] == sorted(point.event for point in estimate.timeline)
    assert estimate.timeline[-1].live.gradients == 0


def test_what_was_alive_at_the_peak_adds_up_and_names_modules():
    estimate = estimated()
    by_category = dict.fromkeys(estimate.at_peak.as_dict(), 0)
    for row in estimate.alive_at_peak:
        by_category[row.category] += row.nbytes
    assert sum(by_category.values()) <= estimate.peak_bytes
    assert by_category["saved_activations"] > 0.9 * estimate.at_peak.saved_activations
    assert {"layers.0.feed", "layers.1.attention"} <= {row.module for row in estimate.alive_at_peak}


def test_backward_and_recompute_are_put_down_to_the_modules_they_belong_to():
    estimate = estimated(policy=lowtide.Full())
    assert estimate.peak_phase == "backward"
    assert estimate.peak_module.startswith("layers.")


def test_nothing_of_torch_stays_changed():
    before = (torch.UntypedStorage.resize_, torch.get_rng_state, torch.utils.swap_tensors)
    assert "resize_" not in vars(torch.UntypedStorage)
    estimated()
    assert "resize_" not in vars(torch.UntypedStorage)
    assert (torch.UntypedStorage.resize_, torch.get_rng_state, torch.utils.swap_tensors) == before
    assert not torch.nn.modules.module._global_forward_hooks
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks


def sharded(world_size, rank=0):
    with fake_world(world_size, rank):
        mesh = init_device_mesh("cpu", (world_size,))
        with FakeTensorMode() as mode:
            with fake_building(mode):
                model = models.Decoder(SPEC).train()
            for block in model.layers:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
            optimizer = torch.optim.AdamW(model.parameters())

            def step():
                tokens = torch.zeros(SPEC.batch, SPEC.length, dtype=torch.int64)
                models.loss_of(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()

            setup = StepSetup(world_size=world_size, rank=rank)
            return trace_step(step, model=model, optimizer=optimizer, setup=setup)


def test_shards_gradients_and_states_shrink_with_the_group_and_gathered_parameters_do_not():
    two, eight = sharded(2), sharded(8)
    assert not dist.is_initialized()
    for category in ("parameters", "gradients"):
        assert getattr(two.category_peaks, category) == 4 * getattr(eight.category_peaks, category)
    assert two.world_size == 2
    whole_block = sum(p.numel() for p in models.Block(SPEC).parameters()) * 4
    assert two.category_peaks.communication > 2 * whole_block
    assert eight.peak_bytes < two.peak_bytes


def test_uneven_shards_differ_between_ranks():
    first, last = sharded(7, rank=0), sharded(7, rank=6)
    assert first.category_peaks.parameters >= last.category_peaks.parameters


def test_a_rank_that_is_not_there_and_a_group_that_is_are_errors():
    with (
        pytest.raises(UserError, match="rank 2 must be at least 0 and below the number of processes, 2"),
        fake_world(2, 2),
    ):
        pass
    with fake_world(2), pytest.raises(UserError, match="a process group exists"), fake_world(2):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize("policy", [None, lowtide.EveryNthLayer(n=2), lowtide.SelectiveOp(save=["sdpa"])], ids=str)
def test_a_gpu_target_runs_its_own_kernels_in_recompute_too(policy):
    spec = SPEC.but(dropout=0.125, dtype=torch.bfloat16)
    gpu = estimated(spec=spec, policy=policy, setup=StepSetup(device="H100"))
    assert gpu.device == "H100"
    assert any("attention on H100 runs the cudnn kernel" in text for text in gpu.assumptions)
    # A CPU has no fused attention with dropout and keeps the scores.
    assert gpu.peak_bytes < estimated(spec=spec).peak_bytes


def test_gradients_alive_before_the_step_are_static():
    with FakeTensorMode() as mode:
        with fake_building(mode):
            model = nn.Linear(64, 64, bias=False)
        model.weight.grad = torch.zeros(64, 64)

        def step():
            model(torch.zeros(8, 64)).sum().backward()

        estimate = trace_step(step, model=model, warm_up=0)
    assert estimate.category_peaks.gradients == 64 * 64 * 4
