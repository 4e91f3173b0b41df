"""Policy + blocks -> what happens to each block. Pure: both prediction and ``apply`` use the same recipes.

Every kind comes down to rules (``rules_of``): a default and an ordered list. For each block the rules that count in
it are sorted out: those of other layers go, conditions that hold everywhere in the region go, and what stands behind
a rule that matches everything goes. Under ``default: save`` the region shrinks to the modules in which something is
recomputed, and a block in which nothing is becomes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lowtide.errors import NothingMatchedError, PolicyError, listing, nearest
from lowtide.policy._kinds import (
    EveryNthLayer,
    Full,
    LayerPolicy,
    MemoryBudget,
    NoPolicy,
    SelectiveOp,
    SomeLayers,
)
from lowtide.policy._match import match_fqns
from lowtide.policy._rules import Rule, Rules

__all__ = ["Block", "RegionRecipe", "Resolution", "expand", "resolve", "rules_of"]

Default = Literal["save", "recompute"]
Inside = Callable[["Block"], Sequence[str]]
"""Names of the modules in a block, relative to it, without the block itself."""


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
    """What happens in one region."""

    block: Block

    module: str = ""
    """Name, relative to the block, of the module that becomes the region; empty for the block itself."""

    default: Default = "recompute"
    """What happens to what no rule matches."""

    rules: tuple[tuple[int, Rule], ...] = ()
    """(number in the policy, rule) of those that count here, in order. Their layers are the right ones already, and a
    condition on modules stands only where it holds in a part of the region."""

    preserve_rng: bool = True
    strict: bool = False
    allow_inexact: bool = False

    budget: float | None = None
    """Share of its own choice that the compiler may save, where it chooses."""

    @property
    def fqn(self) -> str:
        """Name of the module that becomes the region."""
        return f"{self.block.fqn}.{self.module}" if self.module else self.block.fqn

    @property
    def selects(self) -> bool:
        """Whether something is saved besides inputs: operators must be seen."""
        return bool(self.rules) or self.default == "save"


@dataclass(frozen=True)
class Resolution:
    """What a policy means on a list of blocks."""

    regions: tuple[RegionRecipe, ...]
    untouched: tuple[Block, ...]
    rules: tuple[Rule, ...] = ()
    """All rules of the policy, in order."""

    @property
    def total(self) -> int:
        """How many blocks there are, in regions or not."""
        return len({r.block.fqn for r in self.regions}) + len(self.untouched)


def rules_of(policy: LayerPolicy) -> tuple[Default, tuple[Rule, ...]]:
    """Return a policy's default and rules; which blocks it chooses is another question (``expand``)."""
    if isinstance(policy, Rules):
        return policy.default, policy.rules
    if isinstance(policy, SelectiveOp):
        return "recompute", tuple(
            Rule(op=rule.op, action="save", keep=rule.keep, optional=rule.optional) for rule in policy.save
        )
    return "recompute", ()


def expand(policy: LayerPolicy, blocks: Sequence[Block]) -> Rules:
    """Write a policy as ``rules``; the two resolve to the same regions on these blocks.

    Raises:
        PolicyError: a memory budget, which leaves the choice to the compiler.
    """
    if isinstance(policy, Rules):
        return policy
    if isinstance(policy, MemoryBudget):
        raise PolicyError("policy memory_budget: the compiler chooses, so there are no rules to write it as")
    default, rules = rules_of(policy)
    left_out = tuple(b.fqn for b in blocks if not _chooses(policy, b))
    spared = (Rule(layers=left_out, action="none"),) if left_out else ()
    common = {name: getattr(policy, name) for name in Rules.model_fields if name not in ("kind", "default", "rules")}
    return Rules(**common, default=default, rules=(*spared, *rules))


def resolve(policy: NoPolicy | LayerPolicy, blocks: Sequence[Block], inside: Inside | None = None) -> Resolution:
    """Decide for each block whether it becomes a region, or modules in it do, and under which rules.

    Args:
        policy: the policy.
        blocks: the blocks of the model.
        inside: names the modules of a block; needed by rules on modules.

    Raises:
        NothingMatchedError: the policy makes regions, and no block is left for it; or a rule's pattern matches nothing.
        PolicyError: ``some_layers`` lists an index that no block has, or a rule can never decide anything.
    """
    if isinstance(policy, NoPolicy):
        return Resolution((), tuple(blocks))
    if isinstance(policy, SomeLayers) and not isinstance(policy.checkpoint, str):
        _check_indices(policy.checkpoint, blocks)
    default, rules = rules_of(policy)
    in_layers = _by_layers(rules, blocks)
    found = _Found(rules, inside)
    regions: list[RegionRecipe] = []
    for block in blocks:
        if not _chooses(policy, block):
            continue
        active = [(i, rule) for i, rule in enumerate(rules) if block.fqn in in_layers[i]]
        if any(rule.action == "none" for _, rule in active):
            continue
        for module, own_default, own in found.regions(block, default, active):
            regions.append(
                RegionRecipe(
                    block=block,
                    module=module,
                    default=own_default,
                    rules=own,
                    preserve_rng=policy.preserve_rng,
                    strict=policy.determinism == "strict",
                    allow_inexact=policy.allow_inexact,
                    budget=policy.fraction if isinstance(policy, MemoryBudget) else None,
                )
            )
    found.check()
    if not regions:
        raise NothingMatchedError(
            f"policy {policy.kind}: none of the {len(blocks)} blocks is chosen "
            f"({listing(b.fqn for b in blocks) or 'there are none'}); use `kind: none` where that is meant"
        )
    touched = {r.block.fqn for r in regions}
    return Resolution(tuple(regions), tuple(b for b in blocks if b.fqn not in touched), rules)


def _chooses(policy: LayerPolicy, block: Block) -> bool:
    if isinstance(policy, EveryNthLayer):
        return block.index % policy.n == 0
    if isinstance(policy, SomeLayers):
        share = policy.share()
        if share is not None:
            return block.index % share[1] < share[0]
        assert not isinstance(policy.checkpoint, str)
        return block.index in policy.checkpoint
    assert isinstance(policy, Full | SelectiveOp | Rules | MemoryBudget)
    return True


def _check_indices(wanted: Sequence[int], blocks: Sequence[Block]) -> None:
    present = sorted({b.index for b in blocks})
    missing = [i for i in wanted if i not in present]
    if missing:
        raise PolicyError(
            f"policy some_layers: no block has index {listing(map(str, missing))}; "
            f"indices here: {listing(map(str, present), limit=40) or 'none'}"
        )


def _by_layers(rules: Sequence[Rule], blocks: Sequence[Block]) -> list[set[str]]:
    """For each rule, the blocks in which it counts."""
    names = [b.fqn for b in blocks]
    found: list[set[str]] = []
    for i, rule in enumerate(rules):
        if rule.layers is None:
            found.append(set(names))
            continue
        matched = match_fqns(rule.layers, names)
        for pattern, hits in matched.items():
            if not hits and not rule.optional:
                near = nearest(pattern, names, count=5) or names
                raise NothingMatchedError(
                    f"rules.{i}.layers: {pattern!r} matches no block; blocks: {listing(near)}. Patterns match whole "
                    "names, segment by segment: model.layers.{0-7}. Set optional: true where that may be"
                )
        found.append({name for hits in matched.values() for name in hits})
    return found


class _Found:
    """Sorts out the rules of each block, and sees which patterns on modules matched somewhere."""

    def __init__(self, rules: Sequence[Rule], inside: Inside | None) -> None:
        self._rules = rules
        self._inside = inside
        self._unmatched = {(i, p) for i, rule in enumerate(rules) if not rule.optional for p in rule.modules or ()}
        self._counted: set[int] = set()
        self._seen: dict[str, None] = {}

    def regions(
        self, block: Block, default: Default, active: Sequence[tuple[int, Rule]]
    ) -> list[tuple[str, Default, tuple[tuple[int, Rule], ...]]]:
        """Return the regions in one block: (module, default, rules)."""
        matched = self._modules(block, active)
        acting = [(i, rule) for i, rule in active if rule.recomputes]
        roots = [""]
        if default == "save" and all(rule.modules is not None for _, rule in acting):
            roots = _outermost(name for i, _ in acting for name in matched[i])
        found = [(root, *_simplified(root, default, active, matched)) for root in roots]
        # Where all is saved, there is nothing to do.
        return [(r, d, own) for r, d, own in found if d == "recompute" or any(rule.recomputes for _, rule in own)]

    def _modules(self, block: Block, active: Sequence[tuple[int, Rule]]) -> dict[int, list[str]]:
        """For each rule with a condition on modules, those of the block that it matches."""
        conditioned = [(i, rule.modules) for i, rule in active if rule.modules is not None]
        if not conditioned:
            return {}
        if self._inside is None:
            raise PolicyError("rules on modules need to know the modules of each block")
        names = list(self._inside(block))
        self._seen.update(dict.fromkeys(names))
        found: dict[int, list[str]] = {}
        for i, patterns in conditioned:
            self._counted.add(i)
            matched = match_fqns(patterns, names)
            self._unmatched -= {(i, pattern) for pattern, hits in matched.items() if hits}
            hits = {name for some in matched.values() for name in some}
            found[i] = [name for name in names if name in hits]
        return found

    def check(self) -> None:
        """Raise where a pattern on modules matched in no block in which its rule counts."""
        for i, pattern in sorted(self._unmatched):
            if i not in self._counted:
                continue
            names = list(self._seen)
            near = nearest(pattern, names, count=5) or names
            raise NothingMatchedError(
                f"rules.{i}.modules: {pattern!r} matches no module in any block; names are relative to the block, and "
                f"match as a whole, segment by segment; nearest: {listing(near) or 'there are none'}. Set optional: "
                "true where that may be"
            )


def _outermost(names: Iterable[str]) -> list[str]:
    """Leave out what lies inside another name."""
    kept: list[str] = []
    for name in sorted(set(names), key=lambda n: (n.count("."), n)):
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return kept


def _simplified(
    root: str, default: Default, active: Sequence[tuple[int, Rule]], matched: Mapping[int, Sequence[str]]
) -> tuple[Default, tuple[tuple[int, Rule], ...]]:
    """Return the default and the rules of a region on ``root``, with names relative to the block."""
    below = f"{root}." if root else ""
    kept: list[tuple[int, Rule]] = []
    for i, rule in active:
        modules: tuple[str, ...] | None = None
        if rule.modules is not None:
            if root and any(root == name or root.startswith(f"{name}.") for name in matched[i]):
                modules = None
            else:
                modules = tuple(name for name in matched[i] if name.startswith(below))
                if not modules:
                    continue
        if modules is None and rule.op is None and rule.name is None and rule.keep.always and rule.action != "offload":
            assert rule.action != "none"
            return rule.action, tuple(kept)
        kept.append((i, rule.model_copy(update={"layers": None, "modules": modules})))
    return default, tuple(kept)
