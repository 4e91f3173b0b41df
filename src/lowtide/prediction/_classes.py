"""Which operators reach like shares of a device's peaks, and how large those shares are where nobody measured.

The shares are round numbers between published ones; no share was fitted to a measurement of lowtide's own:

    matmul              0.70 of the peak: NVIDIA's and AMD's libraries reach 0.6 to 0.85 on large bfloat16 products
    attention           0.55 forward, 0.45 backward: FlashAttention-2 (Dao 2023, arXiv 2307.08691, figures 4 to 7)
                        reaches 0.35 to 0.73 on A100, FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608) up to 0.75
                        on H100, and less in backward
    element by element  0.85 of the bandwidth, as BabelStream reports on A100, H100 and MI250 (0.85 to 0.92)
    reductions, norms   0.70: they read twice or synchronise between rows

``lowtide calibrate`` replaces all of them by what one machine does.
"""

from __future__ import annotations

from lowtide.prediction._profile import OperatorClass

__all__ = ["BY_FLOPS", "SHARES", "base_name", "class_of", "collective_of"]

SHARES: dict[OperatorClass, float] = {
    "matmul": 0.70,
    "attention": 0.55,
    "attention_backward": 0.45,
    "pointwise": 0.85,
    "transcendental": 0.85,
    "reduction": 0.70,
    "normalisation": 0.70,
    "copy": 0.85,
}

BY_FLOPS: tuple[OperatorClass, ...] = ("matmul", "attention", "attention_backward")
"""Classes that are bound by operations where their tensors are large; all others move bytes."""

_MATMUL = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "linear", "_grouped_mm", "_scaled_mm",
    "convolution", "convolution_backward", "mkldnn_linear", "mkldnn_convolution", "_int_mm", "linear_backward",
}  # fmt: skip
_NORMALISATION = {
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "logsumexp",
    "nll_loss_forward", "nll_loss_backward",
}  # fmt: skip
_REDUCTION = {
    "sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "std", "var", "var_mean", "norm",
    "linalg_vector_norm", "_foreach_norm", "cumsum", "argmax", "topk", "sort", "bincount", "histc",
    "embedding_dense_backward", "index_add", "index_add_", "scatter_add", "scatter_add_", "nonzero",
}  # fmt: skip
_COPY = {
    "copy_", "clone", "_to_copy", "cat", "stack", "contiguous", "index", "index_select", "gather", "embedding", "fill_",
    "zero_", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full",
    "constant_pad_nd", "repeat", "flip", "roll", "tril", "triu", "scatter", "index_put", "index_put_", "slice_scatter",
    "select_scatter", "slice_backward", "select_backward", "_foreach_copy_", "split_with_sizes_copy", "arange",
    "_unsafe_index", "_index_put_impl_", "all_gather_copy_in", "split_with_sizes_copy_", "chunk_cat", "_chunk_cat",
}  # fmt: skip
_TRANSCENDENTAL = (
    "gelu", "silu", "exp", "tanh", "sigmoid", "erf", "log", "sin", "cos", "softplus", "mish", "elu", "pow",
    "dropout", "bernoulli", "rand", "normal_", "uniform_",
)  # fmt: skip
_COLLECTIVES = {
    "allgather": "all_gather", "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce", "all_reduce": "all_reduce",
    "alltoall": "all_to_all", "all_to_all": "all_to_all",
    "broadcast": "broadcast",
}  # fmt: skip
_COMMUNICATES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def base_name(op: str) -> str:
    """Return the operator's name without namespace and overload: ``mm`` of ``aten.mm.default``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def collective_of(op: str) -> str | None:
    """Return which collective an operator starts; None where it starts none (``wait_tensor`` too)."""
    if op.split(".")[0] not in _COMMUNICATES:
        return None
    name = base_name(op).lstrip("_")
    return next((kind for start, kind in _COLLECTIVES.items() if name.startswith(start)), None)


def class_of(op: str) -> OperatorClass:
    """Return the class of an operator by its name; what is in no list works element by element."""
    name = base_name(op)
    if name in _MATMUL:
        return "matmul"
    if "attention" in name:
        return "attention_backward" if "backward" in name else "attention"
    if name in _NORMALISATION or ("_norm" in name and name not in _REDUCTION):
        return "normalisation"
    if name in _REDUCTION:
        return "reduction"
    if name in _COPY:
        return "copy"
    return "transcendental" if name.strip("_").startswith(_TRANSCENDENTAL) or "dropout" in name else "pointwise"
