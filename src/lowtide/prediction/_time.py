"""What an operator, a pass over a block, or a collective costs in time: a roofline, from records alone.

    operator      the longer of   operations / rate of its class   and   bytes moved / bandwidth of its class,
                  plus its launch on a CPU; at least its launch on a GPU, where launches overlap kernels
    attention     a causal kernel skips the half that the mask hides, although FLOPs count in full
    view          a launch, no bytes
    collective    latency x steps of a ring + the bytes that a rank sends / bandwidth of its slowest link
                  (all_gather, reduce_scatter, all_to_all: (n-1)/n of the tensor; all_reduce: twice that)

(Williams, Waterman, Patterson 2009, "Roofline"; ring costs as in Thakur, Rabenseifner, Gropp 2005.) Rates are those of
a ``DeviceProfile`` that was measured, or the makers' peaks times the shares in ``_classes``. An operator without a FLOP
formula is priced by the bytes that it moves and its launch, and ``unpriced`` names it: its time is too low, never zero.

Known limits: nothing of caches between operators, of clocks that fall under load, or of Python that is slower than the
kernels it launches beyond a fixed launch time. Expect tens of percent, not percents, without a profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from lowtide.errors import UserError
from lowtide.prediction._classes import BY_FLOPS, SHARES, base_name, class_of, collective_of
from lowtide.prediction._profile import DeviceProfile, OperatorClass
from lowtide.prediction.hardware import Device, find_device
from lowtide.records import OpRecord, OpTrace

__all__ = [
    "AnyDevice",
    "Speeds",
    "Work",
    "collective_ms",
    "op_ms",
    "peak_flops",
    "speeds_of",
    "trace_ms",
    "unpriced",
    "work_ms",
]

_LOW = ("bfloat16", "float16")
_GPU_LAUNCH_MS, _GPU_VIEW_MS = 5e-3, 0.0
"""From one kernel to the next as torch's eager dispatcher launches them; views launch none."""
_CPU_OPERATOR_MS, _CPU_VIEW_MS = 6e-3, 2e-3
"""A small operator and a view on a 2 GHz core, with autograd; ``lowtide calibrate`` measures both."""

_RANKS_OF_A_NODE = 8
_NODE_LINK = 50e9
"""Bytes a second between nodes for each GPU: 400 Gb/s, as in the reference designs of the H100's time."""
_LATENCY_MS = {"near": 0.005, "far": 0.015, "cpu": 0.05}
_LINK_SHARE = 0.75

_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""They touch no bytes."""


@dataclass(frozen=True)
class Work:
    """What the time of one operator depends on."""

    op: str
    dtype: str
    flops: int | None
    bytes_moved: int
    view: bool = False
    causal: bool = False
    ranks: int = 1
    """Of the group, for a collective."""
    nbytes: int = 0
    """Of a collective's whole tensor."""


@dataclass(frozen=True)
class Speeds:
    """A device's speeds, from the table or from a profile."""

    device: Device
    profile: DeviceProfile | None = None
    threads: int = 1

    @property
    def sequential(self) -> bool:
        """Whether launches and collectives take turns with kernels, as on a CPU."""
        return self.device.kind == "cpu"

    def per_s(self, operators: OperatorClass, dtype: str, size: float) -> float:
        """Return operations (products, attention) or bytes (all others) a second."""
        measured = None if self.profile is None else _measured(self.profile, operators, dtype, size)
        if measured is not None:
            return measured
        peak = self._peak(dtype) if operators in BY_FLOPS else self.device.bytes_per_s
        assert peak is not None, f"{self.device.name} has no speeds in the table"
        return peak * SHARES[operators] * (self.threads if self.sequential else 1)

    def _peak(self, dtype: str) -> float | None:
        return self.device.low_precision_flops if dtype in _LOW else self.device.float32_flops

    @property
    def operator_ms(self) -> float:
        """Launch of one operator."""
        if self.profile is not None:
            return self.profile.operator_us / 1000
        return _CPU_OPERATOR_MS if self.sequential else _GPU_LAUNCH_MS

    @property
    def view_ms(self) -> float:
        """Launch of one view."""
        if self.profile is not None and self.sequential:
            return self.profile.view_us / 1000
        return _CPU_VIEW_MS if self.sequential else _GPU_VIEW_MS


AnyDevice = str | Device | DeviceProfile | Speeds
"""A name of the table, an entry of it, what was measured, or what ``speeds_of`` made of one of them."""

_STANDS_FOR: dict[OperatorClass, tuple[OperatorClass, ...]] = {
    "attention": ("matmul",),
    "attention_backward": ("attention", "matmul"),
    "transcendental": ("pointwise",),
    "reduction": ("pointwise",),
    "normalisation": ("reduction", "pointwise"),
    "copy": ("pointwise",),
}


def _measured(profile: DeviceProfile, operators: OperatorClass, dtype: str, size: float) -> float | None:
    """Return the measured rate of the nearest class and type that there is."""
    types = [dtype]
    if dtype in _LOW:
        types += [low for low in _LOW if low != dtype]
    if dtype != "float32":
        types.append("float32")
    for kind in (operators, *_STANDS_FOR.get(operators, ())):
        for name in types:
            found = profile.per_s(kind, name, size)
            if found is not None:
                return found
    return None


def speeds_of(device: AnyDevice, *, threads: int = 1) -> Speeds:
    """Return the speeds of a device by its name, its entry in the table, or what was measured on it.

    Args:
        device: a name such as ``"H100"``, an entry of the table, or a profile.
        threads: CPU threads; only the table's nominal core is multiplied by them, a profile has its own.

    Raises:
        UserError: an unknown name, or a device without published speeds (none in the table).
    """
    if isinstance(device, Speeds):
        return device
    if isinstance(device, DeviceProfile):
        return Speeds(_device_of(device), device, device.threads)
    found = find_device(device)
    if None in (found.low_precision_flops, found.float32_flops, found.bytes_per_s):
        raise UserError(f"device {found.name!r} has no speeds, so no time can be said: give a device profile")
    return Speeds(found, threads=threads)


def _device_of(profile: DeviceProfile) -> Device:
    """Return the table's entry of a profile's device; for one that is not there, its like without published peaks."""
    try:
        found = find_device(profile.device)
    except UserError:
        rate = profile.per_s("pointwise", "float32", math.inf)
        flops = profile.per_s("matmul", "float32", math.inf)
        low = profile.per_s("matmul", "bfloat16", math.inf)
        return Device(profile.device, profile.kernels, None, None, low or flops, flops, rate)
    return replace(found, name=profile.device)


def peak_flops(device: AnyDevice, dtype: str, *, threads: int = 1) -> float:
    """Return what utilisation is a share of: the maker's peak a second for products in ``dtype``.

    On a CPU, whose peak nobody publishes in such a form, and for a device that is not in the table: the fastest
    product that the profile measured, or the nominal core's.
    """
    speeds = speeds_of(device, threads=threads)
    if speeds.profile is not None and (speeds.sequential or speeds.device.capability is None):
        name = dtype if dtype in _LOW else "float32"
        rates = [p.per_s for p in speeds.profile.rates if p.operators == "matmul" and p.dtype == name]
        rates = rates or [p.per_s for p in speeds.profile.rates if p.operators == "matmul"]
        return max(rates)
    peak = speeds._peak(dtype)
    assert peak is not None, f"{speeds.device.name} has no speeds in the table"
    return peak * (threads if speeds.sequential else 1)


def work_ms(work: Work, speeds: Speeds) -> float:
    """Return the time of one operator in milliseconds."""
    if work.view or base_name(work.op) in _ALLOCATES:
        return speeds.view_ms
    collective = collective_of(work.op)
    if collective is not None:
        return collective_ms(collective, work.nbytes or work.bytes_moved, ranks=work.ranks, device=speeds)
    kind = class_of(work.op)
    if kind in BY_FLOPS:
        flops = (work.flops or 0) * (0.5 if work.causal and kind != "matmul" else 1.0)
        kernel_s = max(
            flops / speeds.per_s(kind, work.dtype, flops) if flops else 0.0,
            work.bytes_moved / speeds.per_s("copy", work.dtype, work.bytes_moved),
        )
    else:
        kernel_s = work.bytes_moved / speeds.per_s(kind, work.dtype, work.bytes_moved)
    kernel_ms = kernel_s * 1000
    return kernel_ms + speeds.operator_ms if speeds.sequential else max(kernel_ms, speeds.operator_ms)


def op_ms(op: OpRecord, device: AnyDevice, *, threads: int = 1, ranks: int = 1) -> float:
    """Return the time of one operator of a trace, in milliseconds; more than zero for all but a GPU's views.

    Args:
        op: the operator.
        device: a name such as ``"H100"``, a ``Device``, a measured ``DeviceProfile``, or what ``speeds_of`` returned
            (which saves the look-up where many are asked).
        threads: CPU threads, for the table's nominal core.
        ranks: processes of the group, for a collective.

    Raises:
        UserError: an unknown device.
    """
    return work_ms(_work(op, ranks), speeds_of(device, threads=threads))


def trace_ms(
    trace: OpTrace,
    phase: Literal["forward", "backward"],
    device: AnyDevice | None = None,
    *,
    threads: int = 1,
) -> float:
    """Return the time of one pass over a block, in milliseconds: the sum over its operators.

    ``device`` defaults to the one that the trace is of. What ``unpriced`` names counts by its bytes and launch.

    Raises:
        UserError: an unknown device.
    """
    speeds = speeds_of(trace.device if device is None else device, threads=threads)
    return sum(work_ms(_work(op, 1), speeds) for op in trace.ops if op.phase == phase)


def unpriced(trace: OpTrace) -> tuple[str, ...]:
    """Return the operators whose work is unknown, as sentences for an estimate's assumptions."""
    names = dict.fromkeys(op.op for op in trace.ops if op.flops is None and not op.view)
    return tuple(f"the time of {name} is that of its bytes alone: it has no FLOP formula" for name in names)


def _work(op: OpRecord, ranks: int) -> Work:
    first = next((t for t in op.inputs if "float" in t.dtype), op.inputs[0] if op.inputs else None)
    return Work(
        op=op.op,
        dtype=first.dtype if first is not None else op.outputs[0].dtype if op.outputs else "float32",
        flops=op.flops,
        bytes_moved=op.bytes_moved,
        view=op.view,
        causal="is_causal=True" in op.literals,
        ranks=ranks,
    )


def collective_ms(collective: str, nbytes: int, *, ranks: int, device: AnyDevice, stride: int = 1) -> float:
    """Return the time of one collective in milliseconds.

    Args:
        collective: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``.
        nbytes: bytes of the whole tensor (what all_gather returns, what the others are given).
        ranks: processes of the group; one communicates nothing.
        device: as for ``op_ms``.
        stride: distance between the ranks of the group: with 8 each is on a node of its own.
    """
    if ranks <= 1:
        return 0.0
    speeds = speeds_of(device)
    if speeds.profile is not None:
        measured = speeds.profile.collective_ms(collective, nbytes, ranks)
        if measured is not None:
            return measured
    sent = nbytes * (ranks - 1) / ranks * (2 if collective == "all_reduce" else 1)
    far = not speeds.sequential and ranks * stride > _RANKS_OF_A_NODE
    link = _NODE_LINK if far else speeds.device.link_bytes_per_s or _NODE_LINK
    latency_ms = _LATENCY_MS["cpu" if speeds.sequential else "far" if far else "near"]
    # Long rings are cut into trees: latency grows with the logarithm.
    steps = math.ceil(math.log2(ranks)) * (2 if collective == "all_reduce" else 1)
    return steps * latency_ms + sent / (link * _LINK_SHARE) * 1000
