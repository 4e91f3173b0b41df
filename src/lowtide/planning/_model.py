"""One choice for each layer, so that the whole step stays under a limit in the least time.

The step is a list of *moments*. In the backward of layer i alive are what no choice changes then (``base``), what the
layers before it hold, and what it needs itself; at the head, what all layers hold; some moments (the optimizer) depend
on no choice. Consecutive layers of one kind under a straight line of bases are a *run*, and a run only has to say how
many layers take each choice: among equal layers one order is never worse than another. With ``g`` bytes of gradients
appearing for each layer that backward passes, first come the choices that hold at most ``g``, those that need least
first, then the others, those of the largest transient first (Johnson's order; an exchange of neighbours shows it).
So the integer program has two unknowns for each choice of each run, whatever the number of layers.

Exact over the given choices: SciPy's HiGHS proves its answer to a ten-thousandth of the time, or says how far the proof
came within its seconds (``Assigned.bound_ns``). What it returns is counted again here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

__all__ = ["Assigned", "Choice", "Kind", "Step", "assign", "least_peak", "peak_of"]

_MOST_CHOICES = 160
_MOST_CUTS = 12
_GAP = 1e-4
_SECONDS = 8.0
_INFEASIBLE = 2


@dataclass(frozen=True)
class Choice:
    """What one choice costs one layer."""

    held_bytes: int
    """From its forward to its backward."""

    transient_bytes: int
    """Above that, while it runs."""

    recompute_ns: int


@dataclass(frozen=True)
class Kind:
    """Layers that are alike, and what there is to choose from."""

    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Step:
    """What no choice changes, over a training step."""

    kinds: tuple[Kind, ...]

    layers: tuple[int, ...]
    """The kind of each layer, in the order of forward."""

    base_bytes: tuple[int, ...]
    """Alive in the backward of each layer besides what layers hold and need."""

    head_bytes: int
    """Alive at the head and the loss besides what layers hold."""

    fixed_bytes: int = 0
    """The highest moment that depends on no choice."""

    def __post_init__(self) -> None:
        assert len(self.layers) == len(self.base_bytes)


@dataclass(frozen=True)
class Assigned:
    """One choice for each layer."""

    chosen: tuple[int, ...]
    """For each layer, which choice of its kind."""

    recompute_ns: int

    bound_ns: int
    """No assignment under the limit is faster than this."""


def peak_of(step: Step, chosen: Sequence[int]) -> tuple[int, str]:
    """Return the highest moment of a step in bytes, and its name: ``head``, ``fixed`` or a layer's number."""
    held, peak, where = 0, step.fixed_bytes, "fixed"
    for i, (kind, pick) in enumerate(zip(step.layers, chosen, strict=True)):
        choice = step.kinds[kind].choices[pick]
        held += choice.held_bytes
        if (here := step.base_bytes[i] + held + choice.transient_bytes) > peak:
            peak, where = here, str(i)
    return (held + step.head_bytes, "head") if held + step.head_bytes > peak else (peak, where)


@dataclass(frozen=True)
class _Run:
    """Consecutive layers of one kind, and a straight line at or above their bases."""

    kind: int
    first: int
    count: int
    base: int
    """At the first layer."""
    slope: int
    """How much less it is at each layer that follows."""
    order: tuple[int, ...]
    """Numbers of the choices, in the order in which layers take them."""


def _runs(step: Step) -> list[_Run]:
    found: list[_Run] = []
    first = 0
    for i in range(1, len(step.layers) + 1):
        if i < len(step.layers) and step.layers[i] == step.layers[first] and _straight(step.base_bytes[first : i + 1]):
            continue
        base, count = step.base_bytes[first], i - first
        slope = base - step.base_bytes[first + 1] if count > 1 else 0
        found.append(_Run(step.layers[first], first, count, base, slope, _order(step.kinds[step.layers[first]], slope)))
        first = i
    return found


def _straight(bases: Sequence[int]) -> bool:
    steps = [a - b for a, b in pairwise(bases)]
    return max(steps) == min(steps)


def _order(kind: Kind, slope: int) -> tuple[int, ...]:
    def key(i: int) -> tuple[bool, int]:
        choice = kind.choices[i]
        grows = choice.held_bytes > slope
        return grows, -choice.transient_bytes if grows else choice.held_bytes + choice.transient_bytes

    return tuple(sorted(_thinned(kind.choices), key=key))


def _thinned(choices: Sequence[Choice]) -> list[int]:
    """Leave out choices where there are very many: the fastest of each stretch of bytes stay, and the smallest."""
    order = sorted(range(len(choices)), key=lambda i: choices[i].held_bytes)
    if len(order) <= _MOST_CHOICES:
        return order
    span = max(choices[order[-1]].held_bytes - choices[order[0]].held_bytes, 1)
    stretches = {(choices[i].held_bytes - choices[order[0]].held_bytes) * (_MOST_CHOICES - 2) // span: i for i in order}
    lowest = min(order, key=lambda i: choices[i].held_bytes + choices[i].transient_bytes)
    return sorted({order[0], lowest, *stretches.values()}, key=lambda i: choices[i].held_bytes)


class _Program:
    """The integer program: how many layers of each run take each choice (``many``), and whether any does (``used``)."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.runs = _runs(step)
        self.starts = [0]
        for run in self.runs:
            self.starts.append(self.starts[-1] + len(run.order))
        self.count = self.starts[-1]
        self.columns = 2 * self.count + 1
        """``many`` of all, ``used`` of all, and the peak."""
        self.unit = max(1.0, self._largest() / 1e6)
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self._write()

    def _largest(self) -> float:
        return float(
            max(self.step.base_bytes, default=0)
            + self.step.head_bytes
            + sum(max(c.held_bytes + c.transient_bytes for c in self.step.kinds[k].choices) for k in self.step.layers)
        )

    def choice(self, run: _Run, place: int) -> Choice:
        return self.step.kinds[run.kind].choices[run.order[place]]

    def row(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        self.entries += [(len(self.low), column, value) for column, value in terms if value]
        self.low.append(low)
        self.high.append(high)

    def _write(self) -> None:
        before: list[tuple[int, float]] = []
        for run, start in zip(self.runs, self.starts, strict=False):
            places = range(len(run.order))
            self.row([(start + p, 1.0) for p in places], run.count, run.count)
            earlier = list(before)
            for p in places:
                self.row([(self.count + start + p, run.count), (start + p, -1.0)], 0, np.inf)
                self._moments(run, start, p, earlier)
                # A layer holds its bytes, and one gradient less is there at the next.
                earlier.append((start + p, (self.choice(run, p).held_bytes - run.slope) / self.unit))
            before += [(start + p, self.choice(run, p).held_bytes / self.unit) for p in places]
        peak = (self.columns - 1, -1.0)
        self.row([*before, peak], -np.inf, -self.step.head_bytes / self.unit)

    def _moments(self, run: _Run, start: int, p: int, earlier: list[tuple[int, float]]) -> None:
        """The first and the last layer that take a choice, where one does."""
        choice = self.choice(run, p)
        needs = run.base + choice.held_bytes + choice.transient_bytes
        # All layers together stay under the peak less the head: where no layer takes this choice, that is enough.
        slack = (needs - self.step.head_bytes + max(-run.slope, 0) * run.count) / self.unit
        if slack <= 0:
            return
        used, peak = (self.count + start + p, slack), (self.columns - 1, -1.0)
        room = slack - needs / self.unit
        self.row([*earlier, used, peak], -np.inf, room)
        net = (choice.held_bytes - run.slope) / self.unit
        if net > 0:
            self.row([*earlier, (start + p, net), used, peak], -np.inf, room + net)

    def solve(self, cost: np.ndarray, limit: float) -> Any:
        rows, places, values = zip(*self.entries, strict=True)
        matrix = csr_array((values, (rows, places)), shape=(len(self.low), self.columns))
        integrality = np.ones(self.columns)
        integrality[-1] = 0
        upper = np.concatenate([np.full(self.count, np.inf), np.ones(self.count), [limit / self.unit]])
        low, high, least, most = (
            _any(v) for v in (np.array(self.low), np.array(self.high), np.zeros(self.columns), upper)
        )
        return milp(
            cost,
            integrality=integrality,
            bounds=Bounds(least, most),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
        )

    def assignment(self, x: Any) -> tuple[int, ...]:
        chosen: list[int] = []
        for run, start in zip(self.runs, self.starts, strict=False):
            for p, number in enumerate(run.order):
                chosen += [number] * round(x[start + p])
        return tuple(chosen)

    def costs(self) -> np.ndarray:
        cost = np.zeros(self.columns)
        for run, start in zip(self.runs, self.starts, strict=False):
            for p in range(len(run.order)):
                cost[start + p] = self.choice(run, p).recompute_ns / 1000
        return cost


def _any(value: Any) -> Any:
    return value


def assign(step: Step, limit_bytes: int) -> Assigned | None:
    """Return the fastest choice for each layer under a limit; None where there is none."""
    if max(step.fixed_bytes, step.head_bytes) > limit_bytes:
        return None
    if not step.layers:
        return Assigned((), 0, 0)
    program = _Program(step)
    limit, bound = limit_bytes, 0
    for _ in range(_MOST_CUTS):
        found = program.solve(program.costs(), limit)
        if found.status == _INFEASIBLE:
            return None
        bound = bound or math.ceil((found.mip_dual_bound or 0) * 1000 - 1)
        if found.x is None:
            break
        chosen = program.assignment(found.x)
        over = peak_of(step, chosen)[0] - limit_bytes
        if over <= 0:
            return _assigned(step, chosen, bound)
        # The solver lets a millionth part through; ask for that much less.
        limit -= over
    chosen = least_peak(step)
    return _assigned(step, chosen, bound) if peak_of(step, chosen)[0] <= limit_bytes else None


def _assigned(step: Step, chosen: tuple[int, ...], bound_ns: int) -> Assigned:
    picked = zip(step.layers, chosen, strict=True)
    time = sum(step.kinds[kind].choices[pick].recompute_ns for kind, pick in picked)
    return Assigned(chosen, time, min(max(bound_ns, 0), time))


def least_peak(step: Step) -> tuple[int, ...]:
    """Return for each layer the choice with which the peak is the least, to a ten-thousandth."""
    if not step.layers:
        return ()
    program = _Program(step)
    cost = np.zeros(program.columns)
    cost[-1] = 1.0
    found = program.solve(cost, np.inf)
    assert found.x is not None, "without a limit there is always a choice"
    return program.assignment(found.x)
