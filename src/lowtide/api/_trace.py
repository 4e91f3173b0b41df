"""``trace``: every operator of one block, as a target device would run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lowtide.errors import RefusedError
from lowtide.records import OpTrace
from lowtide.regions import Region, slots
from lowtide.tracing import trace_block


def trace(
    block: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, device: str
) -> OpTrace:
    """Trace forward and backward of one block without running it: no GPU, no memory, the module is left alone.

    Args:
        block: any module without sharding and without a policy, on any device (``meta`` too), of any size.
        args: its arguments; of tensors only shape, strides, type and ``requires_grad`` count.
        kwargs: its keyword arguments.
        device: what it would run on, ``"cpu"`` or a name such as ``"H100"``; kernels and saved tensors are those.

    Returns:
        Operators, storages, what backward needs, FLOPs and bytes, and what was taken for granted.

    Raises:
        UserError: an unknown device, or a forward that depends on the values of tensors.
        RefusedError: the block has a policy applied.
    """
    regions = [slot.fqn for slot in slots(block) if isinstance(slot.module.__dict__.get("forward"), Region)]
    if regions:
        raise RefusedError(
            f"{regions[0] or type(block).__name__} has a policy applied, and a trace is of the bare block: call "
            "remove() on what lowtide.apply returned first"
        )
    return trace_block(block, args, kwargs, device=device)
