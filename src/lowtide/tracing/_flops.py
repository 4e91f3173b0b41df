"""Floating-point operations and bytes moved of one operator.

Matrix products, convolutions and attention: ``torch.utils.flop_counter``'s formulas (a product of an m x k by a k x n
matrix is 2 m n k), and the same formula for the attention operators that it lacks, with grouped heads. Causal attention
counts in full, as torch's counter does. Element by element: one operation an element; reductions and normalisations
one an element that is read. Copies, fills and views: none. Anything else has no formula, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_NO_WORK = {
    "_foreach_copy_", "_index_put_impl_", "_local_scalar_dense", "_pin_memory", "_to_copy", "_unsafe_index",
    "arange", "argmax", "as_strided_", "bernoulli_", "cat", "clone", "constant_pad_nd", "contiguous", "copy_",
    "detach_", "embedding", "empty", "empty_like", "empty_strided", "eye", "fill_", "flip", "full", "full_like",
    "gather", "index", "index_put", "index_put_", "index_select", "is_same_size", "lift_fresh", "native_dropout",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "nonzero", "normal_", "one_hot", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "random_", "repeat", "resize_", "roll", "scalar_tensor",
    "scatter", "select_backward", "select_scatter", "set_", "slice_backward", "slice_scatter", "sort",
    "split_with_sizes_copy", "stack", "topk", "tril", "triu", "uniform_", "zero", "zero_", "zeros", "zeros_like",
}  # fmt: skip
_PER_INPUT = {
    "_foreach_norm", "_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data",
    "_native_batch_norm_legit", "_softmax", "_softmax_backward_data", "all", "amax", "amin", "any", "cumsum",
    "embedding_dense_backward", "gelu_backward", "index_add", "index_add_", "linalg_vector_norm", "logsumexp",
    "max", "mean", "min", "native_batch_norm", "native_batch_norm_backward", "native_dropout_backward",
    "native_group_norm", "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward",
    "nll_loss_backward", "nll_loss_forward", "norm", "prod", "scatter_add", "scatter_add_", "silu_backward", "std",
    "sum", "threshold_backward", "var", "var_mean",
}  # fmt: skip


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, *, view: bool) -> int | None:
    """Return the operations of one call; None where no formula is known."""
    if view:
        return 0
    packet = getattr(func, "_overloadpacket", None)
    name = getattr(packet, "__name__", "")
    own = _OWN.get(name)
    if own is not None:
        return own(*args)
    if packet in flop_registry and "attention" not in name:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if name in _NO_WORK:
        return 0
    if name in _PER_INPUT:
        return max((t.numel() for t in tensors(args)), default=0)
    if torch.Tag.pointwise in func.tags or name.startswith("_foreach_"):
        return sum(t.numel() for t in tensors(result)) or sum(t.numel() for t in tensors(args[:1]))
    return None


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (width + value.shape[3])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    """Five products: the scores again, and the gradients of scores, values, queries and keys."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (3 * width + 2 * value.shape[3])


_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_OWN: dict[str, Callable[..., int]] = {
    **{f"_scaled_dot_product_{kernel}": _attention for kernel in _KERNELS},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _KERNELS},
}


def bytes_moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, *, view: bool) -> int:
    """Return the bytes that a call reads and writes, each distinct tensor once; nothing for a view."""
    if view:
        return 0
    name = getattr(getattr(func, "_overloadpacket", None), "__name__", "")
    made = tensors(result)
    read = tensors((args, kwargs))
    if name in ("embedding", "index", "index_select", "gather"):
        # Only the rows that are asked for are read.
        return sum(2 * _nbytes(t) for t in made) + sum(_nbytes(t) for t in read[1:])
    seen: dict[Any, int] = {}
    for tensor in (*read, *made):
        seen[id(tensor)] = _nbytes(tensor)
    return sum(seen.values())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
