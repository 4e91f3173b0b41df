"""Decide which modules become regions, then put the regions in place. Nothing else of the model changes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lowtide.errors import NothingMatchedError, PolicyError, RefusedError, listing
from lowtide.policy import Block, LayerPolicy, NoPolicy, RegionRecipe, Resolution, parse_policy, resolve
from lowtide.regions._discover import Candidate, find_candidates
from lowtide.regions._names import compress_names, slots
from lowtide.regions._refusals import refuse_impossible
from lowtide.regions._region import Region, region_class
from lowtide.regions._session import Session
from lowtide.units import format_bytes


@dataclass(frozen=True)
class Applied:
    """What ``apply`` did.

    Attributes:
        policy: the policy as understood.
        blocks: how many blocks there are, each shared module counted once.
        regions: the checkpointed ones, in order.
    """

    policy: NoPolicy | LayerPolicy
    blocks: int
    regions: tuple[Region, ...]

    def __str__(self) -> str:
        if not self.regions:
            return f"{self.policy.kind}: no block checkpointed"
        names = compress_names([r.fqn for r in self.regions])
        executors = listing(dict.fromkeys(r.executor for r in self.regions))
        blocks = len({r.recipe.block.fqn for r in self.regions})
        inside = "" if blocks == len(self.regions) else f" in {len(self.regions)} regions"
        return (
            f"{self.policy.kind}: {blocks} of {self.blocks} blocks checkpointed{inside} ({names}), executor {executors}"
            f"{self._offload()}"
        )

    def _offload(self) -> str:
        """Say what the last forward put on the host, and why the rest stayed."""
        parkings = [r.parking for r in self.regions if r.parking is not None]
        if not parkings:
            return ""
        reasons = sum((p.reasons() for p in parkings), Counter[str]())
        stayed = "".join(f"; {count} values stayed: {why}" for why, count in reasons.most_common())
        nbytes = sum(p.parked_bytes for p in parkings)
        return f", offload (experimental): {format_bytes(nbytes)} on the host{stayed}"

    def check(self) -> None:
        """Raise if a rule matched no operator in what ran so far.

        In eager code this happens by itself, before the first backward. Under ``torch.compile`` no code of ours runs
        between forward and backward: call it after the first forward.

        Raises:
            NothingMatchedError: names the rule and the nearest operators that ran.
        """
        for session in {id(r.session): r.session for r in self.regions}.values():
            session.check()

    def remove(self) -> None:
        """Give every module the forward that it had before.

        Raises:
            RefusedError: something replaced a region's forward after ``apply``; remove that first.
        """
        for region in self.regions:
            module = region.module
            current = module.__dict__.get("forward")
            if current is None or current is region.replaced:
                continue
            if current is not region:
                raise RefusedError(
                    f"{region.fqn}.forward was replaced after lowtide.apply (by {type(current).__name__}); take that "
                    "away first, then call remove()"
                )
        for region in self.regions:
            if region.module.__dict__.get("forward") is region:
                _put_back(region)


def _put_back(region: Region) -> None:
    if region.replaced is None:
        del region.module.__dict__["forward"]
    else:
        region.module.forward = region.replaced


def apply(model: nn.Module, policy: object) -> Applied:
    """Checkpoint the blocks of ``model`` as ``policy`` says.

    Replaces ``forward`` on each chosen block's instance and nothing else: names, ``state_dict`` keys, classes and
    the modules themselves stay. Gradients stay bitwise those without the policy, or the policy is refused. Applying
    an equal policy again changes nothing.

    Order: ``apply``, then ``block.compile()``, then ``fully_shard``. ``apply`` after ``fully_shard`` works as well.

    Args:
        model: any module; the root, or a part that holds whole blocks.
        policy: a policy (``lowtide.SelectiveOp(save=["sdpa"])``) or a mapping as in YAML.

    Returns:
        What was done, with ``remove()``.

    Raises:
        PolicyError: the policy cannot be meant.
        NothingMatchedError: no block, or a pattern or operator name that matches nothing.
        RefusedError: another policy is applied, or this model in this state cannot keep the promise.
    """
    parsed = parse_policy(policy)
    present = _present_regions(model)
    if present:
        return _again(parsed, present, model)
    if isinstance(parsed, NoPolicy):
        return Applied(parsed, 0, ())
    candidates = find_candidates(model, parsed.layers)
    resolution = resolve(parsed, [c.block for c in candidates], _inside(candidates))
    aliases = _aliases(model, candidates)
    modules = _modules_of_regions(resolution, candidates, aliases)
    recipes = _one_per_module(resolution.regions, modules, aliases)
    for recipe in recipes:
        refuse_impossible(model, recipe, modules[recipe.fqn])
    session = Session(resolution.rules, recipes, parsed.kind)
    regions = [_region(modules[r.fqn], r, parsed, session, aliases) for r in recipes]
    for region in regions:
        region.module.forward = region
    return Applied(parsed, len({id(c.module) for c in candidates}), tuple(regions))


def _region(
    module: nn.Module,
    recipe: RegionRecipe,
    policy: LayerPolicy,
    session: Session,
    aliases: Mapping[int, Sequence[str]],
) -> Region:
    return region_class(type(module))(module, recipe, policy, session, tuple(aliases[id(module)]))


def _inside(candidates: Sequence[Candidate]) -> Callable[[Block], list[str]]:
    """Return what names the modules in a block, relative to it."""
    modules = {c.block.fqn: c.module for c in candidates}

    def names(block: Block) -> list[str]:
        return [slot.fqn for slot in slots(modules[block.fqn]) if slot.fqn]

    return names


def _modules_of_regions(
    resolution: Resolution, candidates: Sequence[Candidate], aliases: dict[int, list[str]]
) -> dict[str, nn.Module]:
    """Map each region's FQN to its module; note further names of modules inside blocks in ``aliases``.

    Raises:
        PolicyError: a rule names a container, which is never called itself.
    """
    blocks = {c.block.fqn: c.module for c in candidates}
    found: dict[str, nn.Module] = {}
    for recipe in resolution.regions:
        block = blocks[recipe.block.fqn]
        if not recipe.module:
            found[recipe.fqn] = block
            continue
        module = next(slot.module for slot in slots(block) if slot.fqn == recipe.module)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise PolicyError(
                f"rules: {recipe.module!r} in {recipe.block.fqn} is a {type(module).__name__}, which is never called "
                f"itself: a region on it would do nothing. Name what is in it: {recipe.module}.*"
            )
        found[recipe.fqn] = module
        names = aliases.setdefault(id(module), [])
        if recipe.fqn not in names:
            names.append(recipe.fqn)
    return found


def _present_regions(model: nn.Module) -> dict[int, Region]:
    found = {id(s.module): s.module.__dict__.get("forward") for s in slots(model)}
    return {key: region for key, region in found.items() if isinstance(region, Region)}


def _again(policy: NoPolicy | LayerPolicy, present: Mapping[int, Region], model: nn.Module) -> Applied:
    """The same policy again is the same as once; another one is refused."""
    regions = list(present.values())
    applied = regions[0].policy
    if policy != applied or any(r.policy != applied for r in regions):
        raise RefusedError(
            f"{listing(r.fqn for r in regions)}: policy {applied.kind!r} is already applied, and "
            f"{policy.kind!r} differs from it. Call remove() on what lowtide.apply returned first"
        )
    candidates = find_candidates(model, applied.layers)
    resolution = resolve(applied, [c.block for c in candidates], _inside(candidates))
    wanted = {id(m) for m in _modules_of_regions(resolution, candidates, _aliases(model, candidates)).values()}
    if wanted != set(present):
        raise RefusedError(
            f"some blocks of this model carry a region already ({listing(r.fqn for r in regions)}) and others that the "
            "policy chooses do not: a block is shared with another model, or blocks were added. Call remove() first"
        )
    return Applied(applied, len({id(c.module) for c in candidates}), tuple(regions))


def _aliases(model: nn.Module, candidates: Sequence[Candidate]) -> dict[int, list[str]]:
    """Map each candidate's module to its places: those that are candidates, and those in any stack of the model."""
    places = {c.block.fqn: c.module for c in candidates}
    with contextlib.suppress(NothingMatchedError):
        places |= {c.block.fqn: c.module for c in find_candidates(model)}
    found: dict[int, list[str]] = {id(c.module): [] for c in candidates}
    for slot in slots(model):
        if slot.fqn in places and id(slot.module) in found:
            found[id(slot.module)].append(slot.fqn)
    return found


def _one_per_module(
    recipes: Sequence[RegionRecipe], modules: Mapping[str, nn.Module], aliases: Mapping[int, Sequence[str]]
) -> list[RegionRecipe]:
    """One recipe for each module; a shared block must be chosen at all of its places or at none."""
    chosen = {r.fqn for r in recipes}
    unique: dict[int, RegionRecipe] = {}
    for recipe in recipes:
        key = id(modules[recipe.fqn])
        left_out = [name for name in aliases[key] if name not in chosen]
        if left_out:
            raise RefusedError(
                f"{recipe.fqn} is the same module as {listing(left_out)}, and the policy chooses only some of "
                "these places: one module cannot be checkpointed at one place and not at another. Choose all or none"
            )
        unique.setdefault(key, recipe)
    return list(unique.values())
