"""What all regions of one ``apply`` share: which rules matched so far, and the error when one matched nothing.

The error must come before the first backward and count all regions and ranks. A collective could hang where ranks
run different regions (pipeline stages), so ranks tell each other through the process group's store: each rank posts
which rules it matched, and only a rank with an unmatched rule waits for the others.
"""

from __future__ import annotations

import functools
import itertools
import json
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._guards import active_fake_mode

from lowtide.errors import NothingMatchedError, nearest
from lowtide.policy import RegionRecipe, SaveRule
from lowtide.regions._compiled import compiled_contexts
from lowtide.regions._operators import resolve_operator, save_table
from lowtide.regions._tape import Plan, describe

_numbers = itertools.count()
_WAIT = timedelta(minutes=10)


class Session:
    """Counts matches of an applied policy's rules; a ``Witness`` of the tapes."""

    def __init__(self, recipe: RegionRecipe, regions: int) -> None:
        self.rules: tuple[SaveRule, ...] = recipe.save
        self.recipe = recipe
        self.preserve_rng = recipe.preserve_rng
        self.regions = regions
        # On fake tensors a rank is by itself, and must not disturb the numbers that ranks have in common.
        self.alone = active_fake_mode() is not None
        self.number = -1 if self.alone else next(_numbers)
        self.hits = [0] * len(self.rules)
        self.seen: Counter[str] = Counter()
        self.ran_regions: set[str] = set()
        self.checked = not self.rules
        self.told_twice = False
        self._prepare()

    def _prepare(self) -> None:
        self.plan = Plan(
            table=save_table(self.rules),
            keeps=tuple(rule.keep.keeps for rule in self.rules),
            preserve_rng=self.recipe.preserve_rng,
            strict=self.recipe.strict,
            allow_inexact=self.recipe.allow_inexact,
        )
        self.compiled_contexts = functools.partial(compiled_contexts, self.plan, self)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("plan", "compiled_contexts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def matched(self, rule: int) -> None:
        """A rule matched a call in a region."""
        self.hits[rule] += 1

    def ran(self, func: Any) -> None:
        """An operator ran in a thorough pass."""
        self.seen[describe(func)] += 1

    def tell_recomputed_twice(self, fqn: str) -> None:
        """Warn, once, that one forward is recomputed more than once: right, but slow."""
        if self.told_twice:
            return
        self.told_twice = True
        warnings.warn(
            f"lowtide: region {fqn} is recomputed more than once for one forward (a backward in several passes, as "
            "zero-bubble pipelines have). Gradients are exact; executor: replay runs each operator once",
            stacklevel=2,
        )

    def region_ended(self, fqn: str) -> None:
        """Check the rules once every region has run forward."""
        if self.checked:
            return
        self.ran_regions.add(fqn)
        if len(self.ran_regions) >= self.regions:
            self.check()

    def check(self) -> None:
        """Raise where a rule that is not optional matched nothing, in any region on any rank.

        Raises:
            NothingMatchedError: names the rule, and the operators that ran and look most like it.
        """
        if self.checked:
            return
        self.checked = True
        missing = [i for i, rule in enumerate(self.rules) if not self.hits[i] and not rule.optional]
        missing = self._missing_everywhere(missing)
        if missing:
            self.checked = False
            raise NothingMatchedError("; ".join(self._explain(self.rules[i]) for i in missing))

    def _missing_everywhere(self, missing: list[int]) -> list[int]:
        if self.alone or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return missing
        store = dist.PrefixStore(f"lowtide/rules/{self.number}", dist.distributed_c10d._get_default_store())
        store.set(str(dist.get_rank()), json.dumps(missing))
        if not missing:
            return missing
        keys = [str(rank) for rank in range(dist.get_world_size())]
        store.wait(keys, _WAIT)
        others = [set(json.loads(store.get(key))) for key in keys]
        return [i for i in missing if all(i in theirs for theirs in others)]

    def _explain(self, rule: SaveRule) -> str:
        ran = list(self.seen)
        wanted = {o.name().replace("::", ".").split(".")[1] for o in resolve_operator(rule.op)}
        near = [name for name in ran if any(w in name or name.split(".")[1] in w for w in wanted)]
        near += [n for n in nearest(rule.op, ran) if n not in near]
        seen = ", ".join(f"{n} ({self.seen[n]} calls)" for n in (near or ran)[:6])
        return (
            f"save: {rule.op!r} matched no operator in {self.regions} regions. Nearest operators that ran: "
            f"{seen or 'none'}. Name one of those, or set optional: true"
        )
