"""Saved bytes and recompute time of one block: exact choices beside those that people use."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from lowtide.planning import Frontier, Graph, Point, evaluate, frontier_of, graph_of, keep_all
from lowtide.policy import Block, LayerPolicy, parse_policy, resolve
from lowtide.policy._presets import named_policy
from lowtide.prediction import regions_of, trace_ms
from lowtide.records import OpTrace

PEERS = ("torchtitan", "full", "every second layer", "attention only")


@dataclass(frozen=True)
class Peer:
    """What a choice holds and recomputes, for two layers: one of the peers treats every second layer in its own way."""

    name: str
    held_bytes: int
    recompute_ns: int


@dataclass(frozen=True)
class Result:
    """Exact choices of one executor beside one peer, for two layers."""

    executor: str
    peer: Peer
    at_equal_bytes: tuple[int, int]
    """(bytes, nanoseconds) of the fastest that holds no more."""
    at_equal_time: tuple[int, int]
    """The same of the smallest that takes no longer."""

    @property
    def less_time(self) -> float:
        return 1 - self.at_equal_bytes[1] / self.peer.recompute_ns if self.peer.recompute_ns else 0.0

    @property
    def fewer_bytes(self) -> float:
        return 1 - self.at_equal_time[0] / self.peer.held_bytes


@dataclass(frozen=True)
class Comparison:
    block: str
    forward_ms: float
    none_bytes: int
    results: tuple[Result, ...]
    search_s: float
    points: tuple[int, int]
    exact: bool


def compare(name: str, trace: OpTrace, device: str) -> Comparison:
    argument = [s.id for s in trace.storages if s.role == "argument" and s.name in ("0", "hidden_states")][:1]
    graph = graph_of(trace, device, counted=argument)
    started = time.perf_counter()
    frontiers = [frontier_of(graph, "replay"), frontier_of(graph, "recompute")]
    took = time.perf_counter() - started
    none = keep_all(graph)
    full = evaluate(graph, (), "recompute")
    peers = (
        _twice("torchtitan", _as_torch_holds(graph, _saves(trace, _torchtitan(trace)))),
        _twice("full", full),
        Peer("every second layer", full.held_bytes + none.held_bytes, full.recompute_ns),
        _twice("attention only", _as_torch_holds(graph, _saves(trace, "save_attention"))),
    )
    results = tuple(_against(frontier, peer) for frontier in frontiers for peer in peers)
    return Comparison(
        block=name,
        forward_ms=trace_ms(trace, "forward", device),
        none_bytes=none.held_bytes,
        results=results,
        search_s=took,
        points=(len(frontiers[0].points), len(frontiers[1].points)),
        exact=all(f.exact for f in frontiers),
    )


def _as_torch_holds(graph: Graph, saves: frozenset[int]) -> Point:
    """Price saves as torch's selective contexts carry them out: what they save in vain stays too."""
    point = evaluate(graph, saves, "recompute")
    vain = sum(graph.nbytes[v] for c in graph.calls[graph.stop :] if c.index in saves for v in c.makes)
    return replace(point, saved_bytes=point.saved_bytes + vain)


def _twice(name: str, point: Point) -> Peer:
    return Peer(name, 2 * point.held_bytes, 2 * point.recompute_ns)


def _torchtitan(trace: OpTrace) -> dict[str, object] | str:
    """The preset; where all products have a bias, with addmm in the place of mm, as its file says."""
    policy = named_policy("torchtitan")
    if any(op.op.startswith("aten.mm.") for op in trace.forward):
        return policy
    rules = [{**rule, "op": "aten.addmm"} if rule.get("op") == "aten.mm" else rule for rule in policy["rules"]]
    return {**policy, "rules": rules}


def _saves(trace: OpTrace, policy: object) -> frozenset[int]:
    parsed = parse_policy(named_policy(policy) if isinstance(policy, str) else policy)
    assert isinstance(parsed, LayerPolicy)
    recipes = resolve(parsed, (Block("block", "", 0),), lambda _: ()).regions
    (region,), _ = regions_of(trace, recipes, "recompute")
    return region.saves


def _against(frontier: Frontier, peer: Peer) -> Result:
    """Choose for two layers at once, as the peers do."""
    held = np.array([p.held_bytes for p in frontier.points], dtype=np.int64)
    took = np.array([p.recompute_ns for p in frontier.points], dtype=np.int64)
    both_held, both_took = (held[:, None] + held[None, :]).ravel(), (took[:, None] + took[None, :]).ravel()
    # Routing results are saved by every plan; a peer that lets go of a few bytes of them is given these.
    peer = replace(peer, held_bytes=max(peer.held_bytes, int(both_held.min())))
    fits, fast = both_held <= peer.held_bytes, both_took <= peer.recompute_ns
    fastest = min(zip(both_took[fits].tolist(), both_held[fits].tolist(), strict=True))
    smallest = min(zip(both_held[fast].tolist(), both_took[fast].tolist(), strict=True))
    return Result(frontier.executor, peer, (fastest[1], fastest[0]), smallest)
