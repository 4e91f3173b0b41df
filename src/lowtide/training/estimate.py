"""Memory and time of a config's training step on one rank of any number, before it runs: no GPU, no weights.

    config ─► data (one batch, for its shapes) ─► fake group, fake tensors ─► model, policy, shard, optimizer
           ─► the trainer's own step, twice; the second is watched ─► Estimate

Everything but the tensors is real: it is the step that training runs (``loop.Trainer``), so what is priced is what
will happen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowtide.errors import UserError
from lowtide.prediction import Device, DeviceProfile, find_device
from lowtide.records import Estimate
from lowtide.regions import bare_fqn
from lowtide.tracing import StepSetup, fake_building, fake_world, trace_step
from lowtide.training.build import Built, check_vocabulary
from lowtide.training.checkpoint import Progress
from lowtide.training.config import TrainConfig
from lowtide.training.events import Bus
from lowtide.training.loop import Trainer
from lowtide.training.mesh import World
from lowtide.training.parallelize import parallelize
from lowtide.training.registry import Builder
from lowtide.training.stopping import StopRequest

__all__ = ["FakeRun", "estimate_config", "fake_run"]

_CPU = torch.device("cpu")


def estimate_config(
    config: TrainConfig,
    *,
    world_size: int = 1,
    rank: int = 0,
    device: str | Device | None = None,
    threads: int | None = None,
    profile: DeviceProfile | None = None,
) -> Estimate:
    """Estimate memory and time of one step of ``config`` (the second: the first makes the optimizer's states).

    Args:
        config: what would be trained.
        world_size: processes of the run.
        rank: the one that is looked at; shards differ where sizes do not divide evenly.
        device: what each process would compute on: ``"cpu"`` or a name such as ``"H100"``; left out, the profile's
            device, else ``"cpu"``.
        threads: CPU threads of each process; left out, the config's, else torch's of now.
        profile: measured speeds, in place of the device table's.

    Raises:
        UserError: a process group exists, a device is unknown, sharding is ddp, or the model's forward depends on
            values.
        PolicyError: the policy cannot be applied to this model.
    """
    with fake_run(config, world_size=world_size, rank=rank, device=device, threads=threads, profile=profile) as run:
        return trace_step(
            run.step, model=run.built.model, optimizer=run.built.optimizer, setup=run.setup, names=run.names
        )


@dataclass(frozen=True)
class FakeRun:
    """A training run under fake tensors and a fake process group, ready to take steps."""

    built: Built
    step: Callable[[], object]
    setup: StepSetup
    mode: FakeTensorMode

    @property
    def names(self) -> dict[nn.Module, str]:
        """What the modules are called in the bare model."""
        return {module: bare_fqn(name) for name, module in self.built.model.named_modules()}


@contextmanager
def fake_run(
    config: TrainConfig,
    *,
    world_size: int = 1,
    rank: int = 0,
    device: str | Device | None = None,
    threads: int | None = None,
    profile: DeviceProfile | None = None,
) -> Generator[FakeRun]:
    """Build a run under fake tensors; its steps are taken inside the context. Arguments as for ``estimate_config``.

    Raises:
        UserError: as ``estimate_config``.
    """
    target = _target(config, device, profile)
    builder = Builder()
    # One rank's batch tells all shapes, and a text may be too short for as many ranks as are asked about.
    data: Any = builder.build(config.data, rank=0, world_size=1, seed=config.run.seed)
    batch = next(iter(data.batches()))
    setup = StepSetup(
        device=target,
        world_size=world_size,
        rank=rank,
        threads=threads or config.launch.threads or torch.get_num_threads(),
        policy=config.policy.kind,
        profile=profile,
        tokens=math.prod(batch[0].shape[:2]) * world_size * config.training.grad_accumulation,
        assumptions=_assumptions(config, target.kind),
    )
    with torch.random.fork_rng(devices=[]), fake_world(world_size, rank):
        # A mesh reads the ranks' numbers, which fake tensors do not have.
        mesh = init_device_mesh("cpu", (world_size,))
        try:
            with FakeTensorMode() as mode:
                yield _assemble(config, builder, data, batch, setup, (mode, mesh))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"the step of this config cannot be estimated: its forward depends on the values of tensors ({error}), "
                "and an estimate has only shapes. Models whose routers gather tokens by expert do so"
            ) from error


def _target(config: TrainConfig, device: str | Device | None, profile: DeviceProfile | None) -> Device:
    target = find_device(device or (profile.device if profile else "cpu"))
    if profile is not None and profile.kernels != target.kind:
        raise UserError(
            f"the profile was measured on {profile.device} ({profile.kernels}), and the estimate is for {target.name}: "
            "leave the device out, or give a profile of its own kind"
        )
    if config.sharding.kind == "ddp":
        raise UserError(
            "sharding ddp is not estimated: DistributedDataParallel reads the parameters' memory as it is made, and "
            "fake tensors have none. A step of one process with sharding none needs as much, less DDP's buckets "
            "(as many bytes as the gradients)"
        )
    return target


def _assemble(
    config: TrainConfig,
    builder: Builder,
    data: Any,
    batch: tuple[Tensor, Tensor],
    setup: StepSetup,
    around: tuple[FakeTensorMode, DeviceMesh],
) -> FakeRun:
    mode, mesh = around
    with fake_building(mode):
        model: nn.Module = builder.build(config.model)
        check_vocabulary(model, data)
        parallelized = parallelize(
            model, policy=config.policy, sharding=config.sharding, precision=config.precision, device=_CPU, mesh=mesh
        )
    optimizer: Any = builder.build(config.optimizer, model=parallelized.model, matrices=parallelized.matrices)
    if find_device(setup.device).kind != "cpu":
        _several_tensors_at_once(optimizer)
    built = Built(
        config=config,
        world=World(setup.rank, setup.rank, setup.world_size, _CPU),
        parallelized=parallelized,
        optimizer=optimizer,
        data=data,
        tokens_per_batch=math.prod(batch[0].shape[:2]) * setup.world_size,
        samples_per_batch=batch[0].shape[0] * setup.world_size,
        flops_per_token=0,
    )
    built.model.train()
    trainer = Trainer(built, Bus(), Path(), progress=Progress(0, 0, 0), saved=True, stop=StopRequest())
    batches = _fake_batches(batch)
    return FakeRun(built, lambda: trainer.optimize(1, batches), setup, mode)


def _fake_batches(batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of the same form, on as many storages; made anew each time, as data is."""
    inputs, targets = batch
    shared = inputs.untyped_storage() is targets.untyped_storage()
    while True:
        first = _whole(inputs)
        second = first if shared else _whole(targets)
        yield _view(first, inputs), _view(second, targets)


def _whole(like: Tensor) -> Tensor:
    return torch.empty(like.untyped_storage().nbytes() // like.element_size(), dtype=like.dtype)


def _view(whole: Tensor, like: Tensor) -> Tensor:
    return torch.as_strided(whole, like.shape, like.stride(), like.storage_offset())


def _several_tensors_at_once(optimizer: Any) -> None:
    """On a GPU torch's optimizers take many tensors at once by default, which needs memory for the results."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _assumptions(config: TrainConfig, kind: str) -> tuple[str, ...]:
    found = ["the second step of a run: the first also makes the optimizer's states"]
    if config.sharding.kind == "fsdp1":
        found.append("fsdp1's estimate was never compared with a run; fsdp2's and that of no sharding were")
    if config.compile:
        found.append("compile is on and was left out: compiled blocks usually need less")
    if kind == "cpu":
        found.append("bytes that the host's allocator hands out; the interpreter and libraries are not among them")
    else:
        found += [
            "bytes allocated; the caching allocator reserves more (rounding, fragments), and the device's context, "
            "NCCL's buffers and cuBLAS' workspace come on top",
            "not yet compared with a real GPU",
        ]
    return tuple(found)
