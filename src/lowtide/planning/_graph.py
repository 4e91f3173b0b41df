"""What a block's forward made, what backward needs of it, and what making it again costs; numbers only.

A *value* is the content of one storage between two writes: views are the same value, a write in place makes a new
one. A *call* is one operator that made values. What was there before the block ran (arguments, parameters, buffers,
constants) is read for free; arguments can be made to count once they are held (``counted``).

What a call can keep is what the executors can keep (``lowtide.regions``), since a plan names operators and the
numbers of their calls: an operator that writes in place has no output of its own to save, and an output that is
written later is let go. Routing operators are saved whatever a plan says, so here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lowtide.policy import ROUTING_OPS
from lowtide.prediction import AnyDevice, op_ms
from lowtide.records import OpRecord, OpTrace

__all__ = ["Call", "Executor", "Graph", "Point", "evaluate", "graph_of", "keep_all"]

Executor = Literal["recompute", "replay"]

_NS = 1_000_000
_VIEWS_IN_PLACE = {
    "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_", "detach_", "rename_",
    "requires_grad_",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One operator of forward that makes values."""

    index: int
    """Of the operator in the trace."""

    op: str
    """The overload."""

    number: int
    """How many calls of this overload came before it in the block."""

    cost_ns: int
    reads: tuple[int, ...] = ()
    """Values that it reads, without those that are there anyway."""

    makes: tuple[int, ...] = ()

    savable: tuple[int, ...] = ()
    """Those of ``makes`` that a saved call keeps."""

    forced: bool = False
    """Saved by every policy."""


@dataclass(frozen=True)
class Graph:
    """A block, as the question of what to keep sees it."""

    calls: tuple[Call, ...]
    nbytes: tuple[int, ...]
    """Value -> bytes that holding it costs; zero for what is alive anyway."""

    needed: frozenset[int]
    """Values that backward reads."""

    inputs: frozenset[int] = frozenset()
    """Values that are there before, and count once something needs them."""

    stop: int = 0
    """How many of ``calls`` executor recompute comes to: it ends once all that autograd packed is there again."""

    pinned_bytes: int = 0
    """What Python holds from forward to backward, whatever is chosen."""

    views_ns: int = 0
    """Time of the views that executor recompute makes again."""

    by_index: Mapping[int, Call] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_index", {call.index: call for call in self.calls})

    def can_save(self, call: Call, executor: Executor) -> bool:
        """Whether saving a call keeps its outputs; recompute gives back all of them or none."""
        if executor == "recompute":
            return bool(call.makes) and call.savable == call.makes
        return bool(call.savable)


@dataclass(frozen=True, order=True)
class Point:
    """One choice for a block, and what it costs."""

    saved_bytes: int
    """Made in the block and held from forward to backward."""

    input_bytes: int
    """Counted arguments that are held."""

    recompute_ns: int

    saves: tuple[int, ...]
    """Operators of the trace whose outputs are saved."""

    region: bool = True
    """Whether the block is a region; without one autograd keeps all that it packs."""

    @property
    def held_bytes(self) -> int:
        """All that this choice holds."""
        return self.saved_bytes + self.input_bytes

    @property
    def recompute_ms(self) -> float:
        """Time of what runs twice."""
        return self.recompute_ns / _NS


class _Builder:
    def __init__(self, trace: OpTrace, counted: Iterable[int]) -> None:
        self.trace = trace
        self.nbytes: list[int] = []
        self.current: dict[int, int] = {}
        self.overwritten: set[int] = set()
        packed = {t.storage for t in trace.saved}
        self.pinned = {s.id for s in trace.storages if s.saved and not s.backward and s.id not in packed}
        self.inputs: set[int] = set()
        for storage in sorted(set(counted)):
            self.inputs.add(self._new(storage, None))

    def _new(self, storage: int, made_by: int | None) -> int:
        value = len(self.nbytes)
        record = self.trace.storages[storage]
        alive_anyway = record.returned or storage in self.pinned
        self.nbytes.append(0 if made_by is not None and alive_anyway else record.nbytes)
        self.current[storage] = value
        return value

    def read(self, op: OpRecord) -> tuple[int, ...]:
        if op.is_blank:
            return ()
        found = {self.current[t.storage] for t in op.inputs if t.storage is not None and t.storage in self.current}
        return tuple(sorted(found))

    def make(self, op: OpRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (values made, those that are new storages)."""
        written: list[int] = []
        for storage in op.writes:
            before = self.current.get(storage)
            if before is not None:
                self.overwritten.add(before)
            written.append(self._new(storage, op.index))
        storages = self.trace.storages
        fresh = {t.storage for t in op.outputs if t.storage is not None and storages[t.storage].made_by == op.index}
        made = [self._new(storage, op.index) for storage in sorted(fresh - set(op.writes))]
        return tuple(written + made), tuple(made)


def _is_view(op: OpRecord) -> bool:
    return op.view or op.op.split(".")[1] in _VIEWS_IN_PLACE


def _routes(name: str) -> bool:
    packet, _, _ = name.rpartition(".")
    return packet in ROUTING_OPS or name in ROUTING_OPS


def graph_of(
    trace: OpTrace,
    device: AnyDevice | None = None,
    *,
    costs_ms: Sequence[float] | None = None,
    counted: Iterable[int] = (),
    threads: int = 1,
) -> Graph:
    """Build the graph of a trace.

    Args:
        trace: forward and backward of one block.
        device: what prices the operators; the trace's own by default.
        costs_ms: a price for each operator of the trace, in the place of ``op_ms``.
        counted: ``id`` of the arguments' storages that count once they are held; the others are there anyway.
        threads: CPU threads, for the table's nominal core.
    """
    where: AnyDevice = trace.device if device is None else device
    builder = _Builder(trace, counted)
    numbers: Counter[str] = Counter()
    last = max(trace.saved_at, default=None)
    drafts: list[tuple[OpRecord, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    stop = views_ns = 0
    for op in trace.forward:
        number = numbers[op.op]
        numbers[op.op] += 1
        cost_ms = op_ms(op, where, threads=threads) if costs_ms is None else costs_ms[op.index]
        cost_ns = round(cost_ms * _NS)
        runs = last is None or op.index < last
        if _is_view(op):
            views_ns += cost_ns if runs else 0
            continue
        reads = builder.read(op)
        makes, fresh = builder.make(op)
        drafts.append((op, number, cost_ns, reads, makes, fresh))
        stop = len(drafts) if runs else stop
    calls = tuple(
        Call(op.index, op.op, number, cost_ns, reads, makes, _savable(op, fresh, builder.overwritten), _routes(op.op))
        for op, number, cost_ns, reads, makes, fresh in drafts
    )
    packed = {t.storage for t in trace.saved if t.storage is not None}
    return Graph(
        calls=calls,
        nbytes=tuple(builder.nbytes),
        needed=frozenset(builder.current[s] for s in packed if s in builder.current),
        inputs=frozenset(builder.inputs),
        stop=stop,
        pinned_bytes=sum(trace.storages[s].nbytes for s in builder.pinned if trace.storages[s].role == "made"),
        views_ns=views_ns,
    )


def _savable(op: OpRecord, fresh: tuple[int, ...], overwritten: set[int]) -> tuple[int, ...]:
    return () if op.writes else tuple(v for v in fresh if v not in overwritten)


def keep_all(graph: Graph) -> Point:
    """Return the block without a region: autograd keeps what it packs, and nothing runs twice."""
    made = graph.needed - graph.inputs
    return Point(
        saved_bytes=sum(graph.nbytes[v] for v in made) + graph.pinned_bytes,
        input_bytes=sum(graph.nbytes[v] for v in graph.needed & graph.inputs),
        recompute_ns=0,
        saves=(),
        region=False,
    )


def evaluate(graph: Graph, saves: Iterable[int], executor: Executor) -> Point:
    """Say what a set of saved operators holds and costs; what cannot be saved is recomputed.

    Args:
        graph: the block.
        saves: operators of the trace; routing operators are saved in any case.
        executor: ``replay`` runs what backward's needs lead to, ``recompute`` all that is not saved up to its end.
    """
    asked = set(saves)
    saved = {c.index for c in graph.calls if (c.index in asked or c.forced) and graph.can_save(c, executor)}
    named = tuple(sorted(i for i in saved if i in asked and not graph.by_index[i].forced))
    if executor == "recompute":
        return _rerun(graph, saved, named)
    wanted = set(graph.needed)
    held = cost = 0
    for call in reversed(graph.calls):
        here = wanted.intersection(call.makes)
        if not here:
            continue
        kept = here.intersection(call.savable) if call.index in saved else set[int]()
        held += sum(graph.nbytes[v] for v in kept)
        if kept != here:
            cost += call.cost_ns
            wanted.update(call.reads)
    inputs = sum(graph.nbytes[v] for v in wanted & graph.inputs)
    return Point(held + graph.pinned_bytes, inputs, cost, named)


def _rerun(graph: Graph, saved: set[int], named: tuple[int, ...]) -> Point:
    cost = sum(c.cost_ns for c in graph.calls[: graph.stop] if c.index not in saved)
    # What recompute never comes to is let go after the first step.
    held = sum(graph.nbytes[v] for c in graph.calls[: graph.stop] if c.index in saved for v in c.makes)
    inputs = sum(graph.nbytes[v] for v in graph.inputs)
    reached = {c.index for c in graph.calls[: graph.stop]}
    return Point(held + graph.pinned_bytes, inputs, cost + graph.views_ns, tuple(i for i in named if i in reached))
