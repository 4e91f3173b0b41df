"""The model of traces for a config: outline and traces once, then any policy in milliseconds.

    config without policy ─► fake run with empty blocks ─► outline, one trace for each kind of block   (outline_config)
                             policy ─► recipes ─► what each block keeps ─► costs ─► Estimate            (predict_policy)

It tells in moments what ``estimate_config`` finds by running the whole step for each policy; the two agree within 1%
(tests/unit/test_model_of_traces.py). What has no outline (compile, fsdp1) is left to the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.errors import UserError
from lowtide.policy import Block, NoPolicy, RegionRecipe, parse_policy, resolve
from lowtide.prediction import (
    AnyDevice,
    BlockCost,
    Device,
    DeviceProfile,
    RegionChoice,
    block_cost,
    predict_step,
    regions_of,
)
from lowtide.records import Estimate
from lowtide.regions import bare_fqn, find_blocks
from lowtide.tracing import Outlined, fake_building, trace_outline
from lowtide.training.build import build_bare
from lowtide.training.config import TrainConfig
from lowtide.training.estimate import fake_run

__all__ = ["Parts", "outline_config", "predict_policy"]


@dataclass(frozen=True)
class Parts:
    """A config's step in parts."""

    outlined: Outlined
    blocks: tuple[Block, ...]
    modules: Mapping[str, tuple[str, ...]]
    """Names of the modules in each block, relative to it."""
    device: AnyDevice


def outline_config(
    config: TrainConfig,
    *,
    world_size: int = 1,
    rank: int = 0,
    device: str | Device | None = None,
    threads: int | None = None,
    profile: DeviceProfile | None = None,
) -> Parts:
    """Outline the step of ``config``, whatever its policy; arguments as for ``estimate_config``.

    Raises:
        UserError: as ``estimate_config``; the model has no blocks, or one of a form that cannot be stood in for.
        NothingMatchedError: the model has no repeated stack.
    """
    bare = config.model_copy(update={"policy": NoPolicy()})
    arguments = {"world_size": world_size, "rank": rank, "device": device, "threads": threads, "profile": profile}
    with fake_run(bare, **arguments) as run:  # pyright: ignore[reportArgumentType]
        with fake_building(run.mode):
            twin = build_bare(bare)
        blocks = tuple(find_blocks(twin))
        inside = dict(twin.named_modules())
        placed = {bare_fqn(name): module for name, module in run.built.model.named_modules()}
        outlined = trace_outline(
            run.step,
            model=run.built.model,
            blocks={block.fqn: placed[block.fqn] for block in blocks},
            optimizer=run.built.optimizer,
            setup=run.setup,
            templates={block.fqn: inside[block.fqn] for block in blocks},
            names=run.names,
        )
    modules = {b.fqn: tuple(name for name, _ in inside[b.fqn].named_modules() if name) for b in blocks}
    return Parts(outlined, blocks, modules, profile or run.setup.device)


def predict_policy(parts: Parts, policy: object) -> Estimate:
    """Predict the step of an outline under a policy.

    Raises:
        PolicyError: the policy cannot be meant, or matches nothing.
    """
    parsed = parse_policy(policy)
    recipes: dict[str, list[RegionRecipe]] = {}
    for recipe in resolve(parsed, parts.blocks, lambda block: parts.modules[block.fqn]).regions:
        recipes.setdefault(recipe.block.fqn, []).append(recipe)
    executor = "auto" if isinstance(parsed, NoPolicy) else parsed.executor
    outline, known = parts.outlined.outline, {}
    costs: list[BlockCost] = []
    notes: dict[str, None] = {}
    for call in outline.calls:
        trace = parts.outlined.traces[call.kind]
        regions, said = regions_of(trace, recipes.get(call.block, ()), executor)
        notes.update(dict.fromkeys(said))
        key: tuple[str, tuple[RegionChoice, ...]] = (call.kind, regions)
        if key not in known:
            known[key] = block_cost(trace, regions, parts.device, threads=outline.threads)
        costs.append(known[key])
    if isinstance(parsed, NoPolicy) or costs:
        return predict_step(outline, costs, policy=parsed.kind, device=parts.device, assumptions=tuple(notes))
    raise UserError("the outline has no calls of blocks: the model never called them")
