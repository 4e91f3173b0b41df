"""One ordered function that turns a model as built into the model that trains.

    parameters' type ─► policy (lowtide.apply) ─► compile each block ─► shard each block, then the root

The order is what works (torch 2.11 to 2.14): compiled before the policy, a block would hide its operators from
it; sharded before compile, the compiler would trace collectives. ``block.compile()`` changes a block in place, so a
block that several parents hold is compiled once and every parent calls the compiled one.

Embedding, last norm and head stay in the root's unit, so tied weights share one unit, as ``fully_shard`` needs.
Parameters that are tied across units are refused: one of the two would be gathered when the other is not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

from lowtide.api import Applied, apply, as_policy
from lowtide.errors import NothingMatchedError, RefusedError, listing
from lowtide.policy import Full, NoPolicy
from lowtide.regions import find_blocks, slots
from lowtide.training.optim import matrix_names
from lowtide.training.parallelize_kinds import (
    DdpConfig,
    Fsdp1Config,
    Fsdp2Config,
    NoShardingConfig,
    PrecisionConfig,
    Sharding,
)

__all__ = ["Parallelized", "gradient_sync", "parallelize"]

_LOG = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_COMPILE_OPTIONS: Mapping[str, Any] = {"fullgraph": True}


@dataclass(frozen=True)
class Parallelized:
    """A model ready to train, and what was done to it.

    Attributes:
        model: what to call; under fsdp2 and none the model that was given, else a wrapper around it.
        applied: what the policy did.
        compiled: the compiled blocks; a block with several places stands once, under its first name.
        units: the sharded units, ``""`` for the root; empty where nothing is sharded.
        matrices: names of the parameters that weight decay acts on, for the optimizer.
    """

    model: nn.Module
    applied: Applied
    compiled: tuple[str, ...]
    units: tuple[str, ...]
    matrices: frozenset[str]


@dataclass(frozen=True)
class _Unit:
    """One block and all the names of the places that hold it."""

    module: nn.Module
    names: tuple[str, ...]


def parallelize(
    model: nn.Module,
    *,
    policy: object,
    sharding: Sharding,
    precision: PrecisionConfig,
    device: torch.device,
    compile_blocks: bool = False,
    mesh: DeviceMesh | None = None,
    compile_options: Mapping[str, Any] = _COMPILE_OPTIONS,
) -> Parallelized:
    """Move a model to its device, checkpoint, compile and shard it, in this order.

    Args:
        model: as built, with equal weights on every rank (build after the same seed).
        policy: a policy of lowtide, a mapping or a plan.
        sharding: how parameters are split.
        precision: types of parameters, computation and gradient sums.
        device: where this rank computes.
        compile_blocks: whether each block is compiled.
        mesh: the ranks that parameters are split over; left out, all of them.
        compile_options: handed to ``Module.compile``; a graph break in a block is an error by default.

    Raises:
        RefusedError: a combination that would not do what it says; the message names the way out.
        PolicyError: from ``lowtide.apply``.
        NothingMatchedError: there are no blocks to compile.
    """
    _refuse_combinations(sharding, precision, as_policy(policy))
    matrices = matrix_names(model)
    _cast_parameters(model, _DTYPES[precision.parameters])
    is_split = isinstance(sharding, Fsdp2Config | Fsdp1Config)
    if not is_split:
        # Sharding moves one unit after the other, so a model larger than the device can be sharded onto it.
        model.to(device)
    applied = apply(model, policy)
    units = _find_units(model, applied)
    compiled = _compile(model, units, compile_options) if compile_blocks else ()
    if is_split:
        _refuse_ties_across(model, units)
    if isinstance(sharding, Fsdp2Config):
        wrapped = _fsdp2(model, units, sharding, precision, device, mesh)
    elif isinstance(sharding, Fsdp1Config):
        wrapped = _fsdp1(model, units, precision, device)
    elif isinstance(sharding, DdpConfig):
        wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    else:
        wrapped = model
    names = (*(u.names[0] for u in units), "") if is_split else ()
    return Parallelized(wrapped, applied, compiled, names, matrices)


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, enabled: bool) -> Generator[None]:
    """Run forward and backward of one micro-batch with or without summing gradients over ranks.

    For gradient accumulation: off for all micro-batches of a step but the last. Without it, FSDP2 keeps whole
    gradients in the meantime. Both forward and backward belong inside, since DDP decides in forward.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, FullyShardedDataParallel | DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
    else:
        yield


def _refuse_combinations(sharding: Sharding, precision: PrecisionConfig, policy: object) -> None:
    initialized = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if initialized else 1
    if not isinstance(sharding, NoShardingConfig) and not initialized:
        raise RefusedError(
            f"sharding {sharding.kind!r} needs a process group, also for one process: enter "
            f"lowtide.training.mesh.process_group() first"
        )
    if isinstance(sharding, NoShardingConfig) and world_size > 1:
        raise RefusedError(
            f"sharding 'none' with {world_size} processes would train {world_size} models that never meet; use "
            f"fsdp2 or ddp, or one process (--nproc 1)"
        )
    if isinstance(sharding, Fsdp1Config) and not isinstance(policy, NoPolicy | Full):
        raise RefusedError(
            f"sharding 'fsdp1' is the legacy path and takes the policies none and full, not "
            f"{getattr(policy, 'kind', policy)!r}; use fsdp2"
        )
    can_cast = isinstance(sharding, Fsdp2Config | Fsdp1Config)
    if not can_cast and precision.compute != precision.parameters:
        raise RefusedError(
            f"precision: parameters {precision.parameters} with compute {precision.compute} needs sharding fsdp2 "
            f"or fsdp1, which cast as they gather (fsdp2 works with one process too); under {sharding.kind!r} "
            f"both must be the same"
        )


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and leave buffers: rotary frequencies rounded to bfloat16 would misplace far tokens."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _find_units(model: nn.Module, applied: Applied) -> list[_Unit]:
    """Find the blocks, each module once: the repeated stacks, else what the policy's ``layers`` name.

    None is legal for sharding, and said: the model is one unit then.
    """
    try:
        blocks = [block.fqn for block in find_blocks(model)]
    except NothingMatchedError as error:
        blocks = [region.fqn for region in applied.regions]
        told = listing(blocks) if blocks else f"none, so it is one unit ({error})"
        _LOG.info("%s has no repeated stack; its blocks: %s", type(model).__name__, told)
    places: dict[int, list[str]] = {}
    modules: dict[str, nn.Module] = {}
    for slot in slots(model):
        places.setdefault(id(slot.module), []).append(slot.fqn)
        modules[slot.fqn] = slot.module
    once = {id(modules[fqn]): modules[fqn] for fqn in blocks}
    return [_Unit(module, tuple(places[key])) for key, module in once.items()]


def _compile(model: nn.Module, units: list[_Unit], options: Mapping[str, Any]) -> tuple[str, ...]:
    if not units:
        raise NothingMatchedError(
            f"compile: {type(model).__name__} has no repeated blocks to compile; leave `compile` off, or give the "
            f"model a ModuleList of layers"
        )
    for unit in units:
        already = [n for n, m in unit.module.named_modules() if m._compiled_call_impl is not None]
        if already or isinstance(unit.module, torch._dynamo.OptimizedModule):
            inside = ".".join(filter(None, (unit.names[0], already[0] if already else "")))
            raise RefusedError(f"compile: {inside} is compiled already; give the model as it was built")
    for unit in units:
        if len(unit.names) > 1:
            _LOG.info("compile: %s are one module, compiled once for all", listing(unit.names))
        unit.module.compile(**options)
    return tuple(unit.names[0] for unit in units)


def _refuse_ties_across(model: nn.Module, units: list[_Unit]) -> None:
    home = {name: unit.names[0] for unit in units for name in unit.names}
    found: dict[int, dict[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((first for place, first in home.items() if name.startswith(f"{place}.")), "")
        found.setdefault(id(parameter), {}).setdefault(unit, name)
    for places in found.values():
        if len(places) > 1:
            raise RefusedError(
                f"{listing(places.values())} are one parameter and lie in different sharded units "
                f"({listing(p or 'the root' for p in places)}); sharding would gather one without the other. Untie "
                f"them, hold both in one block, or use sharding ddp or none"
            )


def _fsdp2(
    model: nn.Module,
    units: list[_Unit],
    sharding: Fsdp2Config,
    precision: PrecisionConfig,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> nn.Module:
    offload = sharding.cpu_offload and device.type != "cpu"
    options: dict[str, Any] = {
        "mesh": mesh or init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[precision.compute], reduce_dtype=_DTYPES[precision.reduce]
        ),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for unit in units:
        fully_shard(unit.module, reshard_after_forward=sharding.reshard_after_forward, **options)
    # The root's own parameters are used last in forward and first in backward: they stay gathered in between.
    fully_shard(model, reshard_after_forward=False, **options)
    return model


def _fsdp1(model: nn.Module, units: list[_Unit], precision: PrecisionConfig, device: torch.device) -> nn.Module:
    shared = next((u for u in units if len(u.names) > 1), None)
    if shared is not None:
        raise RefusedError(
            f"{listing(shared.names)} are one module; fsdp1 replaces modules by wrappers and would wrap it at one "
            f"place only. Use fsdp2"
        )
    chosen = {id(unit.module) for unit in units}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen),
        mixed_precision=MixedPrecision(param_dtype=_DTYPES[precision.compute], reduce_dtype=_DTYPES[precision.reduce]),
        # On a CPU, too, the device must be named: else FSDP1 looks for an accelerator.
        device_id=device,
        use_orig_params=True,
    )
