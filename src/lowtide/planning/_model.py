"""One choice for each layer, so that the whole step stays under a limit in the least time.

The step is a list of *moments*. In the backward of layer i alive are what no choice changes then (``base``), what the
layers before it hold, and what it needs itself; at the head, what all layers hold; some moments (the optimizer) depend
on no choice. So, layer by layer in the order of forward, all that matters of the choices made so far is how much they
hold and how long they recompute: a *label*. A label that holds no less and takes no less than another is dropped, and
so is one that cannot become faster than the best answer known: the layers that follow take at least the time of
a problem without whole numbers, whose answer is read off the lower convex hulls of their choices, merged by slope.

Exact. Where labels become very many only the most promising go on, and the least time that a dropped one could have
had is kept: no answer is faster than ``Assigned.bound_ns``. A first pass with few labels finds the answer to beat.

Source: dynamic programming for the multiple-choice knapsack problem with bounds (Dyer, Riha and Walker 1995, A hybrid
dynamic programming/branch-and-bound algorithm for the multiple-choice knapsack problem).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Assigned", "Choice", "Kind", "Step", "assign", "least_peak", "peak_of"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FIRST_LABELS = 400
_MOST_LABELS = 6_000


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


def assign(step: Step, limit_bytes: int) -> Assigned | None:
    """Return the fastest choice for each layer under a limit; None where there is none."""
    if max(step.fixed_bytes, step.head_bytes) > limit_bytes:
        return None
    search = _Search(step, limit_bytes)
    first = search.run(_FIRST_LABELS, None)
    if first.chosen is not None and first.dropped >= first.time:
        return Assigned(first.chosen, first.time, first.time)
    second = search.run(_MOST_LABELS, first.time if first.chosen is not None else None)
    best = second if second.chosen is not None else first
    if best.chosen is None:
        # Few labels may have lost the way; the least peak has its own search.
        return _from_least_peak(step, limit_bytes)
    return Assigned(best.chosen, best.time, max(0, min(best.time, second.dropped)))


def _from_least_peak(step: Step, limit_bytes: int) -> Assigned | None:
    chosen = least_peak(step)
    if peak_of(step, chosen)[0] > limit_bytes:
        return None
    picked = zip(step.layers, chosen, strict=True)
    return Assigned(chosen, sum(step.kinds[kind].choices[pick].recompute_ns for kind, pick in picked), 0)


@dataclass(frozen=True)
class _Answer:
    chosen: tuple[int, ...] | None
    time: int
    dropped: int
    """The least time that a dropped label could have come to."""


class _Arrays:
    """The choices of one kind, as arrays, and their lower convex hull from the smallest on."""

    def __init__(self, kind: Kind) -> None:
        self.held = np.array([c.held_bytes for c in kind.choices], dtype=np.int64)
        self.high = self.held + np.array([c.transient_bytes for c in kind.choices], dtype=np.int64)
        self.time = np.array([c.recompute_ns for c in kind.choices], dtype=np.int64)
        hull: list[tuple[int, int]] = []
        for point in sorted({(int(h), int(t)) for h, t in zip(self.held, self.time, strict=True)}):
            if hull and point[1] >= hull[-1][1]:
                continue
            while len(hull) > 1 and _above(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        self.least = hull[0]
        self.steps = [(b[0] - a[0], a[1] - b[1]) for a, b in pairwise(hull)]
        """(bytes more, nanoseconds less) along the hull."""


def _above(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


class _Bound:
    """The least time of some layers for the bytes that they may hold, without whole numbers."""

    def __init__(self, arrays: Sequence[_Arrays], counts: Counter[int]) -> None:
        steps = [(held * n, time * n) for kind, n in counts.items() for held, time in arrays[kind].steps]
        steps.sort(key=lambda s: -s[1] / s[0])
        least = sum(arrays[kind].least[0] * n for kind, n in counts.items())
        most = sum(arrays[kind].least[1] * n for kind, n in counts.items())
        self.held: Floats = np.cumsum([least, *(s[0] for s in steps)], dtype=np.float64)
        self.time: Floats = np.cumsum([most, *(-s[1] for s in steps)], dtype=np.float64)

    def __call__(self, room: Floats) -> Floats:
        return np.interp(room, self.held, self.time, left=np.inf)


class _Search:
    """Labels from the first layer to the last."""

    def __init__(self, step: Step, limit: int) -> None:
        self.step, self.limit = step, limit
        self.arrays = [_Arrays(kind) for kind in step.kinds]
        self.bounds = [self._bounds(i) for i in range(len(step.layers) + 1)]

    def _bounds(self, start: int) -> list[tuple[int, _Bound]]:
        """For the layers from ``start`` on: (bytes that all before a moment may hold, least time up to it)."""
        step = self.step
        found: list[tuple[int, _Bound]] = []
        counts: Counter[int] = Counter()
        for i in range(start, len(step.layers)):
            last_of_run = i + 1 == len(step.layers) or step.layers[i + 1] != step.layers[i]
            turns = last_of_run or step.base_bytes[i + 1] > step.base_bytes[i]
            if counts and turns:
                room = self.limit - step.base_bytes[i] - int(self.arrays[step.layers[i]].high.min())
                found.append((room, _Bound(self.arrays, counts)))
            counts[step.layers[i]] += 1
        found.append((self.limit - step.head_bytes, _Bound(self.arrays, counts)))
        return found

    def _rest(self, start: int, held: Ints) -> Floats:
        """Return the least time that the layers from ``start`` on can take."""
        found = np.zeros(len(held))
        for room, bound in self.bounds[start]:
            found = np.maximum(found, bound((room - held).astype(np.float64)))
        return found

    def run(self, most: int, beat: int | None) -> _Answer:
        """Go through the layers with at most so many labels; ``beat`` is a time that is known already."""
        held = time = np.zeros(1, dtype=np.int64)
        trail: list[tuple[Ints, Ints]] = []
        dropped = np.inf
        for i, kind in enumerate(self.step.layers):
            arrays = self.arrays[kind]
            fits = held[:, None] + arrays.high[None, :] <= self.limit - self.step.base_bytes[i]
            parent, pick = np.nonzero(fits)
            held, time = held[parent] + arrays.held[pick], time[parent] + arrays.time[pick]
            least = time + self._rest(i + 1, held)
            # A whole nanosecond is the least difference there is.
            keep = np.isfinite(least) if beat is None else least <= beat - 0.5
            chosen = np.nonzero(keep)[0][_undominated(held[keep], time[keep])]
            if len(chosen) > most:
                chosen, lost = _promising(chosen, held, least, most)
                dropped = min(dropped, lost)
            held, time = held[chosen], time[chosen]
            trail.append((parent[chosen], pick[chosen]))
            if not len(held):
                break
        bound = beat if not np.isfinite(dropped) and beat is not None else dropped
        if not len(held):
            return _Answer(None, beat or 0, _whole(bound))
        best = int(np.argmin(time))
        return _Answer(_walk_back(trail, best), int(time[best]), _whole(min(dropped, float(time[best]))))


def _whole(value: Any) -> int:
    return int(np.ceil(value - 0.5)) if np.isfinite(value) else 2**62


def _undominated(held: Ints, time: Ints) -> Ints:
    order = np.lexsort((time, held))
    sorted_time = time[order]
    before = np.concatenate([[np.iinfo(np.int64).max], np.minimum.accumulate(sorted_time)[:-1]])
    return order[sorted_time < before]


def _promising(chosen: Ints, held: Ints, least: Floats, most: int) -> tuple[Ints, float]:
    """Keep the labels of the least possible times, and of each stretch of bytes one; and say what the others had."""
    by_least = chosen[np.argsort(least[chosen], kind="stable")]
    span = max(int(held[chosen].max() - held[chosen].min()), 1)
    stretch = (held[by_least] - held[chosen].min()) * (most // 4) // span
    _, first = np.unique(stretch, return_index=True)
    stays = np.zeros(len(by_least), dtype=bool)
    stays[: most - len(first)] = True
    stays[first] = True
    return by_least[stays], float(least[by_least[~stays]].min(initial=np.inf))


def _walk_back(trail: Sequence[tuple[Ints, Ints]], end: int) -> tuple[int, ...]:
    found: list[int] = []
    for parent, pick in reversed(trail):
        found.append(int(pick[end]))
        end = int(parent[end])
    return tuple(reversed(found))


def least_peak(step: Step) -> tuple[int, ...]:
    """Return for each layer the choice with which the peak is the least: labels of bytes held and highest moment."""
    held = np.zeros(1, dtype=np.int64)
    peak = np.full(1, step.fixed_bytes, dtype=np.int64)
    trail: list[tuple[Ints, Ints]] = []
    arrays = [_Arrays(kind) for kind in step.kinds]
    for i, kind in enumerate(step.layers):
        own = arrays[kind]
        highest = np.maximum(peak[:, None], held[:, None] + own.high[None, :] + step.base_bytes[i])
        after = held[:, None] + own.held[None, :]
        chosen = _undominated(after.ravel(), highest.ravel())
        if len(chosen) > _MOST_LABELS:
            chosen = chosen[np.linspace(0, len(chosen) - 1, _MOST_LABELS).astype(np.int64)]
        held, peak = after.ravel()[chosen], highest.ravel()[chosen]
        trail.append((chosen // len(own.held), chosen % len(own.held)))
    best = int(np.argmin(np.maximum(peak, held + step.head_bytes)))
    return _walk_back(trail, best)
