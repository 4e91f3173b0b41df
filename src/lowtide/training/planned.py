"""Plans in a run: made from a config for a limit, read from a file, told to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from lowtide.errors import UserError
from lowtide.plan_record import Plan
from lowtide.planning import Planner, read_plan
from lowtide.policy import LayerPolicy, NoPolicy, PlanPolicy, Rules
from lowtide.prediction import DeviceProfile
from lowtide.training.config import TrainConfig
from lowtide.training.estimate import estimate_config
from lowtide.training.forecast import torch_device_name
from lowtide.training.mesh import Place
from lowtide.training.predict import outline_config
from lowtide.training.ranks import on_main
from lowtide.units import parse_bytes

__all__ = ["Prepared", "plan_config", "prepare", "told"]


def plan_config(
    config: TrainConfig,
    limit_bytes: int,
    *,
    world_size: int,
    rank: int = 0,
    device: str | None = None,
    threads: int | None = None,
    profile: DeviceProfile | None = None,
    executor: Literal["replay", "recompute"] = "replay",
    simulate: bool = True,
) -> Plan:
    """Choose what every layer keeps, so that one training step of a config fits and takes the least time.

    Args:
        config: what would be trained; its policy is left out of account.
        limit_bytes: memory of a process.
        world_size: processes of the run.
        rank: the process that is looked at.
        device: what each process computes on; left out, the profile's or the CPU.
        threads: CPU threads of a process.
        profile: measured speeds of the device.
        executor: what will carry the plan out; each is priced by what it runs.
        simulate: whether the whole step is run under fake tensors with the plan, which is tightened where that needs
            more than was predicted.

    Raises:
        DoesNotFitError: nothing fits.
        UserError: as ``estimate_config``.
    """
    parts = outline_config(config, world_size=world_size, rank=rank, device=device, threads=threads, profile=profile)
    outline = parts.outlined.outline
    planner = Planner(outline, parts.outlined.traces, executor=executor, device=parts.device)
    if not simulate:
        return planner.plan(limit_bytes, outline.environment)

    def simulated(policy: Rules | NoPolicy) -> int:
        changed = config.model_copy(update={"policy": policy})
        return estimate_config(
            changed, world_size=world_size, rank=rank, device=device, threads=threads, profile=profile
        ).peak_bytes

    return planner.plan_simulated(limit_bytes, outline.environment, simulated)


@dataclass(frozen=True)
class Prepared:
    """What rank 0 has before the process group is made: a plan, why there is none, or nothing to plan."""

    plan: Plan | None = None
    error: Exception | None = None


def prepare(config: TrainConfig, place: Place) -> Prepared:
    """Read or make the plan that a config asks for, on rank 0 and before the process group is made.

    Planning runs steps under a fake process group, of which a process has one at a time.
    """
    policy = config.policy
    if not isinstance(policy, PlanPolicy) or place.rank != 0:
        return Prepared()
    try:
        if policy.path is not None:
            return Prepared(read_plan(Path(policy.path)))
        assert policy.limit is not None
        if dist.is_initialized():
            raise UserError(
                f"policy plan: a process group is there already, and to plan for {policy.limit} takes a fake one. Make "
                "the plan first (lowtide plan) and give its `path`"
            )
        limit_bytes, device = parse_bytes(policy.limit), torch_device_name()
        return Prepared(plan_config(config, limit_bytes, world_size=place.world_size, rank=0, device=device))
    except Exception as error:
        # Told to all ranks once they can hear it.
        return Prepared(error=error)


def told(config: TrainConfig, prepared: Prepared) -> NoPolicy | LayerPolicy | Plan:
    """Return a config's policy, on every rank: a plan as rank 0 has it.

    Raises:
        InputError: a plan file that cannot be read.
        DoesNotFitError: nothing fits the limit.
        UserError: as ``plan_config``.
    """
    if not isinstance(config.policy, PlanPolicy):
        return config.policy

    def give() -> str:
        if prepared.error is not None:
            raise prepared.error
        assert prepared.plan is not None
        return prepared.plan.to_json()

    return Plan.from_json(on_main(give))
