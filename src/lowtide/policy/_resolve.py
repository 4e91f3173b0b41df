"""Policy + blocks -> what happens to each block. Pure: both prediction and ``apply`` use the same recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import NothingMatchedError, PolicyError, listing
from lowtide.policy._kinds import (
    EveryNthLayer,
    Full,
    LayerPolicy,
    NoPolicy,
    SaveRule,
    SelectiveOp,
    SomeLayers,
)


@dataclass(frozen=True)
class Block:
    """A module that can become a region: one repeated layer, or a module that a pattern names."""

    fqn: str
    """Name in the bare model, without segments that wrappers add."""

    stack: str
    """FQN of the container that holds it; empty where it has none."""

    position: int
    """Place in its stack, from 0."""

    @property
    def index(self) -> int:
        """The last numeric segment of the FQN, else the position in the stack.

        A pipeline stage that holds layers 8 to 15 keeps those numbers, and a second model in the process
        starts at 0 again.
        """
        numeric = [part for part in self.fqn.split(".") if part.isdecimal()]
        return int(numeric[-1]) if numeric else self.position


@dataclass(frozen=True)
class RegionRecipe:
    """What happens in one region: which operators' outputs are saved; everything else is recomputed."""

    block: Block
    save: tuple[SaveRule, ...] = ()
    preserve_rng: bool = True
    strict: bool = False
    allow_inexact: bool = False


@dataclass(frozen=True)
class Resolution:
    """What a policy means on a list of blocks."""

    regions: tuple[RegionRecipe, ...]
    untouched: tuple[Block, ...]

    @property
    def total(self) -> int:
        """How many blocks there are, in regions or not."""
        return len(self.regions) + len(self.untouched)


def resolve(policy: NoPolicy | LayerPolicy, blocks: Sequence[Block]) -> Resolution:
    """Decide for each block whether it becomes a region, and with which saves.

    Raises:
        NothingMatchedError: the policy makes regions, and no block is left for it.
        PolicyError: ``some_layers`` lists an index that no block has.
    """
    if isinstance(policy, NoPolicy):
        return Resolution((), tuple(blocks))
    chosen = [b for b in blocks if _chooses(policy, b)]
    if isinstance(policy, SomeLayers) and not isinstance(policy.checkpoint, str):
        _check_indices(policy.checkpoint, blocks)
    if not chosen:
        raise NothingMatchedError(
            f"policy {policy.kind}: none of the {len(blocks)} blocks is chosen "
            f"({listing(b.fqn for b in blocks) or 'there are none'}); use `kind: none` where that is meant"
        )
    save = policy.save if isinstance(policy, SelectiveOp) else ()
    regions = tuple(
        RegionRecipe(
            block=b,
            save=save,
            preserve_rng=policy.preserve_rng,
            strict=policy.determinism == "strict",
            allow_inexact=policy.allow_inexact,
        )
        for b in chosen
    )
    kept = {b.fqn for b in chosen}
    return Resolution(regions, tuple(b for b in blocks if b.fqn not in kept))


def _chooses(policy: LayerPolicy, block: Block) -> bool:
    if isinstance(policy, EveryNthLayer):
        return block.index % policy.n == 0
    if isinstance(policy, SomeLayers):
        share = policy.share()
        if share is not None:
            return block.index % share[1] < share[0]
        assert not isinstance(policy.checkpoint, str)
        return block.index in policy.checkpoint
    assert isinstance(policy, Full | SelectiveOp)
    return True


def _check_indices(wanted: Sequence[int], blocks: Sequence[Block]) -> None:
    present = sorted({b.index for b in blocks})
    missing = [i for i in wanted if i not in present]
    if missing:
        raise PolicyError(
            f"policy some_layers: no block has index {listing(map(str, missing))}; "
            f"indices here: {listing(map(str, present), limit=40) or 'none'}"
        )
