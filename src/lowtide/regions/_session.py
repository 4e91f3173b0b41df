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
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._guards import active_fake_mode

from lowtide.errors import NothingMatchedError, nearest
from lowtide.policy import RegionRecipe, Rule
from lowtide.regions._compiled import compiled_contexts
from lowtide.regions._offload import HostPool
from lowtide.regions._operators import resolve_operator
from lowtide.regions._plan import Plan, make_plan, refuse_hidden
from lowtide.regions._tape import describe

_numbers = itertools.count()
_WAIT = timedelta(minutes=10)


class Session:
    """Counts matches of an applied policy's rules; a ``Witness`` of the tapes. Makes the plans of its regions."""

    def __init__(self, rules: Sequence[Rule], recipes: Sequence[RegionRecipe], kind: str) -> None:
        self.rules = tuple(rules)
        self.kind = kind
        self.regions = len(recipes)
        # On fake tensors a rank is by itself, and must not disturb the numbers that ranks have in common.
        self.alone = active_fake_mode() is not None
        self.number = -1 if self.alone else next(_numbers)
        self.hits = [0] * len(self.rules)
        self.seen: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.ran_regions: set[str] = set()
        active = {number: rule for recipe in recipes for number, rule in recipe.rules}
        self.open = sorted(n for n, rule in active.items() if (rule.op or rule.name) and not rule.optional)
        """Numbers of the rules that must match something while the model runs."""
        self.checked = not self.open
        self.told_twice = False
        self.host_pool = HostPool()
        self._plans: dict[Any, tuple[Plan, Callable[[], Any]]] = {}
        self._make_plans(recipes)

    def _make_plans(self, recipes: Sequence[RegionRecipe]) -> None:
        hidden: list[dict[int, str]] = []
        deciding: set[int] = set()
        for recipe in recipes:
            key = _plan_key(recipe)
            if key in self._plans:
                continue
            plan, lost = make_plan(recipe, self.where)
            hidden.append(lost)
            deciding.update(number for number, _ in recipe.rules if number not in lost)
            self._plans[key] = plan, functools.partial(compiled_contexts, plan, self)
        everywhere = {n: why for lost in hidden for n, why in lost.items() if n not in deciding}
        refuse_hidden(everywhere, self.rules, self.where)

    def plan_of(self, recipe: RegionRecipe) -> tuple[Plan, Callable[[], Any]]:
        """Return a recipe's plan, and what makes contexts under ``torch.compile``: the same objects for equal rules."""
        key = _plan_key(recipe)
        if key not in self._plans:
            self._make_plans([recipe])
        return self._plans[key]

    def where(self, number: int) -> str:
        """Say where in the policy a rule stands."""
        return "save" if self.kind == "selective_op" else f"rules.{number}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "host_pool": HostPool()}

    def matched(self, number: int) -> None:
        """A rule matched a call in a region."""
        self.hits[number] += 1

    def named(self, name: str) -> None:
        """A value in a region was given a name."""
        self.names[name] += 1

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
        missing = [i for i in self.open if not self.hits[i]]
        missing = self._missing_everywhere(missing)
        if missing:
            self.checked = False
            raise NothingMatchedError("; ".join(map(self._explain, missing)))

    def _missing_everywhere(self, missing: list[int]) -> list[int]:
        if self.alone or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return missing
        if dist.get_backend() == "fake":
            return missing
        store = dist.PrefixStore(f"lowtide/rules/{self.number}", dist.distributed_c10d._get_default_store())
        store.set(str(dist.get_rank()), json.dumps(missing))
        if not missing:
            return missing
        keys = [str(rank) for rank in range(dist.get_world_size())]
        store.wait(keys, _WAIT)
        others = [set(json.loads(store.get(key))) for key in keys]
        return [i for i in missing if all(i in theirs for theirs in others)]

    def _explain(self, number: int) -> str:
        rule, where = self.rules[number], self.where(number)
        place = f" inside modules {', '.join(rule.modules)}" if rule.modules else ""
        if rule.name is not None:
            given = ", ".join(f"{n} ({count} times)" for n, count in self.names.items())
            return (
                f"{where}: no value was given the name {rule.name!r}{place} in {self.regions} regions. Names given: "
                f"{given or 'none'}. Write lowtide.checkpoint_name(x, {rule.name!r}) in the model; or optional: true"
            )
        assert rule.op is not None
        ran = list(self.seen)
        overloads = resolve_operator(rule.op, where=where)
        wanted = {o.name().replace("::", ".").split(".")[1] for o in overloads}
        near = [name for name in ran if any(w in name or name.split(".")[1] in w for w in wanted)]
        near += [n for n in nearest(rule.op, ran) if n not in near]
        seen = ", ".join(f"{n} ({self.seen[n]} calls)" for n in (near or ran)[:6])
        return (
            f"{where}: {rule.op!r} matched no operator{place} in {self.regions} regions. Nearest operators that ran: "
            f"{seen or 'none'}. Name one of those, or set optional: true"
        )


def _plan_key(recipe: RegionRecipe) -> Any:
    return recipe.default, recipe.rules, recipe.preserve_rng, recipe.strict, recipe.allow_inexact, recipe.budget
