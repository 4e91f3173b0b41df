"""From a step's outline and its blocks' traces to the question that ``_model`` answers.

Which layers hold something at a moment follows from the outline: a block holds from the end of its forward to the
start of its backward, and in backward the last block comes first. So at every moment the first k layers hold. The
moments at which all do make the head; those at which k do are counted to layer k, whose own backward has the same k
layers before it; those at which none does are fixed.

A block's argument that no other block is given (what the layer before returned) counts to the block that holds it;
one that several are given (rope tables, a mask) counts once, as held by all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from lowtide.planning._block import Frontier, frontier_of
from lowtide.planning._graph import Executor, Point, graph_of
from lowtide.planning._model import Choice, Kind, Step
from lowtide.prediction import AnyDevice, BlockCall, BlockCost, RegionChoice, StepOutline, block_cost
from lowtide.records import OpTrace

__all__ = ["Menu", "menus_of", "state_bytes", "step_of"]

_MOST_POINTS = 120
_GENERATOR_BYTES = 5056
"""What ``torch.utils.checkpoint`` keeps of the host's generator for each region (torch 2.11 to 2.15)."""


@dataclass(frozen=True)
class Menu:
    """What there is to choose from for one kind of block, and what each costs."""

    trace: OpTrace
    frontier: Frontier
    points: tuple[Point, ...]
    costs: tuple[BlockCost, ...]
    own: frozenset[str]
    """Names of the arguments that no other block is given."""


def menus_of(
    outline: StepOutline,
    traces: Mapping[str, OpTrace],
    executor: Executor,
    device: AnyDevice | None = None,
) -> dict[str, Menu]:
    """Find every kind's best choices and price them; the work grows with kinds."""
    where: AnyDevice = outline.device if device is None else device
    own = _own_arguments(outline)
    found: dict[str, Menu] = {}
    for kind in dict.fromkeys(call.kind for call in outline.calls):
        found[kind] = _menu(traces[kind], own[kind], executor, where, outline.threads)
    return found


def _own_arguments(outline: StepOutline) -> dict[str, frozenset[str]]:
    given = Counter(storage for call in outline.calls for storage in {s for _, s in call.arguments})
    found: dict[str, set[str]] = {}
    for call in outline.calls:
        names = {name for name, storage in call.arguments if given[storage] == 1}
        found[call.kind] = found.get(call.kind, names) & names
    return {kind: frozenset(names) for kind, names in found.items()}


def _menu(trace: OpTrace, own: frozenset[str], executor: Executor, device: AnyDevice, threads: int) -> Menu:
    counted = [s.id for s in trace.storages if s.role == "argument" and s.name in own]
    graph = graph_of(trace, device, counted=counted, threads=threads)
    frontier = frontier_of(graph, executor)
    points = _spread(frontier.points)
    states = state_bytes(trace, executor)
    costs = tuple(
        block_cost(
            trace,
            (RegionChoice("", frozenset(point.saves), executor, states),) if point.region else (),
            device,
            threads=threads,
        )
        for point in points
    )
    return Menu(trace, frontier, points, costs, own)


def state_bytes(trace: OpTrace, executor: Executor) -> int:
    """Return what a region holds of the host's generator; on a GPU it lies elsewhere."""
    return _GENERATOR_BYTES if executor == "recompute" and trace.device == "cpu" else 0


def _spread(points: Sequence[Point]) -> tuple[Point, ...]:
    """Of very many points keep the fastest of each stretch of bytes, and both ends."""
    if len(points) <= _MOST_POINTS:
        return tuple(points)
    low, span = points[0].held_bytes, max(points[-1].held_bytes - points[0].held_bytes, 1)
    stretches = {(p.held_bytes - low) * (_MOST_POINTS - 2) // span: p for p in points}
    return tuple(sorted({points[0], *stretches.values()}))


def step_of(outline: StepOutline, menus: Mapping[str, Menu]) -> Step:
    """Write the step as moments over layers. Layers are the outline's calls that have a backward, in their order."""
    layers = [call for call in outline.calls if call.backward is not None]
    live = list(accumulate((change.delta for change in outline.changes), initial=0))
    _hold_shared(outline, layers, menus, live)
    gaps = _gaps(layers, live, outline)
    count = len(layers)
    kinds: list[Kind] = []
    bases, numbers = [0] * count, [0] * count
    known: dict[tuple[Choice, ...], int] = {}
    for kind, group in groupby(range(count), key=lambda i: layers[i].kind):
        members = list(group)
        for i in members:
            bases[i] = live[_begin(layers[i])]
        choices = _choices(menus[kind], _Around(layers, members, live, gaps, bases))
        number = known.setdefault(choices, len(kinds))
        if number == len(kinds):
            kinds.append(Kind(kind, choices))
        for i in members:
            numbers[i] = number
    return Step(tuple(kinds), tuple(numbers), tuple(bases), gaps[count], gaps[0])


def _begin(call: BlockCall) -> int:
    assert call.backward is not None
    return call.backward[0]


@dataclass(frozen=True)
class _Around:
    """What is alive around consecutive layers of a kind."""

    layers: Sequence[BlockCall]
    members: Sequence[int]
    live: Sequence[int]
    gaps: Sequence[int]
    bases: Sequence[int]

    @property
    def forward(self) -> int:
        """How much more than in backward is alive in forward, at most."""
        return max(self.live[self.layers[i].forward[0]] - self.bases[i] for i in self.members)

    @property
    def between(self) -> int:
        """The same of the moments around the layers."""
        return max(self.gaps[i] - self.bases[i] if i else 0 for i in self.members)


def _choices(menu: Menu, around: _Around) -> tuple[Choice, ...]:
    inputs = {s.name: s.nbytes for s in menu.trace.storages if s.role == "argument"}
    found: list[Choice] = []
    for point, cost in zip(menu.points, menu.costs, strict=True):
        own = sum(inputs[name] for name in cost.holds & menu.own)
        held = cost.saved_bytes + own
        highest = max(cost.backward_bytes + own, cost.forward_bytes + around.forward, around.between)
        found.append(Choice(held, max(highest - held, 0), point.recompute_ns))
    return tuple(found)


def _gaps(layers: Sequence[BlockCall], live: Sequence[int], outline: StepOutline) -> list[int]:
    """For every k, the most that is alive outside of blocks while k layers hold."""
    inside = [False] * len(live)
    change = [0] * (len(live) + 1)
    for call in layers:
        begin, end = call.backward or (0, 0)
        for place in (*range(call.forward[0] + 1, call.forward[1]), *range(begin + 1, end + 1)):
            inside[place] = True
        change[call.forward[1]] += 1
        change[begin] -= 1
    found = [0] * (len(layers) + 1)
    for place, holding in enumerate(accumulate(change[: len(live)])):
        if not inside[place]:
            found[holding] = max(found[holding], live[place])
    return found


def _hold_shared(outline: StepOutline, layers: Sequence[BlockCall], menus: Mapping[str, Menu], live: list[int]) -> None:
    """Let what several blocks are given live to the end of the first one's backward, where any choice holds it."""
    until: dict[int, int] = {}
    for call in layers:
        held = frozenset[str]().union(*(cost.holds for cost in menus[call.kind].costs)) - menus[call.kind].own
        for name, storage in call.arguments:
            if name in held:
                until[storage] = max(until.get(storage, 0), (call.backward or (0, 0))[1])
    alive: dict[int, int] = {}
    for place, change in enumerate(outline.changes, start=1):
        before = alive.get(change.storage, 0)
        alive[change.storage] = before + change.delta
        if before and not alive[change.storage]:
            for later in range(place, until.get(change.storage, 0)):
                live[later] += before
