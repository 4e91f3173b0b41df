"""A block's frontier is all the best choices, and none but these: compared with trying everything."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planning import Call, Graph, best_under, evaluate, frontier_of, keep_all

GRAPHS = 500


def random_graph(seed: int, most: int = 7) -> Graph:
    """A small block: chains and diamonds, several outputs, writes in place, routing, free and counted inputs."""
    rng = random.Random(seed)
    inputs = rng.randint(0, 2)
    nbytes = [rng.randint(1, 20) for _ in range(inputs)]
    drafts, alive, overwritten = [], list(range(inputs)), set()
    for index in range(rng.randint(1, most)):
        reads = tuple(sorted(rng.sample(alive, min(len(alive), rng.randint(0, 3)))))
        fresh = []
        for _ in range(rng.choice((1, 1, 1, 2, 0))):
            fresh.append(len(nbytes))
            nbytes.append(rng.choice((0, 1, 2, 5, 8, rng.randint(1, 30))))
        written = []
        if reads and rng.random() < 0.2 and reads[0] >= inputs:
            overwritten.add(reads[0])
            alive.remove(reads[0])
            written.append(len(nbytes))
            nbytes.append(nbytes[reads[0]])
        alive += fresh + written
        drafts.append((index, reads, tuple(fresh), tuple(written), rng.choice((0, 1, 3, rng.randint(1, 50)))))
    calls = tuple(
        Call(
            index=3 * index,
            op=f"lab.op{index % 3}.default",
            number=index // 3,
            cost_ns=cost,
            reads=reads,
            makes=written + fresh,
            savable=() if written else tuple(v for v in fresh if v not in overwritten),
            forced=rng.random() < 0.1,
        )
        for index, reads, fresh, written, cost in drafts
    )
    # What was overwritten is no longer there to be needed.
    needed = frozenset(v for v in alive if rng.random() < 0.6)
    last = max((i for i, c in enumerate(calls) if needed.intersection(c.makes)), default=-1)
    return Graph(
        calls=calls,
        nbytes=tuple(nbytes),
        needed=needed,
        inputs=frozenset(range(inputs)),
        stop=rng.randint(last + 1, len(calls)),
        pinned_bytes=rng.choice((0, 4)),
        views_ns=rng.choice((0, 2)),
    )


def price(graph: Graph, saved: set[int], executor: str) -> tuple[int, int]:
    """(bytes, time) of one set of saved calls, by the executors' own words: written apart from the library's code."""
    maker = {value: i for i, call in enumerate(graph.calls) for value in call.makes}
    saved = {i for i in range(len(graph.calls)) if i in saved or graph.calls[i].forced}
    if executor == "recompute":
        kept = {i for i in saved if graph.calls[i].makes and set(graph.calls[i].savable) == set(graph.calls[i].makes)}
        kept &= set(range(graph.stop))
        time = sum(graph.calls[i].cost_ns for i in range(graph.stop) if i not in kept) + graph.views_ns
        held = {v for i in kept for v in graph.calls[i].makes} | set(graph.inputs)
        return sum(graph.nbytes[v] for v in held) + graph.pinned_bytes, time
    available = {v for i in saved for v in graph.calls[i].savable}
    runs, touched, pending = set(), set(), list(graph.needed)
    while pending:
        value = pending.pop()
        if value in touched:
            continue
        touched.add(value)
        if value in available or value not in maker or maker[value] in runs:
            continue
        runs.add(maker[value])
        pending += graph.calls[maker[value]].reads
    held = (touched & available) | (touched & graph.inputs)
    return sum(graph.nbytes[v] for v in held) + graph.pinned_bytes, sum(graph.calls[i].cost_ns for i in runs)


def tried_out(graph: Graph, executor: str) -> list[tuple[int, int]]:
    every = keep_all(graph)
    found = {(every.held_bytes, 0)}
    free = [i for i, call in enumerate(graph.calls) if not call.forced]
    for count in range(len(free) + 1):
        for saved in itertools.combinations(free, count):
            found.add(price(graph, set(saved), executor))
    best = []
    for held, time in sorted(found):
        if not best or time < best[-1][1]:
            best.append((held, time))
    return best


@pytest.mark.parametrize("executor", ["replay", "recompute"])
def test_the_frontier_equals_trying_out_every_set(executor):
    for seed in range(GRAPHS):
        graph = random_graph(seed)
        frontier = frontier_of(graph, executor)
        assert frontier.exact
        found = [(p.held_bytes, p.recompute_ns) for p in frontier.points]
        assert found == tried_out(graph, executor), (seed, graph)


@pytest.mark.parametrize("executor", ["replay", "recompute"])
def test_a_points_saves_give_its_numbers(executor):
    for seed in range(0, GRAPHS, 5):
        graph = random_graph(seed)
        by_index = {call.index: i for i, call in enumerate(graph.calls)}
        for point in frontier_of(graph, executor).points:
            assert point == (evaluate(graph, point.saves, executor) if point.region else keep_all(graph))
            if point.region:
                saved = {by_index[i] for i in point.saves}
                assert price(graph, saved, executor) == (point.held_bytes, point.recompute_ns), seed


def test_the_integer_program_agrees_at_every_budget():
    for seed in range(0, GRAPHS, 10):
        graph = random_graph(seed)
        regions = [price(graph, set(s), "replay") for s in subsets(len(graph.calls))]
        for budget in range(0, max(held for held, _ in regions) + 1, 3):
            fitting = [time for held, time in regions if held <= budget]
            point = best_under(graph, budget)
            assert (None if point is None else point.recompute_ns) == min(fitting, default=None), (seed, budget)


def subsets(count: int):
    return itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(count + 1))


@given(seed=st.integers(0, 10**9), data=st.data())
@settings(max_examples=150, deadline=None)
def test_keeping_more_never_recomputes_longer(seed, data):
    graph = random_graph(seed, most=14)
    indices = [call.index for call in graph.calls]
    less = data.draw(st.sets(st.sampled_from(indices)))
    more = less | data.draw(st.sets(st.sampled_from(indices)))
    for executor in ("replay", "recompute"):
        assert evaluate(graph, more, executor).recompute_ns <= evaluate(graph, less, executor).recompute_ns


@given(seed=st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_frontiers_are_monotone_and_beat_every_set(seed):
    graph = random_graph(seed, most=14)
    rng = random.Random(seed)
    for executor in ("replay", "recompute"):
        points = frontier_of(graph, executor).points
        assert all(
            a.held_bytes < b.held_bytes and a.recompute_ns > b.recompute_ns for a, b in itertools.pairwise(points)
        )
        assert points[-1].recompute_ns == 0 or points[-1].held_bytes < keep_all(graph).held_bytes
        for _ in range(20):
            other = evaluate(graph, [c.index for c in graph.calls if rng.random() < 0.5], executor)
            best = frontier_of(graph, executor).under(other.held_bytes)
            assert best is not None
            assert best.recompute_ns <= other.recompute_ns


def test_replay_never_costs_more_than_recompute_at_the_same_bytes():
    for seed in range(0, GRAPHS, 7):
        graph = random_graph(seed)
        replay = frontier_of(graph, "replay")
        for point in frontier_of(graph, "recompute").points:
            best = replay.under(point.held_bytes)
            assert best is not None
            assert best.recompute_ns <= point.recompute_ns
