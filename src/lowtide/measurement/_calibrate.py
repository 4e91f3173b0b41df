"""How fast this machine's device is, operator class by operator class: what ``lowtide calibrate`` runs.

    matmul          square products, by size                     operations a second
    attention       scaled_dot_product_attention, no mask        operations a second, forward and backward
    element by element, reductions, norms, copies, by size       bytes moved a second (results newly allocated, as in
                                                                 training, so pages are touched first on a CPU)
    launches        a chain of tiny operators forward and back, and one of views
    collectives     all_gather, reduce_scatter, all_reduce, by size, where the process group has several ranks

Every figure is the median of repeats; a size whose single call takes more than ``_LONGEST_S`` is the last of its kind,
so that a slow machine is done within the minute too. What is measured is the machine as it is: other work on it counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lowtide.errors import UserError
from lowtide.measurement._versions import environment
from lowtide.prediction import CollectivePoint, DeviceProfile, RatePoint, match_device
from lowtide.prediction._profile import OperatorClass

__all__ = ["calibrate"]

_LONGEST_S = 0.25
_REPEATS = 7
_DTYPES = (torch.float32, torch.bfloat16)
_CHAIN = 200
# torch 2.13 renamed both; 2.11 has only the old names.
_GATHER: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


def calibrate(device: str | torch.device | None = None) -> DeviceProfile:
    """Measure this process's device, in under a minute.

    With a process group of several ranks every rank must call it: collectives are measured between them.

    Args:
        device: ``"cpu"`` or ``"cuda"``; left out, a GPU where there is one.

    Raises:
        UserError: torch cannot use the device.
    """
    started = time.monotonic()
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here: calibrate the CPU (--device cpu), or run where there is one")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    bench = _Bench(where)
    rates = [*bench.products(), *bench.attention(), *bench.movers()]
    operator_us, view_us = bench.launches()
    kernels = "cpu" if where.type == "cpu" else "rocm" if torch.version.hip else "cuda"
    name = "cpu" if where.type == "cpu" else torch.cuda.get_device_name(where)
    return DeviceProfile(
        device=match_device(name) or name,
        kernels=kernels,
        threads=torch.get_num_threads() if where.type == "cpu" else 1,
        rates=tuple(rates),
        collectives=tuple(bench.collectives()),
        operator_us=operator_us,
        view_us=view_us,
        seconds=time.monotonic() - started,
        environment=environment(),
    )


class _Bench:
    """Runs small programs on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = device.type != "cpu"

    def products(self) -> Iterator[RatePoint]:
        sizes = (256, 512, 1024, 2048, 4096, 8192) if self.gpu else (64, 128, 256, 512, 1024, 2048)
        for dtype in _DTYPES:
            for n in sizes:
                a, b = self._random(n, n, dtype=dtype), self._random(n, n, dtype=dtype)
                s = self._seconds(lambda a=a, b=b: a @ b)
                yield _rate("matmul", dtype, 2 * n**3, s)
                if s > _LONGEST_S:
                    break

    def attention(self) -> Iterator[RatePoint]:
        lengths = (512, 2048, 4096) if self.gpu else (128, 512, 1024)
        heads, width = (16, 128) if self.gpu else (4, 64)
        for dtype in _DTYPES:
            for length in lengths:
                q, k, v = (self._random(1, heads, length, width, dtype=dtype).requires_grad_() for _ in range(3))
                flops = 4 * heads * length * length * width
                forward_s = self._seconds(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v))
                out = F.scaled_dot_product_attention(q, k, v)
                grad = torch.ones_like(out)

                def backward(out: Tensor = out, grad: Tensor = grad, given: Any = (q, k, v)) -> None:
                    torch.autograd.grad(out, given, grad, retain_graph=True)

                backward_s = self._seconds(backward)
                yield _rate("attention", dtype, flops, forward_s)
                # Five products where forward has two.
                yield _rate("attention_backward", dtype, flops * 5 // 2, backward_s)
                if backward_s > _LONGEST_S:
                    break

    def movers(self) -> Iterator[RatePoint]:
        """Operators that are bound by the bytes that they move."""
        elements = (2**18, 2**22, 2**26) if self.gpu else (2**14, 2**18, 2**22)
        for dtype in _DTYPES:
            for n in elements:
                x, y = self._random(n // 1024, 1024, dtype=dtype), self._random(n // 1024, 1024, dtype=dtype)
                nbytes = n * x.element_size()
                runs: Sequence[tuple[OperatorClass, int, Callable[[], object]]] = (
                    ("pointwise", 3 * nbytes, lambda x=x, y=y: x * y),
                    ("transcendental", 2 * nbytes, lambda x=x: F.silu(x)),
                    ("reduction", nbytes, lambda x=x: x.sum(-1)),
                    ("normalisation", 2 * nbytes, lambda x=x: torch.softmax(x, -1)),
                    ("copy", 2 * nbytes, lambda x=x: x.clone()),
                )
                for kind, moved, run in runs:
                    yield _rate(kind, dtype, moved, self._seconds(run))

    def launches(self) -> tuple[float, float]:
        """Return microseconds of a small operator, forward and backward together, and of a view."""
        x, w = self._random(8, 8).requires_grad_(), self._random(8, 8).requires_grad_()

        def chain() -> None:
            y = x
            for _ in range(_CHAIN):
                y = y * w
            y.backward(torch.ones_like(y))
            x.grad = w.grad = None

        def views() -> None:
            y = x
            for _ in range(_CHAIN):
                y = y.view(64).view(8, 8)

        # Backward: a product for each factor, and the sum of the gradients of w.
        return self._seconds(chain) * 1e6 / (4 * _CHAIN), self._seconds(views) * 1e6 / (2 * _CHAIN)

    def collectives(self) -> Iterator[CollectivePoint]:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks == 1:
            return
        for nbytes in (2**16, 2**20, 2**24, *((2**28,) if self.gpu else ())):
            n = nbytes // 4 // ranks * ranks
            whole, part = self._random(n), self._random(n // ranks)
            runs: tuple[tuple[Any, Callable[[], object]], ...] = (
                ("all_gather", lambda w=whole, p=part: _GATHER(w, p)),
                ("reduce_scatter", lambda w=whole, p=part: _SCATTER(p, w)),
                ("all_reduce", lambda w=whole: dist.all_reduce(w)),
            )
            for kind, run in runs:
                # The same number of calls on all ranks: no clock decides.
                s = self._repeat(run, warm_up=2)
                yield CollectivePoint(collective=kind, ranks=ranks, nbytes=n * 4, ms=s * 1000)

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, device=self.device).to(dtype)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of a call; a long one is not repeated."""
        run()
        first = self._once(run)
        return first if first > _LONGEST_S else self._repeat(run, warm_up=0)

    def _repeat(self, run: Callable[[], object], *, warm_up: int) -> float:
        for _ in range(warm_up):
            run()
        return statistics.median(self._once(run) for _ in range(_REPEATS))

    def _once(self, run: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)


def _rate(kind: OperatorClass, dtype: torch.dtype, size: int, seconds: float) -> RatePoint:
    name = str(dtype).removeprefix("torch.")
    return RatePoint(operators=kind, dtype=name, size=float(size), per_s=size / max(seconds, 1e-9))
