"""What one block costs under one choice, from its trace: bytes held from forward to backward, and how far its own
memory rises in either pass.

A trace says of every storage when it died with autograd keeping what it needs (``freed``), and when Python alone let
go of it in forward (``released``). A choice changes the first and not the second:

    no region    packed tensors stay until backward has used them, all others until Python lets go of them
    recompute    inside a region nothing that is packed stays but what the choice saves; at the first request all
                 operators up to the last packed tensor run again, and their packed tensors stay from there on as in
                 a block without region (``torch.utils.checkpoint``: the region's arguments stay until its end)
    replay       at each request what it needs runs, each operator once, and a value stays while something still
                 needs it

Storages, not tensors: views cost nothing, a write in place makes nothing. Results of the block and arguments are not
the block's own: the outline of the step counts them (``_outline``), and learns from ``holds`` which arguments stay.

Checked against the whole fake step (tests/unit/test_model_of_traces.py). Known limits: what a region's module gets as
arguments is taken from what its operators read; kept values that a later operator overwrites are recomputed.

Over 400 lines: one block, from its trace to the bytes of every moment, on one state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lowtide.policy import ROUTING_OPS
from lowtide.prediction._classes import BY_FLOPS, class_of
from lowtide.prediction._time import AnyDevice, op_ms, speeds_of
from lowtide.records import OpRecord, OpTrace

__all__ = ["BlockCost", "RegionChoice", "block_cost"]


@dataclass(frozen=True)
class RegionChoice:
    """One region in a block, and what it saves."""

    module: str = ""
    """Name, relative to the block, of the module that is the region; empty for the whole block."""

    saves: frozenset[int] = frozenset()
    """Operators of the trace, by index, whose outputs are kept. Routing operators are kept besides."""

    executor: Literal["recompute", "replay"] = "recompute"

    state_bytes: int = 0
    """What it holds besides tensors of the block: the state of the host's generator."""


@dataclass(frozen=True)
class BlockCost:
    """What one call of a block costs under one choice. Bytes are its own: no arguments, no gradients of results."""

    saved_bytes: int
    """Alive from the end of its forward to its backward."""

    forward_bytes: int
    """The most while its forward runs, with what it makes to be saved and with its results."""

    backward_bytes: int
    """The most while its backward runs: what it saved, what runs again, gradients of parameters and arguments; less
    the gradient that came in once that is gone."""

    saved_at_peak_bytes: int = 0
    """Of ``backward_bytes``: what was saved in forward and is still there."""

    holds: frozenset[str] = frozenset()
    """Names of the arguments (as in ``StorageRecord.name``) that stay until its backward has run."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    """Without recompute."""
    recompute_ms: float = 0.0

    forward_flops: int = 0
    backward_flops: int = 0
    recompute_flops: int = 0
    """Of products: matrix products, convolutions, attention."""


def block_cost(
    trace: OpTrace, regions: Sequence[RegionChoice] = (), device: AnyDevice | None = None, *, threads: int = 1
) -> BlockCost:
    """Price one choice for one kind of block.

    Args:
        trace: forward and backward of the block, as ``lowtide.trace`` made it.
        regions: its regions; none keeps what autograd keeps. Regions do not overlap.
        device: what prices the operators; by default the trace's own.
        threads: CPU threads, for the table's nominal core.
    """
    speeds = speeds_of(trace.device if device is None else device, threads=threads)
    block = _Block(trace, regions)
    forward_bytes = _forward(block)
    backward = _Backward(block)
    backward.run()
    ms = [op_ms(op, speeds) for op in trace.ops]
    flops = [(op.flops or 0) if class_of(op.op) in BY_FLOPS else 0 for op in trace.ops]
    passes = {phase: [op.index for op in trace.ops if op.phase == phase] for phase in ("forward", "backward")}
    return BlockCost(
        saved_bytes=block.saved_bytes,
        forward_bytes=forward_bytes,
        backward_bytes=backward.level.peak,
        saved_at_peak_bytes=backward.level.saved_at_peak,
        holds=block.holds,
        forward_ms=sum(ms[i] for i in passes["forward"]),
        backward_ms=sum(ms[i] for i in passes["backward"]),
        recompute_ms=sum(ms[i] for i in backward.ran),
        forward_flops=sum(flops[i] for i in passes["forward"]),
        backward_flops=sum(flops[i] for i in passes["backward"]),
        recompute_flops=sum(flops[i] for i in backward.ran),
    )


@dataclass
class _Region:
    choice: RegionChoice
    ops: list[OpRecord]
    """Operators of forward inside, in order."""
    slots: list[int]
    """Packed tensors inside, by their number."""
    kept: set[int] = field(default_factory=set[int])
    """Storages that it saves."""
    outside: set[int] = field(default_factory=set[int])
    """Storages made before it (in the block, or arguments) that it holds."""
    stop: int = 0
    """Operators of the trace before which recompute ends."""


class _Block:
    """A trace and a choice: what stays from forward to backward."""

    def __init__(self, trace: OpTrace, regions: Sequence[RegionChoice]) -> None:
        self.trace = trace
        self.storages = trace.storages
        self.forward = trace.forward
        self.first = len(self.forward)
        self.regions = [self._region(choice) for choice in regions]
        self.region_of = {k: region for region in self.regions for k in region.slots}
        packed = {s for s in range(len(trace.saved)) if s not in self.region_of}
        self.packed_outside = {s for k in packed if (s := trace.saved[k].storage) is not None}
        self.any_packed = {t.storage for t in trace.saved}
        found_out = any(s.released is not None for s in self.storages)
        self.pinned = {
            s.id
            for s in self.storages
            if self.is_own(s.id) and s.saved and s.id not in self.any_packed and (not found_out or s.released is None)
        }
        self.stays = self.pinned | {s for s in self.packed_outside if self.is_own(s)}
        for region in self.regions:
            self._decide(region)
            self.stays |= {s for s in region.kept | region.outside if self.is_own(s)}
        self.states = [region.choice.state_bytes for region in self.regions]
        self.saved_bytes = sum(self.storages[s].nbytes for s in self.stays) + sum(self.states)
        held = self.packed_outside.union(*(r.outside for r in self.regions))
        self.holds = frozenset(
            name for s in held if self.storages[s].role == "argument" and (name := self.storages[s].name) is not None
        )

    def is_own(self, storage: int) -> bool:
        """Whether forward made it and it is no result."""
        record = self.storages[storage]
        return record.role == "made" and not record.backward and not record.returned

    def _region(self, choice: RegionChoice) -> _Region:
        def inside(module: str) -> bool:
            return not choice.module or module == choice.module or module.startswith(f"{choice.module}.")

        ops = [op for op in self.forward if inside(op.module)]
        trace = self.trace
        where = trace.saved_in or ("",) * len(trace.saved)
        region = _Region(choice, ops, [k for k, module in enumerate(where) if inside(module)])
        region.stop = max((trace.saved_at[k] for k in region.slots if k < len(trace.saved_at)), default=self.first)
        return region

    def _decide(self, region: _Region) -> None:
        written = {s: op.index for op in region.ops for s in op.writes}
        saves = region.choice.saves
        wanted: set[int] = set()
        for op in region.ops:
            if op.view or op.writes or not (op.index in saves or _routes(op.op)):
                continue
            if region.choice.executor == "recompute" and op.index >= region.stop:
                continue
            made = self.made(op)
            # What is written later is let go and made again.
            wanted |= {s for s in made if written.get(s, -1) < op.index}
        within = {s for op in region.ops for s in self.made(op)}
        read = {t.storage for op in region.ops if op.index < region.stop for t in op.inputs if t.storage is not None}
        needed = {s for k in region.slots if (s := self.trace.saved[k].storage) is not None}
        if region.choice.executor == "replay":
            touched = _Needs(region, wanted, self).touched(needed)
            wanted &= touched
            read = touched
        region.kept = wanted
        region.outside = {
            s for s in read | (needed - within) if s not in within and self.storages[s].role in ("made", "argument")
        }

    def made(self, op: OpRecord) -> list[int]:
        """Return the storages that an operator makes."""
        found = {t.storage for t in op.outputs if t.storage is not None}
        return [s for s in sorted(found) if self.storages[s].made_by == op.index]

    def released(self, storage: int) -> int:
        """Return after how many operators of forward Python lets go of it."""
        record = self.storages[storage]
        if record.released is not None:
            return record.released
        return self.first if record.last_use is None else min(record.last_use + 1, self.first)


def _routes(op: str) -> bool:
    return op in ROUTING_OPS or op.rpartition(".")[0] in ROUTING_OPS


class _Level:
    """Bytes alive now, and the most so far."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.now = self.peak = self.saved_at_peak = 0
        self.saved: set[int] = set()
        self.saved_now = 0

    def add(self, storage: int, nbytes: int, *, saved: bool = False) -> None:
        if storage in self.alive:
            return
        self.alive[storage] = nbytes
        self.now += nbytes
        if saved:
            self.saved.add(storage)
            self.saved_now += nbytes
        self._look(self.now)

    def drop(self, storage: int) -> None:
        nbytes = self.alive.pop(storage, 0)
        self.now -= nbytes
        if storage in self.saved:
            self.saved.discard(storage)
            self.saved_now -= nbytes

    def pulse(self, nbytes: int) -> None:
        self._look(self.now + nbytes)

    def _look(self, nbytes: int) -> None:
        if nbytes > self.peak:
            self.peak, self.saved_at_peak = nbytes, self.saved_now


def _forward(block: _Block) -> int:
    level = _Level()
    for i, nbytes in enumerate(block.states):
        level.add(-1 - i, nbytes)
    dies: dict[int, list[int]] = defaultdict(list)
    for storage in block.storages:
        if storage.role == "made" and not storage.backward and not storage.returned and storage.id not in block.stays:
            dies[block.released(storage.id)].append(storage.id)
    for op in block.forward:
        for storage in block.made(op):
            level.add(storage, block.storages[storage].nbytes)
        level.pulse(op.workspace_bytes)
        for storage in dies[op.index + 1]:
            level.drop(storage)
    return level.peak


class _Backward:
    """Goes through backward, operator by operator, with what runs again."""

    def __init__(self, block: _Block) -> None:
        self.block = block
        self.level = _Level()
        self.ran: list[int] = []
        """Operators that ran again."""
        self.asks: dict[int, list[int]] = defaultdict(list)
        for k, at in enumerate(block.trace.asked_at):
            if at is not None:
                self.asks[at].append(k)
        self.dies: dict[int, list[int]] = defaultdict(list)
        for storage in block.storages:
            if storage.freed is not None and (storage.backward or storage.freed > block.first):
                self.dies[storage.freed].append(storage.id)
        self.again: dict[int, _Rerun | _Replay] = {}
        for region in block.regions:
            kind = _Rerun if region.choice.executor == "recompute" else _Replay
            self.again[id(region)] = kind(self, region)

    def run(self) -> None:
        block, level = self.block, self.level
        for storage in sorted(block.stays):
            level.add(storage, block.storages[storage].nbytes, saved=True)
        for i, nbytes in enumerate(block.states):
            level.add(-1 - i, nbytes, saved=True)
        for op in block.trace.backward:
            self._ask(op.index)
            for storage in block.made(op):
                level.add(storage, block.storages[storage].nbytes)
            level.pulse(op.workspace_bytes)
            self._bury(op.index + 1)

    def _ask(self, now: int) -> None:
        for k in self.asks[now]:
            region = self.block.region_of.get(k)
            if region is not None:
                self.again[id(region)].ask(k)

    def _bury(self, now: int) -> None:
        for storage in self.dies[now]:
            record = self.block.storages[storage]
            if record.role == "argument":
                # The gradient that came in: the outline counts it to the end of the block.
                self.level.now -= record.nbytes
            elif not any(again.needs(storage) for again in self.again.values()):
                self.level.drop(storage)
        for again in self.again.values():
            again.after(now)


def _end(block: _Block, slots: Iterable[int]) -> int:
    """Return after how many operators backward is done with these packed tensors."""
    found = 0
    for k in slots:
        storage = block.trace.saved[k].storage
        freed = None if storage is None else block.storages[storage].freed
        asked = block.trace.asked_at[k] or 0
        is_own = storage is not None and block.is_own(storage)
        found = max(found, freed if is_own and freed is not None and freed > asked else asked + 1)
    return found


class _Rerun:
    """Everything up to the last packed tensor, at the first request."""

    def __init__(self, backward: _Backward, region: _Region) -> None:
        self.backward, self.block, self.region = backward, backward.block, region
        self.done = False
        self.packed = {s for k in region.slots if (s := self.block.trace.saved[k].storage) is not None}
        self.end = _end(self.block, region.slots)

    def needs(self, storage: int) -> bool:
        return storage in self.region.kept | self.region.outside and not self.done

    def ask(self, slot: int) -> None:
        if self.done:
            return
        block, level = self.block, self.backward.level
        dies: dict[int, list[int]] = defaultdict(list)
        fresh: list[int] = []
        for op in self.region.ops:
            if op.index >= self.region.stop:
                break
            made = block.made(op)
            if made and all(s in self.region.kept for s in made):
                continue
            self.backward.ran.append(op.index)
            for storage in made:
                record = block.storages[storage]
                level.add(storage, record.nbytes)
                if storage not in self.packed and storage not in self.region.kept:
                    fresh.append(storage)
                    dies[block.released(storage)].append(storage)
            level.pulse(op.workspace_bytes)
            for storage in dies[op.index + 1]:
                level.drop(storage)
        for storage in (*fresh, *(s for s in self.region.kept if s not in self.packed)):
            level.drop(storage)
        self.done = True

    def after(self, now: int) -> None:
        if now == self.end:
            for storage in self.region.outside:
                if storage not in self.block.packed_outside:
                    self.backward.level.drop(storage)


class _Needs:
    """Which operators lead to a storage, from what a region keeps and what comes from outside."""

    def __init__(self, region: _Region, kept: set[int], block: _Block) -> None:
        self.kept = kept
        self.reads: dict[int, set[int]] = {}
        self.makers: dict[int, list[int]] = defaultdict(list)
        for op in region.ops:
            if op.view:
                continue
            inputs = () if op.is_blank else op.inputs
            self.reads[op.index] = {t.storage for t in inputs if t.storage is not None}
            for storage in {*block.made(op), *op.writes}:
                self.makers[storage].append(op.index)

    def behind(self, storages: Iterable[int], done: set[int]) -> list[int]:
        """Return the operators that must run, in order."""
        ops: set[int] = set()
        stack, seen = list(storages), set[int]()
        while stack:
            storage = stack.pop()
            if storage in seen or storage in self.kept:
                continue
            seen.add(storage)
            for op in self.makers.get(storage, ()):
                if op not in done and op not in ops:
                    ops.add(op)
                    stack.extend(self.reads[op])
        return sorted(ops)

    def touched(self, storages: Iterable[int]) -> set[int]:
        """Return the storages that lead to these, and these."""
        wanted = set(storages)
        return wanted.union(*(self.reads[op] for op in self.behind(wanted, set())))


class _Replay:
    """What each request needs, when it comes."""

    def __init__(self, backward: _Backward, region: _Region) -> None:
        self.backward, self.block, self.region = backward, backward.block, region
        trace = self.block.trace
        self.needs_of = _Needs(region, region.kept, self.block)
        self.done: set[int] = set()
        self.uses: dict[int, int] = defaultdict(int)
        slots = [k for k in region.slots if trace.asked_at[k] is not None]
        for k in slots:
            storage = trace.saved[k].storage
            if storage is not None:
                self.uses[storage] += 1
        for op in self.needs_of.behind(list(self.uses), set()):
            for storage in self.needs_of.reads[op]:
                self.uses[storage] += 1
        self.ends: dict[int, list[int]] = defaultdict(list)
        """After how many operators a held storage goes: with the last slot that depends on it."""
        last: dict[int, int] = {}
        for k in slots:
            storage = trace.saved[k].storage
            if storage is None:
                continue
            when = _end(self.block, [k])
            for source in self.needs_of.touched([storage]) & (region.kept | region.outside):
                last[source] = max(last.get(source, 0), when)
        for storage, when in last.items():
            self.ends[when].append(storage)

    def needs(self, storage: int) -> bool:
        return self.uses[storage] > 0 or storage in self.region.kept or storage in self.region.outside

    def ask(self, slot: int) -> None:
        storage = self.block.trace.saved[slot].storage
        if storage is None:
            return
        for op in self.needs_of.behind([storage], self.done):
            self._run(self.block.trace.ops[op])
        self.uses[storage] -= 1

    def _run(self, op: OpRecord) -> None:
        level = self.backward.level
        self.done.add(op.index)
        self.backward.ran.append(op.index)
        made = [s for s in self.block.made(op) if s not in self.region.kept]
        for storage in made:
            level.add(storage, self.block.storages[storage].nbytes)
        level.pulse(op.workspace_bytes)
        for storage in self.needs_of.reads[op.index]:
            self.uses[storage] -= 1
            self._drop_unused(storage)
        for storage in made:
            self._drop_unused(storage)

    def _drop_unused(self, storage: int) -> None:
        held = storage in self.region.kept or storage in self.region.outside
        if self.uses[storage] <= 0 and not held and self.block.is_own(storage):
            self.backward.level.drop(storage)

    def after(self, now: int) -> None:
        for storage in self.ends[now]:
            if storage not in self.block.packed_outside:
                self.backward.level.drop(storage)
