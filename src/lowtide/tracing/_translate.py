"""Fake CPU tensors that run what the target device would: the table of operators whose kernels differ.

Fake tensors on "cuda" cannot run autograd without a GPU (torch 2.13 aborts the process), so tracing runs on fake
"cpu" tensors. Most operators are the same on every device. Where the dispatcher picks others, the call is caught before
autograd sees it and the target's own operator runs instead, with torch's own shapes and derivatives:

    called                        on a CPU                            on a GPU                        saved there
    scaled_dot_product_attention  flash for CPU, or math              cudnn, flash, efficient, math   logsumexp, seeds
    dropout (training, 0 < p < 1) bernoulli_ in the input's type      native_dropout                  mask of bools
    rms_norm                      pow, mean, rsqrt, mul               _fused_rms_norm                 input, rstd
      (weight of another type)    the same                            as on a CPU
    layer_norm (16-bit inputs)    statistics in the input's type      statistics in float32           twice the bytes

Checked in torch's source and dispatch tables (2.11, 2.13, 2.14). Not translated: autocast (its lists differ between
devices; cast the model instead), in-place dropout, convolutions, tensors of DTensor, kernels of other libraries.
Nothing here was compared with a real GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lowtide.prediction import Device
from lowtide.tracing._attention import AttentionCall, Kernel, choose_attention

aten = torch.ops.aten


class AsOnTarget(TorchFunctionMode):
    """Runs the target's operators in place of the CPU's, for fake CPU tensors; on a CPU target it changes nothing."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.instead_of: str | None = None
        """What a CPU would run, while a translated call runs."""
        self.assumptions: dict[str, None] = {}
        table: dict[Any, Callable[..., Any]] = {}
        if device.kind != "cpu":
            table = {
                F.scaled_dot_product_attention: self._attention,
                F.dropout: self._dropout,
                torch.dropout: self._dropout,
                F.rms_norm: self._rms_norm,
                torch.rms_norm: self._rms_norm,
            }
        self._table = table

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        translated = self._table.get(func)
        if translated is None or any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        # torch calls the first argument `input`, or `query`.
        first = [named.pop("input")] if "input" in named else []
        return translated(func, *first, *args, **named)

    @contextmanager
    def translating(self) -> Generator[None]:
        """Translate until the context ends, in backward too, where regions run their forward again.

        torch takes a function mode away while a function that it caught runs, and backward is one; its engine is where
        the mode comes back (torch 2.11 to 2.14).
        """
        original = torch.autograd._engine_run_backward  # pyright: ignore[reportAttributeAccessIssue]

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with self:
                return original(*args, **kwargs)

        torch.autograd._engine_run_backward = run_backward  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with self:
                yield
        finally:
            torch.autograd._engine_run_backward = original  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def _standing_for(self, name: str) -> Generator[None]:
        before, self.instead_of = self.instead_of, name
        try:
            yield
        finally:
            self.instead_of = before

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = AttentionCall(
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            dtype=str(query.dtype).removeprefix("torch."),
            mask=attn_mask is not None,
            mask_needs_grad=attn_mask is not None and attn_mask.requires_grad,
            dropout=dropout_p,
            causal=is_causal,
            grouped=enable_gqa,
            needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        kernel, why = choose_attention(call, self.device)
        self._note(kernel, why)
        on_cpu = "cpu_flash" if not _cpu_needs_math(call, self.device) else "math"
        if kernel == "math":
            with self._standing_for("" if on_cpu == "math" else _CPU_FLASH), sdpa_kernel([SDPBackend.MATH]):
                return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        with self._standing_for(_CPU_FLASH if on_cpu == "cpu_flash" else "aten._scaled_dot_product_attention_math"):
            return _RUNNERS[kernel](query, key, value, attn_mask, dropout_p, is_causal, scale, call.needs_grad)

    def _note(self, kernel: Kernel, why: str) -> None:
        text = f"attention on {self.device.name} runs the {kernel} kernel"
        self.assumptions[f"{text} ({why})" if why else text] = None

    def _dropout(self, func: Any, x: Tensor, p: float = 0.5, training: bool = True, *rest: Any, **kw: Any) -> Any:
        inplace = bool(rest and rest[0]) or bool(kw.get("inplace"))
        training = bool(kw.get("train", training))
        if inplace or not training or not 0 < p < 1 or x.numel() == 0:
            return func(x, p, training, *rest, **{k: v for k, v in kw.items() if k != "train"})
        with self._standing_for("aten.bernoulli_.float"):
            return aten.native_dropout.default(x, p, True)[0]

    def _rms_norm(
        self,
        func: Any,
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        other_type = weight is not None and weight.dtype != x.dtype
        if other_type or x.is_complex() or self.device.kind == "rocm":
            if self.device.kind == "rocm":
                self.assumptions["rms_norm on AMD is taken to run the composite, as on a CPU"] = None
            return func(x, normalized_shape, weight, eps)
        with self._standing_for("aten.rms_norm (pow, mean, rsqrt, mul)"):
            return _FusedRmsNorm.apply(x, weight, list(normalized_shape), eps)

    def result_of(self, func: Any, result: Any) -> Any:
        """Return what the target's kernel would have returned where a CPU's differs only in type."""
        if func is not aten.native_layer_norm.default or self.device.kind == "cpu" or result[0].dtype not in _LOW:
            return result
        out, mean, rstd = result
        return out, mean.to(torch.float32), rstd.to(torch.float32)


_LOW = (torch.float16, torch.bfloat16)
_CPU_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def _cpu_needs_math(call: AttentionCall, device: Device) -> bool:
    return choose_attention(call, Device("cpu", "cpu"))[0] == "math"


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, grad: bool
) -> Tensor:
    width = q.shape[-1]
    padded = -width % 8
    if padded:
        q, k, v = (F.pad(t, (0, padded)) for t in (q, k, v))
    scale = 1 / math.sqrt(width) if scale is None else scale
    out = aten._scaled_dot_product_flash_attention.default(q, k, v, p, causal, False, scale=scale)[0]
    return out[..., :width] if padded else out


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, grad: bool
) -> Tensor:
    if mask is not None:
        mask = _aligned(_additive(mask, q), q, k)
    return aten._scaled_dot_product_efficient_attention.default(q, k, v, mask, grad, p, causal, scale=scale)[0]


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, grad: bool
) -> Tensor:
    if mask is not None:
        mask = _additive(mask, q).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return aten._scaled_dot_product_cudnn_attention.default(q, k, v, mask, grad, p, causal, False, scale=scale)[0]


_RUNNERS: dict[str, Callable[..., Tensor]] = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """A mask of bools becomes one that is added, in the type of the queries."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -math.inf, dtype=query.dtype, device=mask.device))


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The efficient kernel reads rows of 16 bytes: others are padded and cut back."""
    length = mask.shape[-1]
    padded = -length % 16
    if padded and length != 1:
        mask = F.pad(mask, (0, padded))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _FusedRmsNorm(torch.autograd.Function):
    """The GPU's operator with its own derivative; on a CPU the dispatcher would take it apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, shape: list[int], eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1]]
        with torch._C._AutoDispatchBelowAutograd():
            d_input, d_weight = aten._fused_rms_norm_backward.default(
                grads[0].contiguous(), x, ctx.shape, rstd, weight, mask
            )
        return d_input, d_weight, None, None
