"""Schedules on random programs: whatever backward asks for, in any order, is right, and each operator runs once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.regions._schedule import Schedule, Step


@dataclass
class Program:
    steps: list[Step] = field(default_factory=list)
    content: dict[int, Any] = field(default_factory=dict)
    """State -> what it holds, as an expression."""
    outside: set[int] = field(default_factory=set)
    current: list[int] = field(default_factory=list)
    """Of each storage, its state after the last write."""


@st.composite
def programs(draw: Any) -> Program:
    program = Program()

    def state(content: Any) -> int:
        number = len(program.content)
        program.content[number] = content
        return number

    for _ in range(draw(st.integers(1, 3))):
        made = state(("outside", len(program.content)))
        program.outside.add(made)
        program.current.append(made)
    for index in range(draw(st.integers(1, 10))):
        chosen = draw(st.lists(st.integers(0, len(program.current) - 1), min_size=1, max_size=3))
        reads = tuple(program.current[i] for i in chosen)
        inputs = tuple(program.content[s] for s in reads)
        if draw(st.booleans()):
            makes = tuple((p, state(("made", index, p, inputs))) for p in range(draw(st.integers(1, 2))))
            program.steps.append((f"op{index}", reads, makes, ()))
            program.current += [s for _, s in makes]
        else:
            after = state(("written", index, inputs))
            program.steps.append((f"op{index}_", reads, (), ((reads[0], after),)))
            program.current[chosen[0]] = after
    return program


class Cell:
    """A storage."""

    def __init__(self, content: Any) -> None:
        self.content = content


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_order_of_requests_is_answered_right(data: Any) -> None:
    program = data.draw(programs())
    states = list(program.content)
    inside = [s for s in states if s not in program.outside]
    written = {before for _, _, _, writes in program.steps for before, _ in writes}
    kept = frozenset(data.draw(st.sets(st.sampled_from(inside), max_size=3)) - written) if inside else frozenset()
    wanted = [s for s in inside if s not in kept]
    if not wanted:
        return
    slots = tuple(data.draw(st.lists(st.sampled_from(wanted), min_size=1, max_size=6)))
    schedule = Schedule(program.steps, kept, slots)
    held = {s: Cell(program.content[s]) for s in (*schedule.outside, *schedule.inner_kept)}
    for _ in range(2):
        order = data.draw(st.permutations(range(len(slots))))
        ran, served = _backward(program, schedule, held, order)
        assert sorted(ran) == sorted(schedule.needed)
        # What autograd was given is not written to afterwards, nor is what is held.
        assert [(s, c.content) for s, c in served] == [(s, program.content[s]) for s, _ in served]
        assert {s: c.content for s, c in held.items()} == {s: program.content[s] for s in held}


def _backward(
    program: Program, schedule: Schedule, held: dict[int, Cell], order: list[int]
) -> tuple[list[int], list[tuple[int, Cell]]]:
    node = schedule.root(tuple(range(len(schedule.slots))))
    values: dict[int, Cell] = {}
    ran: list[int] = []
    served: list[tuple[int, Cell]] = []

    def fetch(state: int) -> Cell:
        return values[state] if state in values else held[state]

    for slot in order:
        node = node.next.get(slot) or schedule.after(node, slot)
        for run in node.runs:
            _, reads, _, _ = schedule.steps[run.index]
            inputs = tuple(fetch(s).content for s in reads)
            assert inputs == tuple(program.content[s] for s in reads)
            for before, after, copied in run.writes:
                values[after] = Cell(None) if copied else values[before]
                values[after].content = program.content[after]
            for _, state in run.stores:
                values[state] = Cell(program.content[state])
            for state in run.frees:
                values.pop(state, None)
            ran.append(run.index)
        state = schedule.slots[slot]
        served.append((state, fetch(state)))
        for state in node.frees:
            values.pop(state, None)
    assert values == {}
    return ran, served
