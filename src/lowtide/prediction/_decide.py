"""What becomes of every tensor of one region call: a recipe applied to a trace, as the executors would apply it.

    OpTrace, RegionRecipe ─► each operator: the rule that decides, and whether its output is to be kept
                          ─► executor: what is held from forward to backward, and what runs again

``recompute`` keeps every output that the rules save up to the last tensor that backward needs (what lies behind it is
dropped after the first step has shown that), holds all tensor arguments, and runs all the rest up to there.
``replay`` looks at what backward needs, keeps of the saved outputs those that lead to it, holds what the operators
read that will run again, and runs nothing else.

Operators are told apart by their names (``aten.mm.default``); an alias or a packet stands for its overloads, and what
writes in place has no output of its own. The same as ``regions/_modes``, ``_record`` and ``_schedule`` do with tensors;
tests hold the two equal to the byte.

Known limits: a module that is called by its ``forward`` is not seen in conditions on modules; a module that calls one
which is not its own descendant likewise.

Over 400 lines: both executors decide over the same span of a trace, and are to be read beside each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lowtide.policy import ALIASES, ROUTING_OPS, RegionRecipe, Rule
from lowtide.records import CallRecord, NameRecord, OpRecord, OpTrace

__all__ = ["Decided", "Executor", "RegionFate", "decide_region", "is_routing", "is_view"]

Executor = Literal["recompute", "replay"]
Why = Literal["rule", "default", "routing"]

_KEEPING = ("save", "offload")

_ALIASES_WITHOUT_SAYING = ("aten._unsafe_view",)
"""Their results lie on their input's storage, and their schemas call them new."""
_VIEWS_BY_SCHEMA = ("aten.lift_fresh",)
_VIEWS_IN_PLACE = frozenset(
    "aten." + name
    for name in ("t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_", "detach_")
)
_WRITE_STATISTICS = ("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm")
"""They write to the buffers that they read, and their schemas do not say so."""


@dataclass(frozen=True)
class Decided:
    """What the rules say of one operator's output."""

    keeps: bool
    rule: int | None = None
    """Place in the policy."""
    why: Why = "default"
    call: int = 0
    """Number of the call, among those that the rule matched."""


@dataclass(frozen=True)
class RegionFate:
    """What becomes of one call of a region. Storages and operators are numbered as in the trace."""

    decisions: Mapping[int, Decided]
    """Operator -> what the rules say of its output; none for views."""

    kept: Mapping[int, int]
    """Storage -> operator whose output is kept on it, from forward to backward."""

    held: frozenset[int]
    """Storages made before the region that it holds; those of parameters and buffers too."""

    copied: frozenset[int]
    """Storages from outside whose content before the region is held as a copy."""

    runs: tuple[int, ...]
    """Operators that run again in backward."""

    needed: Mapping[int, int | None]
    """Storage -> operator that made what backward needs on it; None where it was made before."""

    not_kept: tuple[int, ...]
    """Operators whose output the rules save and backward never needs: not kept (recompute: from the second step)."""

    idle: tuple[int, ...] = ()
    """Operators whose output is kept, since recompute runs all else, and that nothing reads."""

    matched: Mapping[int, int] = field(default_factory=dict[int, int])
    """Rule -> calls that it matched."""

    @property
    def saves(self) -> frozenset[int]:
        """Operators whose outputs are kept."""
        return frozenset(self.kept.values())


def decide_region(
    trace: OpTrace, recipe: RegionRecipe, executor: Executor, *, call: CallRecord | None = None, block: str = ""
) -> RegionFate:
    """Apply a recipe to a region.

    Args:
        trace: of the block, or of a model around it.
        recipe: the region's.
        executor: what carries it out.
        call: the call of the region's module in the trace; left out, all that ran in the module is one call, and its
            arguments are what it read.
        block: FQN of the block in the trace; empty where the trace is of the block.
    """
    span = _Span(trace, recipe, call, block)
    rules = _Rules(recipe, block)
    return (_Recompute if executor == "recompute" else _Replay)(span, rules).fate()


def is_view(op: OpRecord) -> bool:
    """Whether an operator makes no content of its own, by its schema."""
    packet = _packet(op.op)
    return (op.view and packet not in _ALIASES_WITHOUT_SAYING) or packet in _VIEWS_BY_SCHEMA


def is_routing(name: str) -> bool:
    """Whether every kind of policy keeps an operator's results."""
    return name in ROUTING_OPS or _packet(name) in ROUTING_OPS


def _packet(name: str) -> str:
    return name.rpartition(".")[0]


def _inside(module: str, around: str) -> bool:
    return not around or module == around or module.startswith(f"{around}.")


class _Span:
    """The part of a trace that is one call of a region."""

    def __init__(self, trace: OpTrace, recipe: RegionRecipe, call: CallRecord | None, block: str) -> None:
        self.trace = trace
        forward = trace.forward
        where = ".".join(filter(None, (block, recipe.module)))
        if call is None:
            self.ops = [op for op in forward if _inside(op.module, where)]
            modules = trace.saved_in or ("",) * len(trace.saved)
            self.slots = [k for k, module in enumerate(modules) if _inside(module, where)]
            self.names = [n for n in trace.names if _inside(n.module, where)]
        else:
            self.ops = list(forward[slice(*call.ops)])
            self.slots = list(range(*call.saved))
            self.names = [n for n in trace.names if call.ops[0] < n.at <= call.ops[1] and _inside(n.module, where)]
        self.slots = [k for k in self.slots if self._lives(k, len(forward))]
        self.saved_at = {k: trace.saved_at[k] if trace.saved_at else len(forward) for k in self.slots}
        self.arguments = None if call is None else [t.storage for _, t in call.arguments if t.storage is not None]

    def _lives(self, slot: int, end: int) -> bool:
        """Whether what was packed is there at the end of forward: its graph may be gone by then."""
        storage = self.trace.saved[slot].storage
        if storage is None:
            return False
        freed = self.trace.storages[storage].freed
        return freed is None or freed >= end

    @property
    def stop(self) -> int:
        """Operator before which recompute ends: it has all that was packed."""
        return max(self.saved_at.values(), default=0)

    def walk(self) -> Iterator[OpRecord | NameRecord | int]:
        """Yield operators, names and packed tensors (by number) in the order in which they came."""
        names, slots = list(self.names), list(self.slots)
        for op in self.ops:
            # A name is given right after the value is made, before anybody can pack it again.
            while names and names[0].at <= op.index:
                yield names.pop(0)
            while slots and self.saved_at[slots[0]] <= op.index:
                yield slots.pop(0)
            yield op
        yield from names
        yield from slots

    def writes(self, op: OpRecord) -> tuple[int, ...]:
        """Return the storages that an operator writes to, also where its schema does not say so."""
        if _packet(op.op) in _VIEWS_IN_PLACE:
            return ()
        if _packet(op.op) not in _WRITE_STATISTICS:
            return op.writes
        read = {t.storage for t in op.inputs if t.storage is not None}
        return tuple(sorted({*op.writes, *(s for s in read if self.trace.storages[s].role == "buffer")}))

    def copied_buffers(self) -> frozenset[int]:
        """Return the buffers that the region changes: recompute starts from what they were."""
        storages = self.trace.storages
        return frozenset(s for op in self.ops for s in self.writes(op) if storages[s].role == "buffer")

    def outputs(self, op: OpRecord) -> list[int]:
        return sorted({t.storage for t in op.outputs if t.storage is not None})

    def made(self, op: OpRecord) -> list[int]:
        return [s for s in self.outputs(op) if self.trace.storages[s].made_by == op.index]


class _Rules:
    """The rules of a region, asked in the order of its operators."""

    def __init__(self, recipe: RegionRecipe, block: str) -> None:
        self.rules = recipe.rules
        self.saves_by_default = recipe.default == "save"
        self.counts = [0] * len(recipe.rules)
        self._below = f"{block}." if block else ""
        self._candidates: dict[tuple[str, bool, bool], tuple[int, ...]] = {}
        self._names = [frozenset(ALIASES.get(rule.op or "", (rule.op or "",))) for _, rule in recipe.rules]
        self.broad = {i for i, (_, rule) in enumerate(recipe.rules) if rule.op is None and rule.name is None}
        self.wide = self.saves_by_default or any(recipe.rules[i][1].action in _KEEPING for i in self.broad)
        self.by_name = [i for i, (_, rule) in enumerate(recipe.rules) if rule.name is not None]

    def candidates(self, op: OpRecord) -> tuple[int, ...]:
        """Return the places of the rules that may decide an operator; none behind one that always matches."""
        key = (op.op, is_view(op), bool(op.writes))
        found = self._candidates.get(key)
        if found is None:
            found = self._candidates[key] = tuple(self._look_up(*key))
        return found

    def _look_up(self, name: str, view: bool, writes: bool) -> Iterator[int]:
        for place, (_, rule) in enumerate(self.rules):
            named = not writes and not {name, _packet(name)}.isdisjoint(self._names[place])
            if named or (place in self.broad and not view):
                yield place
                if rule.modules is None:
                    return

    def names(self, op: OpRecord) -> bool:
        """Whether a rule names an operator."""
        return any(place not in self.broad for place in self.candidates(op))

    def concerns(self, op: OpRecord) -> bool:
        return bool(self.candidates(op)) or (self.saves_by_default and not is_view(op))

    def decide(self, op: OpRecord) -> Decided:
        """Decide one call, and count it."""
        for place in self.candidates(op):
            number, rule = self.rules[place]
            if not self._in_scope(rule, op.module):
                continue
            call = self._count(place)
            return Decided(rule.action in _KEEPING and rule.keep.keeps(call), number, "rule", call)
        return Decided(self.saves_by_default and not is_view(op))

    def decide_name(self, given: NameRecord, before: Decided) -> Decided | None:
        """Decide a value that was given a name; None where what decided its operator stands."""
        for place in self.by_name:
            number, rule = self.rules[place]
            if rule.name != given.name or not self._in_scope(rule, given.module):
                continue
            call = self._count(place)
            if before.rule is not None and before.rule < number:
                return Decided(before.keeps, number, "rule", call)
            return Decided(rule.action in _KEEPING and rule.keep.keeps(call), number, "rule", call)
        return None

    def _count(self, place: int) -> int:
        self.counts[place] += 1
        return self.counts[place] - 1

    def _in_scope(self, rule: Rule, module: str) -> bool:
        if rule.modules is None:
            return True
        name = module.removeprefix(self._below)
        return any(name == m or name.startswith(f"{m}.") for m in rule.modules)

    def matched(self) -> dict[int, int]:
        """Return how many calls each rule matched."""
        return {number: self.counts[place] for place, (number, _) in enumerate(self.rules)}


_NOTHING = Decided(keeps=False)


class _Recompute:
    """Executor recompute: everything up to the last packed tensor runs again but what is kept."""

    def __init__(self, span: _Span, rules: _Rules) -> None:
        self.span, self.rules = span, rules
        self.decisions: dict[int, Decided] = {}
        self.kept: dict[int, list[int]] = {}
        """Operator -> storages of its kept output."""
        self.makers: dict[int, OpRecord] = {}
        self.beyond: list[int] = []

    def fate(self) -> RegionFate:
        for item in self.span.walk():
            if isinstance(item, OpRecord):
                self._op(item)
            elif isinstance(item, NameRecord):
                self._name(item)
        return self._fate()

    def _op(self, op: OpRecord) -> None:
        writes = self.span.writes(op)
        for storage in writes:
            self.makers.pop(storage, None)
            for index in [i for i, storages in self.kept.items() if storage in storages]:
                del self.kept[index]
        decision = self.rules.decide(op) if self._is_followed(op) else _NOTHING
        if is_routing(op.op):
            self.kept[op.index] = self.span.outputs(op)
            decision = Decided(keeps=True, why="routing")
        elif decision.keeps and not op.writes:
            self._keep(op)
        if not is_view(op):
            self.decisions[op.index] = decision
            if not op.writes:
                self.makers.update((s, op) for s in self.span.made(op))

    def _is_followed(self, op: OpRecord) -> bool:
        """Autocast's cache makes casts of weights come and go: only a rule that names them is about them."""
        if not self.rules.concerns(op):
            return False
        if _packet(op.op) != "aten._to_copy" or self.rules.names(op) or not op.inputs:
            return True
        storage = op.inputs[0].storage
        return storage is None or self.span.trace.storages[storage].role != "parameter"

    def _keep(self, op: OpRecord) -> None:
        if op.index < self.span.stop:
            self.kept[op.index] = self.span.outputs(op)
        elif op.index not in self.beyond:
            self.beyond.append(op.index)

    def _name(self, given: NameRecord) -> None:
        op = self.makers.get(given.storage)
        decision = self.rules.decide_name(given, _NOTHING if op is None else self.decisions[op.index])
        if op is None or decision is None or is_routing(op.op):
            return
        self.decisions[op.index] = decision
        if decision.keeps:
            self._keep(op)
        else:
            self.kept.pop(op.index, None)

    def _fate(self) -> RegionFate:
        span = self.span
        stop = span.stop
        runs = tuple(op.index for op in span.ops if op.index < stop and op.index not in self.kept)
        again = set(runs)
        read = {t.storage for op in span.ops if op.index in again for t in op.inputs}
        packed = {span.trace.saved[k].storage for k in span.slots}
        within = {s for op in span.ops for s in span.made(op)}
        if span.arguments is None:
            outside = {t.storage for op in span.ops for t in op.inputs if t.storage is not None} - within
        else:
            outside = set(span.arguments)
        touched = read | packed
        return RegionFate(
            decisions=self.decisions,
            kept={s: i for i, storages in self.kept.items() for s in storages} if span.slots else {},
            held=frozenset(outside) if span.slots else frozenset(),
            copied=span.copied_buffers() if span.slots else frozenset(),
            runs=runs,
            needed=_needed(span),
            not_kept=tuple(self.beyond),
            idle=tuple(i for i, storages in self.kept.items() if touched.isdisjoint(storages)),
            matched=self.rules.matched(),
        )


def _needed(span: _Span) -> dict[int, int | None]:
    """Storage -> operator that last wrote it before it was packed."""
    last: dict[int, int] = {}
    found: dict[int, int | None] = {}
    for item in span.walk():
        if isinstance(item, OpRecord):
            last.update(dict.fromkeys((*span.made(item), *span.writes(item)), item.index))
        elif isinstance(item, int):
            storage = span.trace.saved[item].storage
            assert storage is not None
            found[storage] = last.get(storage)
    return found


@dataclass
class _Value:
    """The content of one storage between two writes."""

    storage: int
    maker: int | None
    """Operator; None for what was there before."""


class _Replay:
    """Executor replay: only what backward needs is kept, held and run again."""

    def __init__(self, span: _Span, rules: _Rules) -> None:
        self.span, self.rules = span, rules
        self.decisions: dict[int, Decided] = {}
        self.values: list[_Value] = []
        self.current: dict[int, int] = {}
        self.reads: dict[int, tuple[int, ...]] = {}
        self.kept: set[int] = set()
        self.soft: set[int] = set()
        """Values to keep if backward needs them, or an operator reads them that is to run again."""
        self.wished: dict[int, set[int]] = defaultdict(set)
        """Operator -> values that the rules save."""
        self.several: list[int] = []
        self.packed: list[int] = []
        self.copied: set[int] = set()

    def fate(self) -> RegionFate:
        for item in self.span.walk():
            if isinstance(item, OpRecord):
                self._op(item)
            elif isinstance(item, NameRecord):
                self._name(item)
            else:
                storage = self.span.trace.saved[item].storage
                assert storage is not None
                value = self._value(storage)
                self.packed.append(value)
                if value in self.soft:
                    self.kept.add(value)
        return self._fate()

    def _value(self, storage: int) -> int:
        found = self.current.get(storage)
        return self._new(storage, None) if found is None else found

    def _new(self, storage: int, maker: int | None) -> int:
        self.values.append(_Value(storage, maker))
        self.current[storage] = len(self.values) - 1
        return self.current[storage]

    def _op(self, op: OpRecord) -> None:
        if is_view(op) or _packet(op.op) in _VIEWS_IN_PLACE:
            return
        inputs = () if op.is_blank else op.inputs
        reads = [self._value(t.storage) for t in inputs if t.storage is not None]
        self.reads[op.index] = tuple(reads)
        writes = self.span.writes(op)
        before = {self.current[s] for s in writes if s in self.current}
        self.kept -= before
        self.copied |= {v for v in before if self.values[v].maker is None}
        made = [self._new(s, op.index) for s in self.span.made(op) if s not in self.current]
        written = [self._new(s, op.index) for s in writes]
        self.decisions[op.index] = _NOTHING
        if made or written:
            self._decide(op, reads, before, made, written)

    def _decide(self, op: OpRecord, reads: list[int], before: set[int], made: list[int], written: list[int]) -> None:
        rules = self.rules
        decision = rules.decide(op) if rules.concerns(op) else _NOTHING
        if len(made) > 1:
            self.several = made
        softly = decision.keeps and (decision.rule is None or self._is_broad(decision.rule))
        if softly:
            self.soft.update((*made, *written))
            self.wished[op.index].update((*made, *written))
        elif rules.wide and not decision.keeps:
            self.kept |= {v for v in reads if v in self.soft and v not in before}
        if is_routing(op.op):
            decision = Decided(keeps=True, why="routing")
        if decision.why == "routing" or (decision.keeps and not softly):
            self.kept.update(made)
            self.wished[op.index].update(made)
        self.decisions[op.index] = decision

    def _is_broad(self, number: int) -> bool:
        return any(self.rules.rules[place][0] == number for place in self.rules.broad)

    def _name(self, given: NameRecord) -> None:
        value = self.current.get(given.storage)
        maker = None if value is None else self.values[value].maker
        decision = self.rules.decide_name(given, _NOTHING if maker is None else self.decisions[maker])
        if decision is None or value is None or maker is None:
            return
        self.decisions[maker] = decision
        if decision.keeps:
            named = self.several if value in self.several else [value]
            self.kept.update(named)
            self.wished[maker].update(named)
        else:
            self.soft.discard(value)
            self.kept.discard(value)
            self.wished[maker].discard(value)

    def _fate(self) -> RegionFate:
        runs, touched = self._closure()
        values = self.values
        kept = touched & self.kept
        outside = {v for v in touched if values[v].maker is None}
        copied = outside & self.copied
        wished = {op: names for op, names in self.wished.items() if self.decisions[op].why != "default"}
        return RegionFate(
            decisions=self.decisions,
            kept={values[v].storage: maker for v in sorted(kept) if (maker := values[v].maker) is not None},
            held=frozenset(values[v].storage for v in outside - copied),
            copied=frozenset(values[v].storage for v in copied),
            runs=tuple(sorted(runs)),
            needed=_needed(self.span),
            not_kept=tuple(op for op, names in sorted(wished.items()) if names and kept.isdisjoint(names)),
            matched=self.rules.matched(),
        )

    def _closure(self) -> tuple[set[int], set[int]]:
        """Return the operators that run again, and the values that they and backward touch."""
        runs: set[int] = set()
        touched: set[int] = set()
        stack: list[int] = list(self.packed)
        while stack:
            value = stack.pop()
            if value in touched:
                continue
            touched.add(value)
            maker = self.values[value].maker
            if maker is None or value in self.kept or maker in runs:
                continue
            runs.add(maker)
            stack.extend(self.reads[maker])
        return runs, touched
