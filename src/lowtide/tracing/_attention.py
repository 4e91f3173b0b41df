"""Which kernel ``scaled_dot_product_attention`` runs on a target device: torch's own rules, written down.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h`` (selection, in the order of
priority), ``attention.cpp`` (what happens to masks and head sizes before the kernel), as of torch 2.14. Each rule
below is one of the checks there, in its order.

Taken for granted, since they are facts of an installation and not of a device: all backends are built in and enabled,
the default order of priority stands, cuDNN is newer than 9.15 (older ones are not preferred on Hopper and
Blackwell: flash runs there, whose saved tensors have the same sizes), tensors are contiguous in their last dimension.
No rule was compared with a real GPU yet: tests/gpu does that where there is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lowtide.prediction import Device

Kernel = Literal["cpu_flash", "cudnn", "flash", "efficient", "math"]

_LOW = ("float16", "bfloat16")


@dataclass(frozen=True)
class AttentionCall:
    """What the choice depends on; shapes are [batch, heads, tokens, width]."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    """As in ``bfloat16``; queries, keys and values share it."""
    mask: bool = False
    mask_needs_grad: bool = False
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    """``enable_gqa``."""
    needs_grad: bool = True
    deterministic: bool = False


def choose_attention(call: AttentionCall, device: Device) -> tuple[Kernel, str]:
    """Return the kernel, and why those before it in the order of priority were passed over."""
    if device.kind == "cpu":
        reason = _not_cpu_flash(call)
        return ("math", reason) if reason else ("cpu_flash", "")
    reasons: list[str] = []
    for kernel in _order(device):
        reason = _REFUSALS[kernel](call, device)
        if not reason:
            return kernel, "; ".join(reasons)
        reasons.append(f"{kernel}: {reason}")
    return "math", "; ".join(reasons)


def _order(device: Device) -> tuple[Literal["cudnn", "flash", "efficient"], ...]:
    prefers_cudnn = device.kind == "cuda" and device.capability is not None and device.capability[0] in (9, 10)
    return ("cudnn", "flash", "efficient") if prefers_cudnn else ("flash", "efficient")


def _not_cpu_flash(call: AttentionCall) -> str:
    if call.dropout > 0:
        return "the CPU's flash kernel has no dropout"
    if len(call.query) != 4:
        return "it takes four dimensions"
    if call.mask_needs_grad:
        return "the mask needs a gradient"
    if not call.query[3] == call.key[3] == call.value[3]:
        return "head sizes differ"
    if call.causal and call.mask:
        return "causal and a mask together"
    return ""


def _no_cudnn(call: AttentionCall, device: Device) -> str:
    width, value_width = call.query[-1], call.value[-1]
    checks = (
        (len(call.query) != 4, "it takes four dimensions"),
        (call.deterministic, "deterministic algorithms are asked for"),
        (call.dtype not in _LOW, f"{call.dtype} is neither float16 nor bfloat16"),
        (call.mask_needs_grad, "the mask needs a gradient"),
        (call.dropout * 16 != math.floor(call.dropout * 16), "dropout is no multiple of 1/16"),
        (max(width, value_width) > 128, "a head is wider than 128"),
        (bool(width % 8 or value_width % 8), "the head size is no multiple of 8"),
        (len(call.key) == 4 and call.key[2] == 1, "one key only"),
    )
    return next((reason for refused, reason in checks if refused), "")


def _no_flash(call: AttentionCall, device: Device) -> str:
    width = call.query[-1]
    major, minor = device.capability or (9, 0)
    consumer = (major == 8 and 6 <= minor <= 9) or major == 12
    wide = width > 192 and not (call.dropout == 0 and width > 224)
    checks = (
        (len(call.query) != 4, "it takes four dimensions"),
        (call.mask, "it takes no mask"),
        (not width == call.key[-1] == call.value[-1], "head sizes differ"),
        (width > 256, "a head is wider than 256"),
        (major < 8, "it needs compute capability 8.0"),
        (call.needs_grad and consumer and wide, "no backward for this head size on this device"),
        (call.causal and call.query[-2] != call.key[-2], "causal with as many queries as keys only"),
        (call.dtype not in _LOW, f"{call.dtype} is neither float16 nor bfloat16"),
    )
    return next((reason for refused, reason in checks if refused), "")


def _no_efficient(call: AttentionCall, device: Device) -> str:
    width, value_width = call.query[-1], call.value[-1]
    # On capability 8.0 and later: 128 bits; AMD's kernel asks the same.
    alignment = 8 if call.dtype in _LOW else 4
    checks = (
        (len(call.query) != 4, "it takes four dimensions"),
        (width != call.key[-1], "head sizes of queries and keys differ"),
        (bool(width % alignment or value_width % alignment), f"the head size is no multiple of {alignment}"),
        (call.dtype not in (*_LOW, "float32"), f"it does not take {call.dtype}"),
        (len(call.query) == 4 and call.query[1] != call.key[1], "it takes as many heads of keys as of queries"),
    )
    return next((reason for refused, reason in checks if refused), "")


_REFUSALS = {"cudnn": _no_cudnn, "flash": _no_flash, "efficient": _no_efficient}
