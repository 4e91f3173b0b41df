"""One budget for one block as an integer program, solved by SciPy's HiGHS.

For every call: whether it runs in backward, and whether it is saved; for every value: whether it is asked for, and
whether it is held. A value that is asked for is held or its call runs; what a running call reads is asked for; a saved
call holds each of its outputs that is asked for. The time of what runs is least, the bytes held stay within the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.planning._graph import Graph, Point, evaluate

if TYPE_CHECKING:
    from scipy.optimize import Bounds, LinearConstraint

__all__ = ["best_under"]

_MOST_CUTS = 20


class _Rows:
    """Rows ``low <= sum of coefficient x variable``."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: dict[int, float], low: float, high: float = np.inf) -> None:
        self.entries += [(len(self.low), column, value) for column, value in terms.items()]
        self.low.append(low)
        self.high.append(high)

    def constraint(self, columns: int) -> LinearConstraint:
        # SciPy takes half a second to come, and whoever applies a plan does not need it.
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        rows, places, values = zip(*self.entries, strict=True)
        matrix = csr_array((values, (rows, places)), shape=(len(self.low), columns))
        low: Any = np.array(self.low)
        high: Any = np.array(self.high)
        return LinearConstraint(matrix, low, high)


def best_under(graph: Graph, held_bytes: int) -> Point | None:
    """Return the fastest choice under ``replay`` that holds at most ``held_bytes``; None where there is none."""
    from scipy.optimize import Bounds

    calls, values = len(graph.calls), len(graph.nbytes)
    runs, saves, asked, held = (range(o, o + n) for o, n in _offsets(calls, values))
    columns = held.stop
    upper: Any = np.ones(columns)
    rows = _Rows()
    made: set[int] = set()
    for i, call in enumerate(graph.calls):
        made.update(call.makes)
        if not call.savable:
            upper[saves[i]] = 0
        for value in call.reads:
            rows.add({asked[value]: 1, runs[i]: -1}, 0)
        for value in call.makes:
            if value not in call.savable:
                upper[held[value]] = 0
            rows.add({runs[i]: 1, held[value]: 1, asked[value]: -1}, 0)
            rows.add({saves[i]: 1, held[value]: -1}, 0)
            rows.add({held[value]: 1, saves[i]: -1, asked[value]: -1}, -1 if value in call.savable else -2)
    lower: Any = np.zeros(columns)
    for value in graph.needed:
        lower[asked[value]] = 1
    for i, call in enumerate(graph.calls):
        lower[saves[i]] = float(call.forced and bool(call.savable))
    for value in graph.inputs - made:
        rows.add({held[value]: 1, asked[value]: -1}, 0)
    unit = max(sum(graph.nbytes) / 1e6, 1.0)
    budget = {held[v]: n / unit for v, n in enumerate(graph.nbytes) if n}
    if budget:
        rows.add(budget, -np.inf, (held_bytes - graph.pinned_bytes) / unit)
    cost = np.zeros(columns)
    cost[list(runs)] = [c.cost_ns / 1000 for c in graph.calls]
    return _solve(graph, (cost, rows, Bounds(lower, upper), saves), held_bytes)


def _offsets(calls: int, values: int) -> tuple[tuple[int, int], ...]:
    return (0, calls), (calls, calls), (2 * calls, values), (2 * calls + values, values)


def _solve(graph: Graph, program: tuple[np.ndarray, _Rows, Bounds, range], held_bytes: int) -> Point | None:
    from scipy.optimize import milp

    cost, rows, bounds, saves = program
    if not rows.low:
        point = evaluate(graph, (), "replay")
        return point if point.held_bytes <= held_bytes else None
    for _ in range(_MOST_CUTS):
        found = milp(
            cost,
            integrality=np.ones(len(cost)),
            bounds=bounds,
            constraints=rows.constraint(len(cost)),
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            return None
        chosen = [i for i in range(len(graph.calls)) if found.x[saves[i]] > 0.5]
        point = evaluate(graph, [graph.calls[i].index for i in chosen], "replay")
        if point.held_bytes <= held_bytes:
            return point
        # The solver takes a millionth of a whole number for none: exclude this set by name.
        others = [i for i in range(len(graph.calls)) if i not in set(chosen)]
        terms = {saves[i]: -1.0 for i in chosen} | {saves[i]: 1.0 for i in others}
        rows.add(terms, 1.0 - len(chosen))
    return None
