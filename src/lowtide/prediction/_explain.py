"""A trace of a whole model's forward, and the regions in it -> what is held for backward, row by row, and why.

Who holds a storage: a region's executor, or autograd where it was packed outside of regions. Whose it is: the block's
that made it and did not return it, or whose input alone it is; what several blocks read, what a block returned and none
reads, and what was made outside of blocks is the rest. (So does ``measurement.measure_saved_bytes`` with real tensors.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lowtide.inspect_report import BlockKind, Decision, InspectReport, NeverNeeded, RegionRow, TensorRow
from lowtide.policy import RegionRecipe, Rule
from lowtide.prediction._decide import Executor, RegionFate, decide_region
from lowtide.prediction._time import Speeds, op_ms
from lowtide.records import CallRecord, OpTrace, TensorRecord

__all__ = ["Explained", "ExplainedRegion", "explain"]

MIN_OFFLOAD_BYTES = 64 * 1024
"""As in ``regions._offload``."""

KEEPS, NO_REGION, PYTHON = "executor keeps it", "no region", "held by Python, beside autograd"


@dataclass(frozen=True)
class ExplainedRegion:
    """A region, and what carries it out."""

    recipe: RegionRecipe
    executor: Executor
    reason: str


@dataclass(frozen=True)
class Explained:
    """A report, and how many calls each rule matched."""

    report: InspectReport
    matched: dict[int, int]


@dataclass
class _Held:
    """Why a block, or what is outside of blocks, holds a storage."""

    rule: int | None
    why: str
    away: bool = False
    """On the host."""


@dataclass
class _Part:
    """A block, or all that is outside of blocks."""

    name: str
    block_class: str = ""
    calls: list[CallRecord] = field(default_factory=list[CallRecord])
    regions: list[ExplainedRegion] = field(default_factory=list[ExplainedRegion])
    holds: dict[int, _Held] = field(default_factory=dict[int, _Held])
    again: dict[int, _Held] = field(default_factory=dict[int, _Held])
    """Storages that backward needs and that are made again."""
    needed: dict[int, int | None] = field(default_factory=dict[int, "int | None"])
    copies: list[int] = field(default_factory=list[int])
    runs: list[int] = field(default_factory=list[int])
    never: list[NeverNeeded] = field(default_factory=list[NeverNeeded])
    forms: dict[int, tuple[str, TensorRecord]] = field(default_factory=dict[int, tuple[str, TensorRecord]])
    """Storage -> (argument, tensor)."""

    def hold(self, storage: int, rule: int | None, why: str) -> None:
        self.holds.setdefault(storage, _Held(rule, why))

    @property
    def reads(self) -> set[int]:
        return {t.storage for call in self.calls for _, t in call.arguments if t.storage is not None}


def explain(
    trace: OpTrace,
    blocks: Sequence[tuple[str, str]],
    regions: Sequence[ExplainedRegion],
    rules: Sequence[Rule],
    *,
    policy: str,
    speeds: Speeds,
) -> Explained:
    """Say what is held for backward, and why.

    Args:
        trace: the forward of the model (``tracing.trace_forward``).
        blocks: FQN and class of each block; a shared one once.
        regions: all regions.
        rules: all rules of the policy, in order.
        policy: its kind.
        speeds: what prices operators.
    """
    return _Model(trace, blocks, regions, rules, speeds).explained(policy)


class _Model:
    def __init__(
        self,
        trace: OpTrace,
        blocks: Sequence[tuple[str, str]],
        regions: Sequence[ExplainedRegion],
        rules: Sequence[Rule],
        speeds: Speeds,
    ) -> None:
        self.trace, self.rules, self.speeds = trace, rules, speeds
        self.parts = {name: _Part(name, kind) for name, kind in blocks}
        self.rest = _Part("")
        self.regions = {region.recipe.fqn for region in regions}
        self.matched: dict[int, int] = defaultdict(int)
        self.inner: set[int] = set()
        """Packed tensors inside regions."""
        for call in trace.calls:
            if call.module in self.parts:
                self.parts[call.module].calls.append(call)
        for region in regions:
            self._region(region)
        self._outside_of_regions()
        self._readers: dict[int, list[str]] = defaultdict(list)
        for name, part in self.parts.items():
            for storage in part.reads:
                self._readers[storage].append(name)
        self._returned = {
            t.storage
            for part in self.parts.values()
            for call in part.calls
            for t in call.results
            if t.storage is not None
        }

    # -- who holds what ----------------------------------------------------------------------------------------

    def _region(self, region: ExplainedRegion) -> None:
        recipe = region.recipe
        part = self.parts[recipe.block.fqn]
        part.regions.append(region)
        for call in [c for c in self.trace.calls if c.module == recipe.fqn]:
            self.inner.update(range(*call.saved))
            fate = decide_region(self.trace, recipe, region.executor, call=call, block=recipe.block.fqn)
            for number, count in fate.matched.items():
                self.matched[number] += count
            self._take(part, fate, call)

    def _take(self, part: _Part, fate: RegionFate, call: CallRecord) -> None:
        part.runs += fate.runs
        part.needed.update(fate.needed)
        part.copies += sorted(fate.copied)
        for name, tensor in call.arguments:
            if tensor.storage is not None:
                part.forms.setdefault(tensor.storage, (name, tensor))
        stays = {t.storage for t in call.results} | {t.storage for _, t in call.arguments} | set(fate.held)
        for storage, op in fate.kept.items():
            rule, why = self._why(fate, op)
            part.hold(storage, rule, why)
            if rule is not None and self.rules[rule].action == "offload":
                declined = self._declined(storage, call, storage in stays)
                part.holds[storage] = _Held(rule, f"{why}{declined}", away=not declined)
        for storage in fate.held:
            part.hold(storage, None, KEEPS)
        for storage, op in fate.needed.items():
            if op is None:
                part.hold(storage, None, KEEPS)
            elif storage not in fate.kept:
                part.again.setdefault(storage, _Held(*self._why(fate, op)))
        for op, held in [*((i, False) for i in fate.not_kept), *((i, True) for i in fate.idle)]:
            part.never.append(self._never(fate, op, held=held))

    def _declined(self, storage: int, call: CallRecord, stays: bool) -> str:
        """Say why a value is not offloaded; empty where it is."""
        if stays:
            return "; stays here, since its memory does anyway"
        if self.trace.storages[storage].nbytes < MIN_OFFLOAD_BYTES:
            return f"; stays here, since it is smaller than {MIN_OFFLOAD_BYTES // 1024} KiB"
        if any(c.module in self.regions and c.ops[0] >= call.ops[1] for c in self.trace.calls):
            return ""
        return "; stays here, since backward of the last region follows at once"

    def _why(self, fate: RegionFate, op: int) -> tuple[int | None, str]:
        decided = fate.decisions.get(op)
        if decided is None:
            return None, "default"
        if decided.rule is None:
            return None, decided.why
        rule = self.rules[decided.rule]
        text = f"{rule}" if rule.keep.always else f"{rule}, call {decided.call}"
        return decided.rule, text

    def _never(self, fate: RegionFate, index: int, *, held: bool) -> NeverNeeded:
        op, storages = self.trace.ops[index], self.trace.storages
        made = {t.storage for t in op.outputs if t.storage is not None}
        nbytes = sum(storages[s].nbytes for s in made if storages[s].made_by == index)
        return NeverNeeded(op=op.op, module=op.module, nbytes=nbytes, why=self._why(fate, index)[1], held=held)

    def _outside_of_regions(self) -> None:
        """Autograd holds what it packed itself, and Python what it keeps beside."""
        trace = self.trace
        packed = {t.storage for t in trace.saved}
        places = {k: part for part in self.parts.values() for c in part.calls for k in range(*c.saved)}
        for k, tensor in enumerate(trace.saved):
            if k in self.inner or tensor.storage is None or not self._lives(tensor.storage):
                continue
            part = places.get(k, self.rest)
            part.hold(tensor.storage, None, NO_REGION)
            part.needed.setdefault(tensor.storage, self._maker(tensor.storage, trace.saved_at[k]))
            part.forms.setdefault(tensor.storage, ("", tensor))
        made_in = {i: part for part in self.parts.values() for c in part.calls for i in range(*c.ops)}
        for storage in trace.storages:
            if storage.saved and storage.role == "made" and storage.id not in packed:
                part = made_in.get(storage.made_by if storage.made_by is not None else -1, self.rest)
                part.hold(storage.id, None, PYTHON)
                part.needed.setdefault(storage.id, storage.made_by)

    def _lives(self, storage: int) -> bool:
        """Whether it is there at the end of forward: the graph that packed it may be gone by then."""
        freed = self.trace.storages[storage].freed
        return freed is None or freed >= len(self.trace.ops)

    def _maker(self, storage: int, before: int) -> int | None:
        writers = (op.index for op in self.trace.ops[:before][::-1] if storage in op.writes)
        return next(writers, self.trace.storages[storage].made_by)

    # -- whose it is -------------------------------------------------------------------------------------------

    def _is_counted(self, storage: int) -> bool:
        """Whether forward made it, and what holds it for backward is all that does."""
        record = self.trace.storages[storage]
        return record.role == "made" and not record.returned and record.freed is not None

    def _owner(self, storage: int) -> str:
        readers = self._readers.get(storage)
        if readers:
            return readers[0] if len(readers) == 1 else ""
        if storage in self._returned:
            return ""
        made_by = self.trace.storages[storage].made_by
        inside = (p.name for p in self.parts.values() for c in p.calls if made_by in range(*c.ops))
        return next(inside, "")

    # -- rows --------------------------------------------------------------------------------------------------

    def explained(self, policy: str) -> Explained:
        held = {
            s: h for part in (self.rest, *self.parts.values()) for s, h in part.holds.items() if self._is_counted(s)
        }
        owners = {s: self._owner(s) for s in held}
        for storage, owner in owners.items():
            part = self.parts.get(owner, self.rest)
            part.holds.setdefault(storage, held[storage])
        views = [self._kind(part, owners) for part in self.parts.values()]
        rest = tuple(self._rows(self.rest, owners))
        kinds = tuple(_grouped(views))
        rest_bytes = sum(r.nbytes for r in rest if r.counted)
        blocks = sum(kind.saved_bytes * len(kind.blocks) for kind in kinds)
        report = InspectReport(
            model=self.trace.block,
            device=self.trace.device,
            policy=policy,
            rules=tuple(map(str, self.rules)),
            kinds=kinds,
            rest=rest,
            rest_bytes=rest_bytes,
            total_bytes=blocks + rest_bytes,
            recompute_flops=sum(kind.recompute_flops * len(kind.blocks) for kind in kinds),
            recompute_ms=sum(kind.recompute_ms * len(kind.blocks) for kind in kinds),
            assumptions=self.trace.assumptions,
            environment=self.trace.environment,
        )
        return Explained(report, dict(self.matched))

    def _kind(self, part: _Part, owners: dict[int, str]) -> tuple[object, BlockKind]:
        rows = tuple(self._rows(part, owners))
        ops = [self.trace.ops[i] for call in part.calls for i in range(*call.ops)]
        kind = BlockKind(
            block_class=part.block_class,
            blocks=(part.name,),
            regions=tuple(
                RegionRow(module=r.recipe.module, executor=r.executor, reason=r.reason) for r in part.regions
            ),
            rows=rows,
            never_needed=tuple(n.model_copy(update={"module": _relative(n.module, part.name)}) for n in part.never),
            saved_bytes=sum(r.nbytes for r in rows if r.counted),
            input_bytes=sum(r.nbytes for r in rows if r.counted and r.decision == "input"),
            recomputed_bytes=sum(r.nbytes for r in rows if r.decision == "recomputed"),
            recompute_flops=sum(self.trace.ops[i].flops or 0 for i in part.runs),
            recompute_ms=sum(op_ms(self.trace.ops[i], self.speeds) for i in part.runs),
        )
        recipes = [(r.recipe.module, r.recipe.default, r.recipe.rules) for r in part.regions]
        forms = [(o.op, _relative(o.module, part.name), [(t.shape, t.dtype) for t in o.outputs]) for o in ops]
        return (str(recipes), str(forms)), kind

    def _rows(self, part: _Part, owners: dict[int, str]) -> Iterator[TensorRow]:
        named = {s for s in (*part.holds, *part.again) if self._is_shown(part, s)}
        storages = self.trace.storages
        within = {i for call in part.calls for i in range(*call.ops)}
        given = [t.storage for call in part.calls for _, t in call.arguments if t.storage is not None]
        places = {storage: place for place, storage in reversed(list(enumerate(given)))}

        def order(storage: int) -> tuple[bool, int]:
            """What was given first, in the order of the arguments."""
            made_by = storages[storage].made_by or 0
            return made_by in within, made_by if made_by in within else places.get(storage, len(given) + storage)

        for storage in sorted(named, key=order):
            held = part.holds.get(storage)
            counted = held is not None and not held.away and owners.get(storage) == part.name
            inside = not part.name or storages[storage].made_by in within
            yield self._row(part, storage, counted=counted, inside=inside)
        for storage in part.copies:
            record = storages[storage]
            yield TensorRow(
                op="", module=_relative(record.name or "", part.name), shape=(), dtype="", nbytes=record.nbytes,
                decision="input", why="executor keeps it: a copy of what the block changes", needed=False,
            )  # fmt: skip

    def _is_shown(self, part: _Part, storage: int) -> bool:
        """Parameters and buffers are there anyway, and so is what outlives the graph."""
        record = self.trace.storages[storage]
        if storage in part.holds:
            return self._is_counted(storage)
        return record.role == "made"

    def _row(self, part: _Part, storage: int, *, counted: bool, inside: bool) -> TensorRow:
        trace = self.trace
        held = part.holds.get(storage)
        why = held or part.again[storage]
        maker = part.needed.get(storage)
        if maker is None:
            maker = trace.storages[storage].made_by
        assert maker is not None
        op = trace.ops[maker]
        name, form = part.forms.get(storage, ("", None))
        if form is None or inside:
            form = next((t for t in op.outputs if t.storage == storage), form)
        again = held is None and maker in part.runs
        return TensorRow(
            op=op.op if inside else "",
            module=_relative(op.module, part.name) if inside else name,
            shape=() if form is None else form.shape,
            dtype="" if form is None else form.dtype,
            nbytes=trace.storages[storage].nbytes,
            decision=_decision(held, inside=inside),
            rule=why.rule,
            why=why.why,
            counted=counted,
            needed=storage in part.needed,
            recompute_flops=op.flops if again else None,
            recompute_ms=op_ms(op, self.speeds) if again else None,
        )


def _decision(held: _Held | None, *, inside: bool) -> Decision:
    if held is None:
        return "recomputed"
    if held.away:
        return "offloaded"
    return "saved" if inside else "input"


def _relative(name: str, block: str) -> str:
    if not block:
        return name
    return "" if name == block else name.removeprefix(f"{block}.")


def _grouped(views: Iterable[tuple[object, BlockKind]]) -> Iterator[BlockKind]:
    """Put blocks together that differ in their names only."""
    found: dict[object, list[BlockKind]] = defaultdict(list)
    for key, kind in views:
        found[key, kind.model_copy(update={"blocks": ()}).model_dump_json()].append(kind)
    for kinds in found.values():
        yield kinds[0].model_copy(update={"blocks": tuple(name for kind in kinds for name in kind.blocks)})
