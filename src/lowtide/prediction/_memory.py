"""The whole step from its parts: an outline, and for each block what its choice costs. No torch.

    outline (blocks are empty) + saved bytes from each block's forward to its backward
                               + arguments that blocks hold after the model let go of them
                               + each block's own rise in its forward and in its backward      ─► peak, timeline, time

The peak is the highest of: every moment of the outline outside of blocks, and every block's own highest moment, each on
top of what is alive around it. Adding up is exact; what the parts do not know are effects between blocks.

Time: the outline's and the blocks' operators; on a GPU sharding's collectives run beside the computation of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.prediction._block import BlockCost
from lowtide.prediction._outline import BlockCall, PhaseTimes, StepOutline
from lowtide.prediction._time import AnyDevice, peak_flops, speeds_of
from lowtide.records import (
    CATEGORIES,
    CategoryBytes,
    Estimate,
    Phase,
    StepTime,
    TimelinePoint,
)

__all__ = ["predict_step"]

_MOST_POINTS = 400


@dataclass(frozen=True)
class _Moment:
    """A place in the step, and what blocks add there at their highest."""

    place: int
    """How many changes of the outline came before."""
    phase: Phase
    module: str
    op: str
    saved: int = 0
    """Added to saved activations, besides what other blocks hold."""
    transient: int = 0


def predict_step(
    outline: StepOutline,
    costs: Mapping[str, BlockCost] | Sequence[BlockCost],
    *,
    policy: str = "",
    device: AnyDevice | None = None,
    assumptions: Sequence[str] = (),
) -> Estimate:
    """Return peak, timeline and time of a step whose blocks cost what is given.

    Args:
        outline: the step without its blocks.
        costs: by FQN of the block, or one for each of ``outline.calls``, in their order.
        policy: what the estimate calls the choice.
        device: what utilisation is a share of, and whether collectives run beside computation; by default the outline's
            device by its name. Give the profile that priced the costs, where one did.
        assumptions: what the costs took for granted.
    """
    by_call = [costs[c.block] for c in outline.calls] if isinstance(costs, Mapping) else list(costs)
    assert len(by_call) == len(outline.calls), "one cost for each call of a block"
    step = _Step(outline, by_call)
    points, peak, most = step.walk()
    return Estimate(
        peak_bytes=peak.live.total,
        at_peak=peak.live,
        peak_phase=peak.phase,
        peak_module=peak.module,
        peak_op=peak.op,
        category_peaks=most,
        timeline=points,
        method="model of traces",
        device=outline.device,
        world_size=outline.world_size,
        rank=outline.rank,
        policy=policy,
        time=_time(outline, by_call, device),
        assumptions=(*outline.assumptions, *assumptions),
        environment=outline.environment,
    )


class _Step:
    def __init__(self, outline: StepOutline, costs: Sequence[BlockCost]) -> None:
        self.outline, self.costs = outline, costs
        count = len(outline.changes)
        self.saved = [0] * (count + 2)
        """Difference of saved activations on top of the outline, by place."""
        self.hidden = [False] * (count + 1)
        """Places inside an empty block, where the outline's own level means nothing."""
        self.moments: list[_Moment] = []
        for call, cost in zip(outline.calls, costs, strict=True):
            self._place(call, cost)
        self._hold()

    def _place(self, call: BlockCall, cost: BlockCost) -> None:
        for place in range(call.forward[0] + 1, call.forward[1] + 1):
            self.hidden[place] = place < call.forward[1]
        own = min(cost.saved_bytes, cost.forward_bytes)
        self.moments.append(
            _Moment(call.forward[0], "forward", call.block, "a block's forward", own, cost.forward_bytes - own)
        )
        if call.backward is None:
            return
        begin, end = call.backward
        for place in range(begin + 1, end + 1):
            self.hidden[place] = True
        self.saved[call.forward[1]] += cost.saved_bytes
        self.saved[begin] -= cost.saved_bytes
        left = cost.saved_at_peak_bytes
        self.moments.append(
            _Moment(begin, "backward", call.block, "a block's backward", left, cost.backward_bytes - left)
        )

    def _hold(self) -> None:
        """Let arguments that blocks hold live until the last such block's backward."""
        until: dict[int, int] = {}
        for call, cost in zip(self.outline.calls, self.costs, strict=True):
            if call.backward is None:
                continue
            for name, storage in call.arguments:
                if name in cost.holds:
                    until[storage] = max(until.get(storage, 0), call.backward[1])
        live: dict[int, int] = {}
        for place, change in enumerate(self.outline.changes, start=1):
            before = live.get(change.storage, 0)
            live[change.storage] = before + change.delta
            end = until.get(change.storage, 0)
            if before and not live[change.storage] and place < end:
                self.saved[place] += before
                self.saved[end] -= before

    def walk(self) -> tuple[tuple[TimelinePoint, ...], TimelinePoint, CategoryBytes]:
        """Return the thinned timeline, its highest point, and each category's own highest."""
        moments: dict[int, list[_Moment]] = {}
        for moment in self.moments:
            moments.setdefault(moment.place, []).append(moment)
        heights = _Heights(len(self.outline.changes) + len(self.moments))
        live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        extra = 0
        for place in range(len(self.outline.changes) + 1):
            change = self.outline.changes[place - 1] if place else None
            if change is not None:
                live[self.outline.categories[change.storage]] += change.delta
            extra += self.saved[place]
            if change is not None and not self.hidden[place]:
                heights.look(_Moment(place, change.phase, change.module, change.op), live, extra)
            for moment in moments.get(place, ()):
                heights.look(moment, live, extra)
        return heights.finish()


class _Heights:
    """Keeps the highest of each stretch of a timeline, and the most of each category."""

    def __init__(self, count: int) -> None:
        self._size = max(1, count // _MOST_POINTS)
        self._kept: list[tuple[int, _Moment, dict[str, int]]] = []
        self._best: tuple[int, _Moment, dict[str, int]] | None = None
        self._seen = 0
        self._most: dict[str, int] = dict.fromkeys(CATEGORIES, 0)

    def look(self, moment: _Moment, live: Mapping[str, int], extra: int) -> None:
        """Take in one moment: what is alive in the outline, and what blocks add."""
        if self._best is not None and (self._seen == self._size or self._best[1].phase != moment.phase):
            self._kept.append(self._best)
            self._best, self._seen = None, 0
        self._seen += 1
        saved = live["saved_activations"] + extra + moment.saved
        transient = live["transient"] + moment.transient
        total = sum(live.values()) + extra + moment.saved + moment.transient
        most = self._most
        for name, nbytes in live.items():
            if nbytes > most[name]:
                most[name] = nbytes
        most["saved_activations"] = max(most["saved_activations"], saved)
        most["transient"] = max(most["transient"], transient)
        if self._best is None or total > self._best[0]:
            self._best = (total, moment, {**live, "saved_activations": saved, "transient": transient})

    def finish(self) -> tuple[tuple[TimelinePoint, ...], TimelinePoint, CategoryBytes]:
        """Return the points, the highest of them, and the most of each category."""
        if self._best is not None:
            self._kept.append(self._best)
        points = tuple(
            TimelinePoint(event=m.place, phase=m.phase, module=m.module, op=m.op, live=CategoryBytes(**live))
            for _, m, live in self._kept
        )
        highest = max(range(len(points)), key=lambda i: self._kept[i][0])
        return points, points[highest], CategoryBytes(**self._most)


def _time(outline: StepOutline, costs: Sequence[BlockCost], device: AnyDevice | None) -> StepTime:
    speeds = speeds_of(outline.device if device is None else device, threads=outline.threads)
    computing = {
        "forward": outline.forward.computing + sum(c.forward_ms for c in costs),
        "backward": outline.backward.computing + sum(c.backward_ms + c.recompute_ms for c in costs),
        "optimizer": outline.optimizer.computing,
    }
    by_phase = {
        name: _pass_ms(ms, getattr(outline, name), sequential=speeds.sequential) for name, ms in computing.items()
    }
    step_ms = sum(by_phase.values())
    model = outline.model_flops + 3 * sum(c.forward_flops for c in costs)
    hardware = outline.hardware_flops + sum(c.forward_flops + c.backward_flops + c.recompute_flops for c in costs)
    possible = peak_flops(speeds, outline.dtype, threads=outline.threads) * step_ms / 1000
    times: list[PhaseTimes] = [outline.forward, outline.backward, outline.optimizer]
    return StepTime(
        step_ms=step_ms,
        forward_ms=by_phase["forward"],
        backward_ms=by_phase["backward"],
        optimizer_ms=by_phase["optimizer"],
        communication_ms=sum(t.sharding + t.waiting for t in times),
        tokens_per_s=outline.tokens / step_ms * 1000 if outline.tokens and step_ms else None,
        model_flops=model,
        hardware_flops=hardware,
        mfu=model / possible if possible else None,
        hfu=hardware / possible if possible else None,
    )


def _pass_ms(computing: float, times: PhaseTimes, *, sequential: bool) -> float:
    both = computing + times.sharding if sequential else max(computing, times.sharding)
    return both + times.waiting
