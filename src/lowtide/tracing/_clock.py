"""What a step costs in time, counted while it runs under fake tensors.

Every operator adds its time (``prediction.work_ms``) to the pass that it runs in. Sharding's collectives (FSDP's) run
beside the computation on a GPU, so a pass takes the longer of the two; those of tensor parallelism are waited for at
once and add up; on a CPU everything takes turns. The first gather of a pass, which nothing hides, is not told apart.

Utilisation counts products only (matrix products, convolutions, attention over the full square):

    model FLOPs      each product of forward once, and once more for each factor that needs a gradient (PaLM, Chowdhery
                     et al. 2022, appendix B: 2 in forward, 4 in backward; attention likewise)
    hardware FLOPs   every product that runs: recompute, and the scores that attention's backward makes again, too
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lowtide.prediction import Speeds, Work, collective_ms, peak_flops, work_ms
from lowtide.prediction._classes import BY_FLOPS, base_name, class_of, collective_of
from lowtide.records import Phase, StepTime
from lowtide.tracing._flops import bytes_moved, flops_of, tensors
from lowtide.tracing._storages import is_nothing

_BIASED = ("addmm", "baddbmm", "addbmm")


class StepClock:
    """Adds up time and operations of one step."""

    def __init__(self, speeds: Speeds, *, threads: int) -> None:
        self._speeds = speeds
        self._threads = threads
        self._computing: dict[Phase, float] = defaultdict(float)
        self._sharding: dict[Phase, float] = defaultdict(float)
        self._waiting: dict[Phase, float] = defaultdict(float)
        self._model: Counter[str] = Counter()
        self._hardware: Counter[str] = Counter()
        self._unknown: dict[str, None] = {}
        self._outer: tuple[Any, int] = (None, 0)

    def wrapped(self, func: Any, args: Sequence[Any]) -> None:
        """Note an operator on DTensors: the local tensors below it do not say which of them need gradients."""
        # A number: the arguments themselves would live on.
        self._outer = (func, _factors(str(func), args)) if class_of(str(func)) in BY_FLOPS else (None, 0)

    def operator(self, phase: Phase, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Count one call."""
        if is_nothing(func):
            return
        name = str(func)
        collective = collective_of(name)
        if collective is not None:
            self._collective(phase, func, collective, args, kwargs, result)
            return
        view = _is_view(func, result)
        flops = flops_of(func, args, kwargs, result, view=view)
        if flops is None and func.namespace not in _MOVERS:
            self._unknown[name] = None
        dtype = _dtype(args, result)
        work = Work(
            op=name,
            dtype=dtype,
            flops=flops,
            bytes_moved=bytes_moved(func, args, kwargs, result, view=view),
            view=view,
            causal="attention" in name and _is_causal(func, args, kwargs),
        )
        self._computing[phase] += work_ms(work, self._speeds)
        if flops and class_of(name) in BY_FLOPS:
            self._hardware[dtype] += flops
            if phase == "forward":
                factors = self._outer[1] if func is self._outer[0] else _factors(name, args)
                self._model[dtype] += flops * (1 + factors)

    def _collective(
        self, phase: Phase, func: Any, collective: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        nbytes = max((t.numel() * t.element_size() for t in tensors((args, kwargs, result))), default=0)
        ranks = _ranks(args)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if collective in ("all_gather", "reduce_scatter") and func.namespace != "c10d":
            # The functional forms show the result or what is given, whichever is smaller stands beside it.
            nbytes = max(nbytes, _smallest(args, result) * len(ranks))
        ms = collective_ms(collective, nbytes, ranks=len(ranks), device=self._speeds, stride=stride)
        (self._sharding if func.namespace == "c10d" else self._waiting)[phase] += ms

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the time takes for granted, in sentences."""
        profile = self._speeds.profile
        if profile is not None:
            source = f"those measured on {profile.device} ({profile.threads} thread(s)) by lowtide calibrate"
        elif self._speeds.sequential:
            source = "those of a nominal CPU core (64 GFLOP/s, 10 GB/s) for each thread: lowtide calibrate measures"
        else:
            source = "the maker's peaks times published shares of them: lowtide calibrate measures"
        unknown = (f"the time of {name} is that of its bytes alone: it has no FLOP formula" for name in self._unknown)
        return (f"speeds are {source}", *unknown)

    def time(self, *, tokens: int | None) -> StepTime:
        """Return the step's time and what follows from it; ``tokens`` are those of all ranks in a step."""
        by_phase = {phase: self._phase_ms(phase) for phase in ("forward", "backward", "optimizer")}
        step_ms = sum(by_phase.values())
        step_s = step_ms / 1000
        return StepTime(
            step_ms=step_ms,
            forward_ms=by_phase["forward"],
            backward_ms=by_phase["backward"],
            optimizer_ms=by_phase["optimizer"],
            communication_ms=sum(self._sharding.values()) + sum(self._waiting.values()),
            tokens_per_s=tokens / step_s if tokens and step_s else None,
            model_flops=self.model_flops,
            hardware_flops=self.hardware_flops,
            mfu=self._share(self._model, step_s),
            hfu=self._share(self._hardware, step_s),
        )

    def parts(self, phase: Phase) -> dict[str, float]:
        """Return the three parts of a pass in milliseconds."""
        return {"computing": self._computing[phase], "sharding": self._sharding[phase], "waiting": self._waiting[phase]}

    @property
    def model_flops(self) -> int:
        """Of the products that the model asks for."""
        return sum(self._model.values())

    @property
    def hardware_flops(self) -> int:
        """Of all products that ran."""
        return sum(self._hardware.values())

    def _phase_ms(self, phase: Phase) -> float:
        computing, sharding = self._computing[phase], self._sharding[phase]
        both = computing + sharding if self._speeds.sequential else max(computing, sharding)
        return both + self._waiting[phase]

    def _share(self, flops: Counter[str], step_s: float) -> float | None:
        if not step_s:
            return None
        ideal_s = sum(n / peak_flops(self._speeds, dtype, threads=self._threads) for dtype, n in flops.items())
        return ideal_s / step_s


_MOVERS = ("fsdp", "c10d", "_c10d_functional", "c10d_functional")
"""They copy and communicate; nothing in them is computed."""


def _is_view(func: Any, result: Any) -> bool:
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write and bool(tensors(result))


def _dtype(args: Sequence[Any], result: Any) -> str:
    found = tensors(args) or tensors(result)
    first = next((t for t in found if t.is_floating_point()), found[0] if found else None)
    return "float32" if first is None else str(first.dtype).removeprefix("torch.")


def _is_causal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[i] if i < len(args) else kwargs.get("is_causal", False))
    return False


def _factors(name: str, args: Sequence[Any]) -> int:
    """Return how many more products of the same size backward needs: one for each factor with a gradient."""
    if "attention" in name:
        return 2 if any(t.requires_grad for t in tensors(args)) else 0
    factors = args[1:] if base_name(name) in _BIASED else args
    return sum(t.requires_grad for t in tensors(list(factors)[:2]) if t.dim() > 1)


def _smallest(args: Sequence[Any], result: Any) -> int:
    return min((t.numel() * t.element_size() for t in tensors((args, result))), default=0)


def _ranks(args: Sequence[Any]) -> list[int]:
    for argument in args:
        group: Any = None
        if isinstance(argument, str):
            try:
                group = dist.distributed_c10d._resolve_process_group(argument)  # pyright: ignore[reportArgumentType]
            except (RuntimeError, ValueError, KeyError):
                continue
        elif type(argument).__name__ == "ScriptObject":
            try:
                group = dist.ProcessGroup.unbox(argument)  # pyright: ignore[reportAttributeAccessIssue]
            except (RuntimeError, TypeError):
                continue
        if isinstance(group, dist.ProcessGroup):
            return dist.get_process_group_ranks(group)
    return list(range(dist.get_world_size())) if dist.is_initialized() else [0]
