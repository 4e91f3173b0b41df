"""A limit in, a plan out: the menus of all kinds, the fastest assignment, and the whole step predicted with it.

The assignment is found on moments (``_parts``) and checked by the model of the whole step
(``prediction.predict_step``), whose number counts: where it is above the limit, the limit for the search is lowered by
as much and the search runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lowtide.errors import DoesNotFitError
from lowtide.plan_record import OtherChoice, Plan, PlanLayers
from lowtide.planning._fingerprint import print_of
from lowtide.planning._graph import Executor, Point, evaluate, graph_of
from lowtide.planning._model import Assigned, Step, assign, least_peak
from lowtide.planning._names import patterns_of
from lowtide.planning._parts import Menu, menus_of, state_bytes, step_of
from lowtide.policy import NoPolicy, Rule, Rules
from lowtide.prediction import AnyDevice, BlockCost, RegionChoice, StepOutline, block_cost, predict_step
from lowtide.records import Environment, Estimate, OpTrace
from lowtide.units import format_bytes

__all__ = ["MARGIN", "Planner", "policy_of"]

MARGIN = 0.02
"""Share of the peak that must be free besides."""

_MOST_TRIES = 8
_MOST_SIMULATIONS = 4


@dataclass(frozen=True)
class _Chosen:
    """An assignment, and the whole step under it."""

    assigned: Assigned
    estimate: Estimate


class Planner:
    """Plans one step for any number of limits; what does not depend on the limit is done once."""

    def __init__(
        self,
        outline: StepOutline,
        traces: Mapping[str, OpTrace],
        *,
        executor: Executor = "replay",
        device: AnyDevice | None = None,
    ) -> None:
        self.outline, self.traces = outline, traces
        self.executor: Executor = executor
        self.device: AnyDevice = outline.device if device is None else device
        self.menus = menus_of(outline, traces, executor, self.device)
        self.step: Step = step_of(outline, self.menus)
        self.layers = [call for call in outline.calls if call.backward is not None]

    def plan(self, limit_bytes: int, environment: Environment, *, budget_bytes: int | None = None) -> Plan:
        """Return the fastest plan whose predicted peak and margin stay within the limit.

        Args:
            limit_bytes: memory of a process.
            environment: where the plan is made.
            budget_bytes: what the predicted peak must stay within, where that is less than the margin asks.

        Raises:
            DoesNotFitError: there is none; the message has the least possible peak, what holds it up, and what helps.
        """
        budget = min(_within(limit_bytes), limit_bytes if budget_bytes is None else budget_bytes)
        chosen = self._search(budget)
        if chosen is None:
            raise DoesNotFitError(self._nothing_fits(limit_bytes, budget))
        return self._record(chosen, limit_bytes, environment)

    def plan_simulated(
        self, limit_bytes: int, environment: Environment, simulate: Callable[[Rules | NoPolicy], int]
    ) -> Plan:
        """As ``plan``, and the peak of a whole simulated step stays within the limit too, or the plan is tightened.

        Args:
            limit_bytes: memory of a process.
            environment: where the plan is made.
            simulate: returns the peak bytes of the whole step under a policy.

        Raises:
            DoesNotFitError: as ``plan``.
        """
        budget = within = _within(limit_bytes)
        simulated = 0
        for _ in range(_MOST_SIMULATIONS):
            plan = self.plan(limit_bytes, environment, budget_bytes=budget)
            simulated = simulate(policy_of(plan))
            if simulated <= within:
                return plan.model_copy(update={"simulated_peak_bytes": simulated})
            budget = min(budget, plan.peak_bytes) - (simulated - within)
        raise DoesNotFitError(
            f"no plan was found whose simulated step stays under {format_bytes(limit_bytes)}: after "
            f"{_MOST_SIMULATIONS} tries the simulation is still {format_bytes(simulated - within)} above. Give more "
            "memory, or leave the simulation out (--no-simulate) and see what the run measures"
        )

    def _search(self, budget: int) -> _Chosen | None:
        target = budget
        for _ in range(_MOST_TRIES):
            assigned = assign(self.step, target)
            if assigned is None:
                return None
            estimate = self.predict(assigned.chosen)
            over = estimate.peak_bytes - budget
            if over <= 0:
                return _Chosen(assigned, estimate)
            target -= over
        return None

    def predict(self, chosen: Sequence[int], policy: str = "plan") -> Estimate:
        """Predict the whole step with one choice for each layer that has a backward."""
        return self._predict([self.menus[c.kind].costs[i] for c, i in zip(self.layers, chosen, strict=True)], policy)

    def _predict(self, costs: Sequence[BlockCost], policy: str) -> Estimate:
        given = iter(costs)
        every = [
            self.menus[call.kind].costs[-1] if call.backward is None else next(given) for call in self.outline.calls
        ]
        return predict_step(self.outline, every, policy=policy, device=self.device)

    # -- the record --------------------------------------------------------------------------------------------

    def _record(self, chosen: _Chosen, limit_bytes: int, environment: Environment) -> Plan:
        estimate, picks = chosen.estimate, chosen.assigned.chosen
        groups: dict[str, tuple[PlanLayers, list[str]]] = {}
        kinds: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
        for call, pick in zip(self.layers, picks, strict=True):
            # Two kinds may differ in nothing that is seen here.
            layers = self._layers(call.kind, pick)
            groups.setdefault(layers.model_dump_json(), (layers, []))[1].append(call.block)
            seen = print_of(self.traces[call.kind], ())
            kinds.setdefault((seen.block, seen.parameters_hash, seen.operators_hash), (call.kind, []))[1].append(
                call.block
            )
        choices = tuple(
            layers.model_copy(update={"layers": patterns_of(names), "count": len(names)})
            for layers, names in groups.values()
        )
        return Plan(
            limit_bytes=limit_bytes,
            margin_bytes=_margin(estimate.peak_bytes),
            peak_bytes=estimate.peak_bytes,
            peak_at=_place(estimate),
            at_peak=estimate.at_peak,
            saved_bytes=sum(c.saved_bytes * c.count for c in choices),
            recompute_ms=chosen.assigned.recompute_ns / 1e6,
            fastest_ms=chosen.assigned.bound_ns / 1e6,
            step_ms=estimate.step_ms,
            tokens_per_s=estimate.tokens_per_s,
            executor=self.executor,
            device=self.outline.device,
            world_size=self.outline.world_size,
            choices=choices,
            blocks=tuple(print_of(self.traces[kind], names) for kind, names in kinds.values()),
            others=self._others(limit_bytes),
            assumptions=self._assumptions(estimate),
            environment=environment,
        )

    def _layers(self, kind: str, pick: int) -> PlanLayers:
        menu = self.menus[kind]
        point = menu.points[pick]
        return PlanLayers(
            layers=(),
            count=1,
            block=menu.trace.block,
            region=point.region,
            save=_calls(menu, point),
            saved_bytes=self._held(menu, menu.costs[pick]),
            recompute_ms=point.recompute_ms,
        )

    @staticmethod
    def _held(menu: Menu, cost: BlockCost) -> int:
        inputs = {s.name: s.nbytes for s in menu.trace.storages if s.role == "argument"}
        return cost.saved_bytes + sum(inputs[name] for name in cost.holds & menu.own)

    def _others(self, limit_bytes: int) -> tuple[OtherChoice, ...]:
        """Price what people use today: nothing, and all blocks checkpointed by ``torch.utils.checkpoint``."""
        found: list[OtherChoice] = []
        for policy in ("none", "full"):
            costs: dict[str, BlockCost] = {}
            for kind, menu in self.menus.items():
                state = state_bytes(menu.trace, "recompute")
                regions = () if policy == "none" else (RegionChoice("", frozenset(), "recompute", state),)
                costs[kind] = block_cost(menu.trace, regions, self.device, threads=self.outline.threads)
            by_layer = [costs[call.kind] for call in self.layers]
            estimate = self._predict(by_layer, policy)
            again = 0.0 if policy == "none" else sum(self._rerun_ms(call.kind) for call in self.layers)
            found.append(
                OtherChoice(
                    policy=policy,
                    peak_bytes=estimate.peak_bytes,
                    saved_bytes=sum(self._held(self.menus[c.kind], costs[c.kind]) for c in self.layers),
                    recompute_ms=again,
                    step_ms=estimate.step_ms,
                    fits=estimate.peak_bytes + _margin(estimate.peak_bytes) <= limit_bytes,
                )
            )
        return tuple(found)

    def _rerun_ms(self, kind: str) -> float:
        graph = graph_of(self.menus[kind].trace, self.device, threads=self.outline.threads)
        return evaluate(graph, (), "recompute").recompute_ms

    def _assumptions(self, estimate: Estimate) -> tuple[str, ...]:
        inexact = [m.trace.block for m in self.menus.values() if not m.frontier.exact]
        found = [f"not every choice for {name} was looked at: there are too many" for name in dict.fromkeys(inexact)]
        if self.executor == "replay":
            found.append("replay carries the plan out; a region that it hands to recompute takes longer and holds more")
        return (*found, *estimate.assumptions)

    # -- when nothing fits -------------------------------------------------------------------------------------

    def _nothing_fits(self, limit_bytes: int, budget: int) -> str:
        least = self.predict(least_peak(self.step))
        parts = sorted(least.at_peak.as_dict().items(), key=lambda p: -p[1])
        shown = ", ".join(f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in parts if n)
        levers = "; ".join(f"{text}: about {format_bytes(saved)} less there" for text, saved in _levers(least))
        return (
            f"no choice of what to keep stays under {format_bytes(limit_bytes)} ({format_bytes(budget)} and a margin): "
            f"the least possible peak is {format_bytes(least.peak_bytes)}, {_place(least)}. Alive there: {shown}. "
            f"What helps, the strongest first: {levers}"
        )


def _levers(least: Estimate) -> list[tuple[str, int]]:
    """Say what each change would take off the least peak, at the moment where it is."""
    at = least.at_peak
    persistent = at.parameters + at.gradients + at.optimizer_state
    found = [
        ("shard over twice as many processes", persistent // 2),
        ("half the micro-batch", (at.saved_activations + at.transient + at.inputs + at.logits_and_loss) // 2),
        ("logits and loss in eight chunks", at.logits_and_loss * 7 // 8),
        ("saved values on the host (offload)", at.saved_activations),
    ]
    return sorted([lever for lever in found if lever[1] * 100 > least.peak_bytes], key=lambda lever: -lever[1])


def _place(estimate: Estimate) -> str:
    return " ".join(filter(None, ("in", estimate.peak_phase, "at", estimate.peak_module, estimate.peak_op)))


def _margin(peak_bytes: int) -> int:
    return int(peak_bytes * MARGIN)


def _within(limit_bytes: int) -> int:
    """Return the largest peak that leaves its margin under a limit."""
    budget = int(limit_bytes / (1 + MARGIN))
    while budget + 1 + _margin(budget + 1) <= limit_bytes:
        budget += 1
    return budget


def _calls(menu: Menu, point: Point) -> dict[str, tuple[int, ...]]:
    """Write saved operators as overloads and numbers of their calls."""
    number: dict[int, int] = {}
    counts: dict[str, int] = {}
    for op in menu.trace.forward:
        number[op.index] = counts.get(op.op, 0)
        counts[op.op] = number[op.index] + 1
    found: dict[str, list[int]] = {}
    for index in point.saves:
        found.setdefault(menu.trace.ops[index].op, []).append(number[index])
    return {op: tuple(sorted(calls)) for op, calls in sorted(found.items())}


def policy_of(plan: Plan, **common: object) -> Rules | NoPolicy:
    """Write a plan as rules, which carry it out; ``none`` where no layer is a region.

    Args:
        plan: the plan.
        common: keys that every policy takes, such as ``preserve_rng``.
    """
    if not any(choice.region for choice in plan.choices):
        return NoPolicy()
    rules: list[Rule] = []
    for choice in plan.choices:
        if not choice.region:
            rules.append(Rule(layers=choice.layers, action="none"))
        for op, calls in choice.save.items():
            rules.append(Rule(layers=choice.layers, op=op, action="save", keep=list(calls)))  # pyright: ignore[reportArgumentType]
    return Rules(default="recompute", rules=tuple(rules), executor=plan.executor, **common)  # pyright: ignore[reportArgumentType]
