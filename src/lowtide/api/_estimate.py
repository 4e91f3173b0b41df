"""``estimate``: memory and time of one training step of any model, on one rank of any mesh, before it runs.

    model (real, meta or fake) ─► a copy on meta ─► tensor parallelism ─► policy ─► fully_shard ─► fake CPU tensors
                               ─► forward, loss, backward, optimizer: twice, the second watched ─► Estimate

Sharding happens on meta, before fake tensors come in: splitting a parameter reads it. The model that is given is not
touched, and nothing is computed or allocated, so any size fits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.api._planned import as_policy
from lowtide.errors import NothingMatchedError, UserError
from lowtide.policy import NoPolicy
from lowtide.prediction import Device, DeviceProfile, find_device
from lowtide.records import Estimate
from lowtide.regions import apply, bare_fqn, find_blocks, slots
from lowtide.tracing import StepSetup, fake_building, fake_world, trace_step

__all__ = ["TrainSetup", "estimate"]

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
_AXES = ("replicate", "shard", "tp")


@dataclass(frozen=True)
class TrainSetup:
    """How a step would be taken, besides the model and its batch."""

    loss: Callable[[Any], Tensor] | None = None
    """Makes a scalar of what the model returns; left out, its ``loss``, else the sum of its first floating result."""

    optimizer: str | Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = "adamw"
    """``adamw``, ``adam`` or ``sgd`` with torch's defaults, what makes one of the parameters, or None."""

    mesh: int | Mapping[Literal["replicate", "shard", "tp"], int] | None = None
    """Processes that parameters are sharded over with FSDP2, or a size for each of ``replicate``, ``shard`` and ``tp``;
    None for one process without sharding."""

    tensor_parallel: Callable[[nn.Module, DeviceMesh], object] | None = None
    """Splits the model (on meta) over the ``tp`` axis: calls ``parallelize_module``. Needed where ``tp`` is above 1."""

    precision: Literal["float32", "bfloat16", "bfloat16 mixed"] = "float32"
    """Type of parameters and computation; ``bfloat16 mixed`` keeps shards in float32 and computes in bfloat16."""

    grad_accumulation: int = 1
    device: str | Device = "cpu"
    """What each process computes on: ``"cpu"`` or a name such as ``"H100"``."""

    profile: DeviceProfile | None = None
    """Measured speeds (``lowtide calibrate``), in place of the table's."""

    threads: int | None = None
    """CPU threads of a process; left out, torch's of now."""

    rank: int = 0
    first_step: bool = False
    """Whether the optimizer's first step is meant, which makes its states, and not the second."""


def estimate(model: nn.Module, inputs: Any, *, policy: object = None, setup: TrainSetup | None = None) -> Estimate:
    """Estimate peak memory and time of one training step, without running it.

    Args:
        model: as built, before ``fully_shard``, on any device (``meta`` too); it is not touched.
        inputs: one rank's batch: a tensor, a tuple of positional or a mapping of keyword arguments, of which only
            shapes and types count.
        policy: a policy of lowtide, or a mapping as in YAML; None for none.
        setup: loss, optimizer, mesh, precision and device.

    Raises:
        UserError: the mesh and the model do not fit, a forward that depends on the values of tensors, a process group
            that exists already, an unknown name.
        PolicyError: the policy cannot be applied to this model.
    """
    setup = setup or TrainSetup()
    sizes = _sizes(setup)
    world_size = math.prod(sizes.values())
    device = find_device(setup.device)
    parsed = as_policy(policy) if policy is not None else NoPolicy()
    _refuse_sharded(model)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if world_size > 1 or setup.mesh is not None:
            stack.enter_context(fake_world(world_size, setup.rank))
        twin = _on_meta(model, setup)
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None
        if sizes.get("tp", 1) > 1:
            _split(twin, mesh, setup)
        apply(twin, parsed)
        if mesh is not None and "shard" in sizes:
            _shard(twin, mesh, sizes, setup)
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        with fake_building(mode):
            twin.to_empty(device="cpu")
        try:
            return _trace(twin, inputs, setup, device, sizes, parsed.kind)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"{type(model).__name__} cannot be estimated: its forward depends on the values of tensors ({error}), "
                "and an estimate has only shapes. Models whose routers gather tokens by expert do so; give the experts "
                "a fixed capacity, or replace them by a dense layer of the same work"
            ) from error


def _sizes(setup: TrainSetup) -> dict[str, int]:
    """Return the size of each axis of the mesh, in the order of the axes."""
    given = {"shard": setup.mesh} if isinstance(setup.mesh, int) else dict(setup.mesh or {})
    unknown = [name for name in given if name not in _AXES]
    if unknown:
        raise UserError(f"mesh: axis {unknown[0]!r} is not known; there are: {', '.join(_AXES)}")
    wrong = [f"{name} {size}" for name, size in given.items() if type(size) is not int or size < 1]
    if wrong:
        raise UserError(f"mesh: {wrong[0]} must be a whole number of at least 1")
    if setup.precision not in ("float32", "bfloat16", "bfloat16 mixed"):
        raise UserError(f"precision {setup.precision!r} is not known: float32, bfloat16 or bfloat16 mixed")
    if setup.precision == "bfloat16 mixed" and not {"shard", "replicate"} & set(given):
        raise UserError("precision 'bfloat16 mixed' is what sharding casts as it gathers: give a mesh (1 is enough)")
    if given.get("tp", 1) > 1 and setup.tensor_parallel is None:
        raise UserError("mesh: tp is above 1, and `tensor_parallel` says nothing of how the model is split")
    if "replicate" in given and "shard" not in given:
        raise UserError("mesh: replicate needs shard beside it (1 is enough): plain replication is DDP's")
    return {name: given[name] for name in _AXES if name in given}


def _refuse_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(f"{name} is sharded already: give the model as it was before, and the mesh in the setup")


def _on_meta(model: nn.Module, setup: TrainSetup) -> nn.Module:
    """Copy the model's modules, with every tensor on meta."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = _meta(value, setup)
    return copy.deepcopy(model, memo).train()


def _meta(tensor: Tensor, setup: TrainSetup) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    dtype = torch.bfloat16 if setup.precision == "bfloat16" and is_parameter else tensor.dtype
    if not tensor.is_floating_point():
        dtype = tensor.dtype
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made


def _split(model: nn.Module, mesh: DeviceMesh | None, setup: TrainSetup) -> None:
    assert mesh is not None
    assert setup.tensor_parallel is not None
    try:
        setup.tensor_parallel(model, mesh["tp"])
    except (ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the model does not fit the mesh {mesh}: {error}") from error


def _shard(model: nn.Module, mesh: DeviceMesh, sizes: Mapping[str, int], setup: TrainSetup) -> None:
    own = mesh["replicate", "shard"] if "replicate" in sizes else mesh["shard"]
    options: dict[str, Any] = {"mesh": own}
    if setup.precision == "bfloat16 mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    try:
        names = [block.fqn for block in find_blocks(model)]
    except NothingMatchedError:
        names = []
    modules = {slot.fqn: slot.module for slot in slots(model)}
    for module in {id(modules[name]): modules[name] for name in names}.values():
        fully_shard(module, **options)
    fully_shard(model, reshard_after_forward=False, **options)


def _trace(
    model: nn.Module, inputs: Any, setup: TrainSetup, device: Device, sizes: Mapping[str, int], policy: str
) -> Estimate:
    optimizer = _optimizer(model, setup, device)
    step = _step(model, inputs, optimizer, setup)
    ranks = math.prod(size for name, size in sizes.items() if name != "tp")
    said = "the first step of a run, which makes the optimizer's states" if setup.first_step else ""
    said = said or "the second step of a run: the first also makes the optimizer's states"
    return trace_step(
        step,
        model=model,
        optimizer=optimizer or (),
        setup=StepSetup(
            device=device,
            world_size=math.prod(sizes.values()),
            rank=setup.rank,
            policy=policy,
            threads=setup.threads or torch.get_num_threads(),
            profile=setup.profile,
            tokens=_tokens(inputs, ranks * setup.grad_accumulation),
            assumptions=(said,),
        ),
        names={module: bare_fqn(name) for name, module in model.named_modules()},
        warm_up=0 if setup.first_step else 1,
    )


def _optimizer(model: nn.Module, setup: TrainSetup, device: Device) -> torch.optim.Optimizer | None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if setup.optimizer is None:
        return None
    if callable(setup.optimizer):
        return setup.optimizer(parameters)
    make = _OPTIMIZERS.get(setup.optimizer.lower())
    if make is None:
        raise UserError(f"optimizer {setup.optimizer!r} is not known; there are: {', '.join(_OPTIMIZERS)}; or give one")
    # torch takes many tensors at once on a GPU by default, and one after the other on a CPU.
    return make(parameters, lr=1e-3, foreach=device.kind != "cpu")


def _step(
    model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer | None, setup: TrainSetup
) -> Callable[[], None]:
    def step() -> None:
        for micro in range(setup.grad_accumulation):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == setup.grad_accumulation - 1)
            batch = tree_map_only(Tensor, _like, inputs)
            if isinstance(batch, Mapping):
                out = model(**batch)
            else:
                out = model(*batch) if isinstance(batch, tuple) else model(batch)
            loss = _loss_of(out, setup) / setup.grad_accumulation
            del out
            loss.backward()
        if optimizer is None:
            model.zero_grad(set_to_none=True)
        else:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _loss_of(out: Any, setup: TrainSetup) -> Tensor:
    if setup.loss is not None:
        return setup.loss(out)
    own = getattr(out, "loss", None)
    if isinstance(own, Tensor):
        return own
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        raise UserError(
            f"the model returned a {type(out).__name__} without a floating-point tensor: give a loss in the setup"
        )
    return leaves[0].float().sum()


def _tokens(inputs: Any, batches: int) -> int | None:
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() >= 2), None)
    return None if first is None else first.shape[0] * first.shape[1] * batches
