"""Which recorded operators run again, in what order, and how long each value stays.

Knows no tensors: only numbers of states and operators. A region that records the same ``Step``s as before uses the
schedule made then, whatever its shapes and literals.

Backward asks for one slot after another. What has to run for a slot depends only on which slots were asked for
before, so the answers are kept as a tree: one ``Node`` for each order of requests that ever came. Backward of an
unchanged graph walks the same path every time.

A value stays while a slot that was not asked for yet, or an operator that did not run yet, needs it; so each operator
runs once, and work and memory come as late as they can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Node", "Run", "Schedule", "Step"]

Step = tuple[Any, tuple[int, ...], tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
"""(kind of operator, states read, (output position, state made), (state before a write, state after it))."""

_MOST_NODES = 10_000


@dataclass(frozen=True, slots=True)
class Run:
    """One operator to run again."""

    index: int
    sources: tuple[int, ...]
    """States to read, in the order of the record; those that it writes stand as they are after the write."""
    stores: tuple[tuple[int, int], ...]
    """(output position, state) of outputs that somebody needs."""
    writes: tuple[tuple[int, int, bool], ...]
    """(state before, state after, whether to write into a copy)."""
    frees: tuple[int, ...]
    """States that nobody needs after it."""


@dataclass(slots=True)
class Node:
    """Where a backward stands after some requests."""

    served: frozenset[int]
    """Slots asked for so far."""
    done: frozenset[int]
    uses: dict[int, int]
    """State -> slots and operators that still need it."""
    runs: tuple[Run, ...] = ()
    """What to run for the last request."""
    frees: tuple[int, ...] = ()
    """States that nobody needs once the last request is answered."""
    next: dict[int, Node] = field(default_factory=dict)


class Schedule:
    """For one sequence of steps, the states that are kept, and the states of the slots that autograd holds."""

    def __init__(self, steps: Sequence[Step], kept: frozenset[int], slots: tuple[int, ...]) -> None:
        self.steps = tuple(steps)
        self.kept = kept
        self.slots = slots
        self._producer: dict[int, int] = {}
        for index, (_, _, makes, writes) in enumerate(self.steps):
            for _, state in (*makes, *writes):
                self._producer[state] = index
        self.needed, states = self.closure(slots)
        """Operators that a backward of all slots runs."""
        self.states = frozenset(states)
        """States that such a backward touches: what is not made by a needed operator must be held."""
        self.outside = frozenset(s for s in states if s not in self._producer)
        """States from outside that it reads."""
        self.inner_kept = frozenset(states & kept)
        """Kept states that it reads."""
        self.verified = frozenset(slots) - kept
        """States whose replay is compared with what autograd saved before this schedule counts as known."""
        self.watchable = frozenset(slots) | self.inner_kept
        """States that stay or come back, so that a write to them from outside is an error."""
        self.keeps = tuple(frozenset(self.closure((state,))[1] & kept) for state in slots)
        """For each slot, the kept states that it depends on."""
        self._roots: dict[tuple[int, ...], Node] = {}
        self._nodes = 0

    def matches(self, steps: Sequence[Step], kept: frozenset[int], slots: tuple[int, ...]) -> bool:
        """Whether this schedule is the one for what was recorded."""
        return self.slots == slots and self.kept == kept and self.steps == tuple(steps)

    def closure(self, wanted: Iterable[int]) -> tuple[set[int], set[int]]:
        """Return the operators and states that lead to the wanted states, from what is held."""
        ops: set[int] = set()
        seen: set[int] = set()
        stack = list(wanted)
        while stack:
            state = stack.pop()
            if state in seen:
                continue
            seen.add(state)
            index = self._producer.get(state)
            if index is None or state in self.kept or index in ops:
                continue
            ops.add(index)
            stack.extend(self.steps[index][1])
        return ops, seen

    def producer(self, state: int) -> int | None:
        """Return the operator that made a state; None for what comes from outside."""
        return self._producer.get(state)

    def root(self, alive: tuple[int, ...]) -> Node:
        """Return where a backward starts that may ask for these slots, each once."""
        found = self._roots.get(alive)
        if found is None:
            if self._nodes > _MOST_NODES:
                self._roots.clear()
                self._nodes = 0
            found = self._roots[alive] = self._start(alive)
        return found

    def _start(self, alive: tuple[int, ...]) -> Node:
        uses = Counter(self.slots[i] for i in alive)
        ops, _ = self.closure(uses)
        for index in ops:
            uses.update(set(self.steps[index][1]))
        return Node(frozenset(), frozenset(), dict(uses))

    def after(self, node: Node, slot: int) -> Node:
        """Return where backward stands once it has asked for one more slot."""
        self._nodes += 1
        uses = dict(node.uses)
        done = set(node.done)
        pending = sorted(self._behind(self.slots[slot], done))
        runs = [self._run(index, uses, done) for index in pending]
        state = self.slots[slot]
        uses[state] -= 1
        frees = () if uses[state] else (state,)
        found = Node(node.served | {slot}, frozenset(done), uses, tuple(runs), frees)
        node.next[slot] = found
        return found

    def _behind(self, state: int, done: set[int]) -> set[int]:
        """Operators that must still run for a state."""
        ops: set[int] = set()
        stack = [state]
        while stack:
            current = stack.pop()
            index = self._producer.get(current)
            if index is None or current in self.kept or index in done or index in ops:
                continue
            ops.add(index)
            stack.extend(self.steps[index][1])
        return ops

    def _run(self, index: int, uses: dict[int, int], done: set[int]) -> Run:
        _, reads, makes, writes = self.steps[index]
        done.add(index)
        copied = tuple((before, after, self._must_copy(before, uses)) for before, after in writes)
        renamed = dict(writes)
        frees: list[int] = []
        for state in set(reads):
            uses[state] -= 1
            if not uses[state]:
                frees.append(state)
        frees += [after for _, after in writes if not uses.get(after)]
        stores = tuple((position, state) for position, state in makes if uses.get(state))
        return Run(index, tuple(renamed.get(s, s) for s in reads), stores, copied, tuple(frees))

    def _must_copy(self, state: int, uses: dict[int, int]) -> bool:
        """Whether a write needs a copy: of what is held, what another operator reads, and what autograd may have."""
        held = state not in self._producer or state in self.kept
        return held or uses[state] > 1 or state in self.slots
