"""From a ledger to an estimate: categories over time, the peak, and what was alive at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lowtide.records import (
    CATEGORIES,
    AliveRow,
    Category,
    CategoryBytes,
    Environment,
    Estimate,
    Phase,
    StepTime,
    TimelinePoint,
)
from lowtide.tracing._ledger import Ledger, Life

_MOST_POINTS = 400
_MOST_ROWS = 60

PHASES: dict[str, Phase] = {
    "before": "forward",
    "forward": "forward",
    "loss": "forward",
    "backward": "backward",
    "after": "optimizer",
    "optimizer": "optimizer",
}


class Account:
    """Goes through the changes of a ledger in order."""

    def __init__(self, ledger: Ledger, category_of: Callable[[Life], Category]) -> None:
        self._ledger = ledger
        self._categories: list[Category] = [category_of(life) for life in ledger.lives]
        self._peak_change = self._find_peak()

    def _find_peak(self) -> int:
        """Return the index of the change after which most bytes were alive, the first of equals."""
        live = most = 0
        found = -1
        for i, (_, _, change) in enumerate(self._ledger.changes):
            live += change
            if live > most:
                most, found = live, i
        return found

    def estimate(
        self,
        *,
        device: str,
        world_size: int,
        rank: int,
        policy: str,
        time: StepTime | None,
        assumptions: tuple[str, ...],
        environment: Environment,
    ) -> Estimate:
        """Make the record."""
        points, at_peak, peaks = self._points()
        stage, module, op = self._operator(self._peak_change)
        return Estimate(
            peak_bytes=at_peak.total,
            at_peak=at_peak,
            peak_phase=PHASES[stage],
            peak_module=module,
            peak_op=op,
            category_peaks=peaks,
            alive_at_peak=self._alive_at_peak(),
            timeline=points,
            method="fake step",
            device=device,
            world_size=world_size,
            rank=rank,
            policy=policy,
            time=time,
            assumptions=assumptions,
            environment=environment,
        )

    def _operator(self, change: int) -> tuple[str, str, str]:
        if change < 0:
            return ("before", "", "")
        return self._ledger.operators[self._ledger.changes[change][0]]

    def _points(self) -> tuple[tuple[TimelinePoint, ...], CategoryBytes, CategoryBytes]:
        """Return the thinned timeline, the bytes at the peak, and each category's own peak."""
        live: Counter[str] = Counter()
        most: Counter[str] = Counter()
        at_peak = CategoryBytes()
        kept: list[TimelinePoint] = []
        bucket = max(1, len(self._ledger.changes) // _MOST_POINTS)
        best: tuple[int, int] = (-1, 0)
        best_live: dict[str, int] = {}
        phase = ""
        total = 0
        for i, (_, number, change) in enumerate(self._ledger.changes):
            category = self._categories[number]
            live[category] += change
            total += change
            most[category] = max(most[category], live[category])
            if i == self._peak_change:
                at_peak = _bytes(live)
            if total >= best[0]:
                best, best_live = (total, i), dict(live)
            now = PHASES[self._operator(i)[0]]
            if i % bucket == bucket - 1 or now != phase or i == len(self._ledger.changes) - 1:
                kept.append(self._point(best[1], best_live))
                best, phase = (-1, 0), now
        return tuple(kept), at_peak, _bytes(most)

    def _point(self, change: int, live: dict[str, int]) -> TimelinePoint:
        stage, module, op = self._operator(change)
        return TimelinePoint(event=change, phase=PHASES[stage], module=module, op=op, live=_bytes(live))

    def _alive_at_peak(self) -> tuple[AliveRow, ...]:
        held: Counter[int] = Counter()
        for _, number, change in self._ledger.changes[: self._peak_change + 1]:
            held[number] += change
        rows: dict[tuple[Category, str, str], list[int]] = {}
        for number, nbytes in held.items():
            if nbytes > 0:
                life = self._ledger.lives[number]
                origin = (self._categories[number], life.module, life.op)
                row = rows.setdefault(origin, [0, 0])
                row[0] += nbytes
                row[1] += 1
        largest = sorted(rows.items(), key=lambda item: -item[1][0])[:_MOST_ROWS]
        return tuple(
            AliveRow(category=category, module=module, op=op, nbytes=nbytes, count=count)
            for (category, module, op), (nbytes, count) in largest
        )


def _bytes(live: Counter[str] | dict[str, int]) -> CategoryBytes:
    return CategoryBytes(**{name: live.get(name, 0) for name in CATEGORIES})
