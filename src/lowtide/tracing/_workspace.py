"""Memory that a kernel allocates and frees inside one call, which no operator shows.

Only sizes that torch's source states are here; nothing was fitted to a measurement.

    CPU flash attention, forward     per thread: scores, row maxima and sums, a block of the output, all float32;
                                     for 16-bit types also the scores in that type
    CPU flash attention, backward    per thread: scores twice in float32, for 16-bit types both again in that type,
                                     and a copy of gradients that lie in another order
        (``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``; block sizes 32, 64 or 256 queries by 512 keys)
    CUDA flash attention, backward   sum of gradient times output, and the gradient of queries in float32; with
        grouped heads also gradients of keys and values for every query head (``flash_attn/flash_api.cpp``)

Limits: oneDNN's and cuBLAS' own workspaces are allocated elsewhere (cuBLAS' counts once for a process in torch's
allocator, and is named as an assumption by the estimate); cuDNN's attention workspace is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.prediction import Device

aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)


def workspace_bytes(func: Any, args: Sequence[Any], device: Device, *, threads: int) -> int:
    """Return the most bytes that the call allocates besides its results; 0 where nothing is known of any."""
    name = getattr(getattr(func, "_overloadpacket", None), "__name__", "")
    formula = _FORMULAS.get((device.kind == "cpu", name))
    return 0 if formula is None else formula(args, threads)


def _queries_at_once(queries: int) -> int:
    return 256 if queries >= 768 else 64 if queries >= 192 else 32


def _cpu_forward(args: Sequence[Any], threads: int) -> int:
    query, key = args[0], args[1]
    rows = min(_queries_at_once(query.shape[2]), query.shape[2])
    columns = min(512, key.shape[2])
    floats = rows * columns + 2 * rows + rows * query.shape[3]
    reduced = rows * columns * query.element_size() if query.dtype in _LOW else 0
    return threads * (floats * 4 + reduced)


def _cpu_backward(args: Sequence[Any], threads: int) -> int:
    query, key = args[1], args[2]
    rows = min(_queries_at_once(query.shape[2]), query.shape[2])
    columns = min(512, key.shape[2])
    per_thread = (rows + 2 * rows * columns) * 4
    reduced = 2 * rows * columns * query.element_size() if query.dtype in _LOW else 0
    # The kernel reads gradients row by row and copies those that lie otherwise.
    copied = 0 if args[0].transpose(1, 2).is_contiguous() else args[0].numel() * args[0].element_size()
    return threads * (per_thread + reduced) + copied


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _cuda_flash_backward(args: Sequence[Any], threads: int) -> int:
    query, key = args[1], args[2]
    batch, heads, queries, width = query.shape
    rows, columns = _up(queries, 128), _up(width, 32 if width <= 128 else 64)
    total = batch * heads * rows * 4 + batch * heads * rows * columns * 4
    if key.shape[1] != heads:
        total += 2 * batch * heads * key.shape[2] * width * query.element_size()
    return total


_FORMULAS: dict[tuple[bool, str], Callable[[Sequence[Any], int], int]] = {
    (True, "_scaled_dot_product_flash_attention_for_cpu"): _cpu_forward,
    (True, "_scaled_dot_product_flash_attention_for_cpu_backward"): _cpu_backward,
    (False, "_scaled_dot_product_flash_attention_backward"): _cuda_flash_backward,
}
