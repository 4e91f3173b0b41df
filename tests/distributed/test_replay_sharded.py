"""Replay on two gloo ranks: FSDP2 in both orders and precisions, accumulation, offload, FSDP1, DDP; what falls back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import families, law, models
from tests.helpers.sharded import WRAPS, fsdp2, ranked_seed, ranked_step

FULL = {"kind": "full", "executor": "replay"}
PRODUCTS = {"kind": "selective_op", "executor": "replay", "save": [{"op": "matmul", "keep": "1/2"}]}


def _offloaded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    for block in families.blocks(model):
        fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _nested_units(model: nn.Module) -> nn.Module:
    """FSDP units inside of blocks: their collectives run inside regions."""
    from torch.distributed.fsdp import fully_shard

    for block in families.blocks(model):
        fully_shard(block.feed)
    return fsdp2(model)


def _accumulated(model: Any, i: int) -> Tensor:
    """Three microbatches; gradients are reduced after the last."""
    total = torch.zeros(())
    for j in range(3):
        model.set_requires_gradient_sync(j == 2)
        total = total + ranked_step(model, 3 * i + j).detach()
    return total


LAYOUTS = {**WRAPS, "offloaded": _offloaded, "nested": _nested_units}


def _check(layout: str, family: str, accumulate: bool) -> tuple[dict[str, list[str]], list[str]]:
    options = {"wrap": LAYOUTS[layout], "seed": ranked_seed(), "steps": 2}
    step = _accumulated if accumulate else ranked_step
    build = families.builder(family, torch.float32, True)
    control = law.check_control(build, step, **options)
    found: dict[str, list[str]] = {}
    reasons: set[str] = set()
    for name, policy in (("full", FULL), ("products", PRODUCTS)):
        for last in (False, True):
            outcome = law.run_steps(build, step, policy, apply_last=last, **options)
            found[f"{name}, applied {'after' if last else 'before'}"] = law.differences(control, outcome)
            reasons |= {f"{r.executor}: {r.reason}" for r in outcome.applied.regions}
    return found, sorted(reasons)


@pytest.mark.parametrize(
    ("layout", "family", "accumulate"),
    [
        ("fsdp2", "decoder", False),
        ("fsdp2-bfloat16", "llama", False),
        ("fsdp2-bfloat16", "decoder", True),
        ("fsdp2", "gpt2", True),
        ("fsdp2-kept", "qwen3", True),
        ("offloaded", "decoder", False),
        ("ddp", "gemma", False),
        ("fsdp1", "decoder", False),
        ("fsdp1-bfloat16", "decoder", False),
    ],
)
def test_exact_and_replayed(run_on, layout, family, accumulate):
    for found, reasons in run_on(2, _check, layout, family, accumulate, preload=("transformers",)):
        assert {k: v for k, v in found.items() if v} == {}
        assert reasons == ["replay: asked for"]


def test_sharded_units_inside_a_region_are_handed_to_recompute_by_name(run_on):
    for found, reasons in run_on(2, _check, "nested", "decoder", False):
        assert {k: v for k, v in found.items() if v} == {}
        assert all(r.startswith("recompute: not replayed: fsdp.") or "c10d" in r for r in reasons), reasons


def _tensor_parallel() -> list[str]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import lowtide

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def run(policy: Any) -> tuple[dict[str, Tensor], list[str]]:
        model = models.build()
        reasons: list[str] = []
        regions = () if policy is None else lowtide.apply(model, policy).regions
        for block in model.layers:
            plan = {"feed.gate": ColwiseParallel(), "feed.up": ColwiseParallel(), "feed.down": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
        for i in range(2):
            families.spec_step(model, i)
        reasons = [f"{r.executor}: {r.reason}" for r in regions]
        return {n: law.local(p.grad) for n, p in model.named_parameters() if p.grad is not None}, reasons

    control, _ = run(None)
    found, reasons = run(FULL)
    assert [n for n in control if not law.same_bits(control[n], found[n])] == []
    return reasons


def test_tensor_parallel_is_exact(run_on):
    for reasons in run_on(2, _tensor_parallel):
        assert len(reasons) == 3
        assert all("DTensor" in r or "collective" in r for r in reasons), reasons
