"""All the best choices for one block: saved bytes against recompute time, exact.

``replay``: calls are looked at from the last to the first. What has been decided is summed up in the set of values
that are still asked for; of two ways to the same set, one that is no smaller and no faster is dropped. A call
of whose outputs none is asked for does not run. Else it is saved (its outputs are held, and nothing before it is
asked for on its account) or runs (and what it reads is asked for in turn). At the first call what remains are the
best choices, all of them at once; exact in whole bytes and nanoseconds. The work grows with how many values are alive
at once, and in a block these are few; where they are not, ``_integer`` solves one budget at a time.

``recompute``: all that is not saved runs, so each call is worth its own time and nothing else.

Source: dynamic programming over a path decomposition with fronts of undominated labels; the same question as an
integer program (``_integer``) and tried out over all sets on small graphs (tests) has the same answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.planning._graph import Call, Executor, Graph, Point, evaluate, keep_all
from lowtide.planning._integer import best_under

__all__ = ["Frontier", "frontier_of"]

Ints = NDArray[np.int64]

_MOST_LABELS = 20_000
"""Labels of one set of asked-for values; past it neighbours are merged, which the frontier then says."""
_MOST_SETS = 4_000
"""Sets of asked-for values; past it single budgets are solved."""
_BUDGETS = 48


@dataclass(frozen=True)
class Frontier:
    """Choices of which none is both smaller and faster than another, the smallest first."""

    executor: Executor
    points: tuple[Point, ...]

    exact: bool
    """Whether all such choices are here. Else each is possible, and some were left out."""

    def under(self, held_bytes: int) -> Point | None:
        """Return the fastest choice that holds at most so many bytes."""
        fitting = [p for p in self.points if p.held_bytes <= held_bytes]
        return fitting[-1] if fitting else None

    def within(self, recompute_ns: int) -> Point | None:
        """Return the smallest choice that recomputes for at most so long."""
        return next((p for p in self.points if p.recompute_ns <= recompute_ns), None)


def frontier_of(graph: Graph, executor: Executor) -> Frontier:
    """Find every best choice for a block; the last is the block without a region where nothing beats that."""
    if executor == "recompute":
        sets, exact = _knapsack(graph)
    else:
        try:
            sets, exact = _replay(graph)
        except _TooWideError:
            sets, exact = _single_budgets(graph), False
    points = {evaluate(graph, saves, executor) for saves in sets} | {keep_all(graph)}
    return Frontier(executor, _undominated(points), exact)


def _undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    kept: list[Point] = []
    # Of equals, the one without a region first: it costs no Python time.
    for point in sorted(points, key=lambda p: (p.held_bytes, p.recompute_ns, p.region, p.saves)):
        if not kept or point.recompute_ns < kept[-1].recompute_ns:
            kept.append(point)
    return tuple(kept)


class _TooWideError(Exception):
    pass


@dataclass
class _Labels:
    """Ways to one set of asked-for values, the smallest first; ``chain`` points into a history."""

    held: Ints
    cost: Ints
    chain: Ints

    def shifted(self, held: int, cost: int) -> _Labels:
        return _Labels(self.held + held, self.cost + cost, self.chain)


class _History:
    """Which calls a label saved: (call, label before it), back to -1."""

    def __init__(self) -> None:
        self._calls: list[Ints] = []
        self._before: list[Ints] = []
        self._count = 0

    def add(self, call: int, before: Ints) -> Ints:
        """Return new ends of chains, one for each given."""
        numbers = np.arange(self._count, self._count + len(before), dtype=np.int64)
        self._calls.append(np.full(len(before), call, dtype=np.int64))
        self._before.append(before)
        self._count += len(before)
        return numbers

    def sets(self, ends: Ints) -> list[tuple[int, ...]]:
        """Return the saved calls of each chain."""
        calls = np.concatenate(self._calls) if self._calls else np.empty(0, dtype=np.int64)
        before = np.concatenate(self._before) if self._before else calls
        found: list[tuple[int, ...]] = []
        for end in ends.tolist():
            chosen: list[int] = []
            at = end
            while at >= 0:
                chosen.append(int(calls[at]))
                at = int(before[at])
            found.append(tuple(sorted(chosen)))
        return found


def _start() -> _Labels:
    return _Labels(*(np.array([v], dtype=np.int64) for v in (0, 0, -1)))


def _merged(parts: list[_Labels]) -> tuple[_Labels, bool]:
    """Return the undominated labels of several, and whether none was left out."""
    if len(parts) == 1:
        return parts[0], True
    held = np.concatenate([p.held for p in parts])
    cost = np.concatenate([p.cost for p in parts])
    chain = np.concatenate([p.chain for p in parts])
    order = np.lexsort((cost, held))
    held, cost, chain = held[order], cost[order], chain[order]
    best_before = np.concatenate([[np.iinfo(np.int64).max], np.minimum.accumulate(cost)[:-1]])
    keep = cost < best_before
    labels = _Labels(held[keep], cost[keep], chain[keep])
    if len(labels.held) <= _MOST_LABELS:
        return labels, True
    # Of each stretch of bytes the fastest; both ends stay.
    span = max(int(labels.held[-1] - labels.held[0]), 1)
    stretch = (labels.held - labels.held[0]) * (_MOST_LABELS // 2) // span
    last = np.append(stretch[1:] != stretch[:-1], True)
    last[0] = True
    return _Labels(labels.held[last], labels.cost[last], labels.chain[last]), False


def _knapsack(graph: Graph) -> tuple[list[tuple[int, ...]], bool]:
    history, labels, exact = _History(), _start(), True
    for call in graph.calls[: graph.stop]:
        if call.forced or not graph.can_save(call, "recompute") or not call.cost_ns:
            continue
        held = sum(graph.nbytes[v] for v in call.makes)
        saved = _Labels(labels.held + held, labels.cost - call.cost_ns, history.add(call.index, labels.chain))
        labels, whole = _merged([labels, saved])
        exact = exact and whole
    return history.sets(labels.chain), exact


def _replay(graph: Graph) -> tuple[list[tuple[int, ...]], bool]:
    """Look at calls from the last to the first; sets of values are bits of whole numbers."""
    history, exact = _History(), True
    ways: Mapping[int, _Labels] = {_bits(graph.needed): _start()}
    for call in reversed(graph.calls):
        found: dict[int, list[_Labels]] = {}
        for wanted, labels in ways.items():
            for asked, reached in _choices(graph, call, wanted, labels, history):
                found.setdefault(asked, []).append(reached)
        if len(found) > _MOST_SETS:
            raise _TooWideError
        merged = {asked: _merged(parts) for asked, parts in found.items()}
        exact = exact and all(whole for _, whole in merged.values())
        ways = {asked: labels for asked, (labels, _) in merged.items()}
    ends = [labels.shifted(_bytes(graph, wanted), 0) for wanted, labels in ways.items()]
    labels, whole = _merged(ends)
    return history.sets(labels.chain), exact and whole


def _choices(graph: Graph, call: Call, wanted: int, labels: _Labels, history: _History) -> list[tuple[int, _Labels]]:
    """Return what can become of one call: (values asked for before it, ways)."""
    here = wanted & _bits(call.makes)
    if not here:
        return [(wanted, labels)]
    rest, kept = wanted & ~here, here & _bits(call.savable)
    runs = rest | _bits(call.reads)
    if call.forced and kept:
        held = _bytes(graph, kept)
        if kept == here:
            return [(rest, labels.shifted(held, 0))]
        return [(runs, labels.shifted(held, call.cost_ns))]
    found = [(runs, labels.shifted(0, call.cost_ns))]
    if kept == here:
        saved = _Labels(labels.held + _bytes(graph, kept), labels.cost, history.add(call.index, labels.chain))
        found.append((rest, saved))
    return found


def _bits(values: Iterable[int]) -> int:
    found = 0
    for value in values:
        found |= 1 << value
    return found


def _bytes(graph: Graph, values: int) -> int:
    """Sum what a set of values holds; inputs count here once the first call is past."""
    total = 0
    while values:
        lowest = values & -values
        total += graph.nbytes[lowest.bit_length() - 1]
        values ^= lowest
    return total


def _single_budgets(graph: Graph) -> list[tuple[int, ...]]:
    """Solve a row of budgets between the smallest choice and keeping all."""
    least, most = evaluate(graph, (), "replay").held_bytes, keep_all(graph).held_bytes
    budgets = {least + (most - least) * i // _BUDGETS for i in range(_BUDGETS + 1)}
    found = [best_under(graph, budget) for budget in sorted(budgets)]
    return [point.saves for point in found if point is not None]
