"""``plan``: what every layer of a model keeps, so that a training step fits a limit in the least time."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from lowtide.api._estimate import (
    TrainSetup,
    _on_meta,
    _optimizer,
    _refuse_sharded,
    _shard,
    _sizes,
    _step,
    _tokens,
    estimate,
)
from lowtide.errors import UserError
from lowtide.plan_record import Plan
from lowtide.planning import Planner
from lowtide.prediction import find_device
from lowtide.regions import bare_fqn, find_blocks, slots
from lowtide.tracing import Outlined, StepSetup, fake_building, fake_world, trace_outline
from lowtide.units import parse_bytes

__all__ = ["plan"]


def plan(
    model: nn.Module,
    inputs: Any,
    *,
    limit: str | int,
    setup: TrainSetup | None = None,
    executor: Literal["replay", "recompute"] = "replay",
    simulate: bool = True,
) -> Plan:
    """Choose what every layer keeps and recomputes, so that one training step fits and takes the least time.

    Args:
        model: as built, before ``fully_shard``, on any device (``meta`` too); it is not touched.
        inputs: one rank's batch, as for ``estimate``.
        limit: memory of a process, such as ``"80GiB"`` or bytes.
        setup: loss, optimizer, mesh, precision and device.
        executor: what will carry the plan out; each is priced by what it runs.
        simulate: whether the whole step is run under fake tensors with the plan, and the plan tightened where that
            needs more than was predicted.

    Returns:
        The plan; ``lowtide.planning.policy_of`` makes the policy that carries it out.

    Raises:
        DoesNotFitError: nothing fits; the message has the least possible peak, what holds it up, and what helps.
        NothingMatchedError: the model has no repeated stack.
        UserError: as ``estimate``; tensor parallelism, under which a block cannot be traced.
    """
    setup = setup or TrainSetup()
    limit_bytes = parse_bytes(limit)
    if _sizes(setup).get("tp", 1) > 1:
        raise UserError("a plan needs a trace of each block, and under tensor parallelism none can be made yet")
    outlined = _outlined(model, inputs, setup)
    device = setup.profile or setup.device
    planner = Planner(outlined.outline, outlined.traces, executor=executor, device=device)
    if not simulate:
        return planner.plan(limit_bytes, outlined.outline.environment)
    return planner.plan_simulated(
        limit_bytes,
        outlined.outline.environment,
        lambda policy: estimate(model, inputs, policy=policy, setup=setup).peak_bytes,
    )


def _outlined(model: nn.Module, inputs: Any, setup: TrainSetup) -> Outlined:
    sizes = _sizes(setup)
    _refuse_sharded(model)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if sizes:
            stack.enter_context(fake_world(math.prod(sizes.values()), setup.rank))
        twin, bare = _on_meta(model, setup), _on_meta(model, setup)
        if setup.precision == "bfloat16 mixed":
            bare = bare.to(torch.bfloat16)
        if sizes:
            _shard(twin, init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)), sizes, setup)
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        with fake_building(mode):
            twin.to_empty(device="cpu")
            bare.to_empty(device="cpu")
        try:
            return _trace(twin, bare, inputs, setup)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"{type(model).__name__} cannot be planned: its forward depends on the values of tensors ({error}), "
                "and a plan has only shapes"
            ) from error


def _trace(twin: nn.Module, bare: nn.Module, inputs: Any, setup: TrainSetup) -> Outlined:
    device = find_device(setup.device)
    optimizer = _optimizer(twin, setup, device)
    names = [block.fqn for block in find_blocks(bare)]
    placed = {slot.fqn: slot.module for slot in slots(twin)}
    templates = {slot.fqn: slot.module for slot in slots(bare)}
    world_size = math.prod(_sizes(setup).values())
    return trace_outline(
        _step(twin, inputs, optimizer, setup),
        model=twin,
        blocks={name: placed[name] for name in names},
        optimizer=optimizer or (),
        setup=StepSetup(
            device=device,
            world_size=world_size,
            rank=setup.rank,
            threads=setup.threads or torch.get_num_threads(),
            profile=setup.profile,
            tokens=_tokens(inputs, world_size * setup.grad_accumulation),
        ),
        templates={name: templates[name] for name in names},
        names={module: bare_fqn(name) for name, module in twin.named_modules()},
    )
