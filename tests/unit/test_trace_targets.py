"""The table from CPU to target: which kernels, which saved tensors; from torch's source, without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.prediction import DEVICES, Device
from lowtide.tracing import AttentionCall, choose_attention


def call(width=64, dtype="bfloat16", tokens=128, **fields):
    shape = (2, 8, tokens, width)
    return AttentionCall(query=shape, key=shape, value=shape, dtype=dtype, **fields)


@pytest.mark.parametrize(
    ("device", "fields", "kernel"),
    [
        ("cpu", {}, "cpu_flash"),
        ("cpu", {"dtype": "float32", "mask": True}, "cpu_flash"),
        ("cpu", {"dropout": 0.1}, "math"),
        ("cpu", {"mask": True, "mask_needs_grad": True}, "math"),
        ("A100", {}, "flash"),
        ("A100", {"dropout": 0.1}, "flash"),
        ("A100", {"mask": True}, "efficient"),
        ("A100", {"dtype": "float32"}, "efficient"),
        ("A100", {"dtype": "float32", "width": 66}, "math"),
        ("A100", {"dtype": "float64"}, "math"),
        ("A100", {"width": 256}, "flash"),
        ("A100", {"width": 264}, "efficient"),
        ("A100", {"width": 100}, "flash"),
        ("A100", {"width": 100, "mask": True}, "math"),
        ("H100", {}, "cudnn"),
        ("H100", {"dropout": 0.125}, "cudnn"),
        ("H100", {"dropout": 0.1}, "flash"),
        ("H100", {"mask": True}, "cudnn"),
        ("H100", {"mask": True, "mask_needs_grad": True}, "efficient"),
        ("H100", {"width": 192}, "flash"),
        ("H100", {"deterministic": True}, "flash"),
        ("H100", {"dtype": "float32"}, "efficient"),
        ("B200", {}, "cudnn"),
        ("RTX4090", {"width": 192}, "flash"),
        ("RTX4090", {"width": 224}, "efficient"),
        ("RTX4090", {"width": 224, "needs_grad": False}, "flash"),
        ("RTX4090", {"width": 256}, "flash"),
        ("RTX4090", {"width": 256, "dropout": 0.1}, "efficient"),
        ("MI300X", {}, "flash"),
    ],
)
def test_the_attention_kernel(device, fields, kernel):
    found, reason = choose_attention(call(**fields), DEVICES[device if device != "A100" else "A100-80GB"])
    assert found == kernel, reason


@pytest.mark.parametrize(("dtype", "kernel"), [("float32", "math"), ("bfloat16", "cudnn")])
def test_grouped_queries_are_not_for_the_efficient_kernel(dtype, kernel):
    query, key = (2, 8, 16, 64), (2, 2, 16, 64)
    one = AttentionCall(query=query, key=key, value=key, dtype=dtype, grouped=True)
    assert choose_attention(one, DEVICES["H100"])[0] == kernel


def test_causal_attention_over_a_longer_past_is_not_for_flash():
    shape, longer = (2, 8, 16, 64), (2, 8, 64, 64)
    one = AttentionCall(query=shape, key=longer, value=longer, dtype="bfloat16", causal=True)
    assert choose_attention(one, DEVICES["A100-80GB"])[0] == "efficient"


def test_a_device_before_ampere_has_no_flash():
    turing = Device("T4", "cuda", (7, 5))
    kernel, reason = choose_attention(call(dtype="float16"), turing)
    assert kernel == "efficient"
    assert "compute capability 8.0" in reason


class Attend(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def attend(device, *, dtype=torch.bfloat16, heads=4, kv_heads=4, width=64, mask=None, **options):
    shapes = [(2, heads, 32, width), (2, kv_heads, 32, width), (2, kv_heads, 32, width)]
    qkv = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return lowtide.trace(Attend(**options), (*qkv, mask), device=device)


def kernels(trace):
    return [op.op.removeprefix("aten._scaled_dot_product_") for op in trace.ops if "scaled_dot" in op.op]


OUT, STATS = 2 * 4 * 32 * 64, 2 * 4 * 32 * 4


@pytest.mark.parametrize(
    ("device", "options", "expected", "saved"),
    [
        # What each kernel keeps besides its arguments: output, logsumexp, and its seeds.
        ("cpu", {}, "flash_attention_for_cpu", OUT * 2 + STATS),
        ("A100", {}, "flash_attention", OUT * 2 + STATS + 16 + 8),
        ("A100", {"dtype": torch.float32}, "efficient_attention", OUT * 4 + STATS + 8 + 8),
        ("H100", {}, "cudnn_attention", OUT * 2 + STATS + 8 + 8),
        ("A100", {"kv_heads": 2, "enable_gqa": True}, "flash_attention", OUT * 2 + STATS + 16 + 8),
    ],
)
def test_the_attention_operator_stands_in_the_trace_with_what_it_saves(device, options, expected, saved):
    trace = attend(device, is_causal=True, **options)
    assert kernels(trace) == [f"{expected}.default", f"{expected}_backward.default"]
    assert trace.saved_bytes == saved
    assert trace.flops("forward") == 2 * 2 * 2 * 4 * 32 * 32 * 64
    assert trace.flops("backward") == 5 * 2 * 2 * 4 * 32 * 32 * 64


def test_dropout_turns_the_cpu_to_math_and_the_gpu_stays_fused():
    assert kernels(attend("cpu", dropout_p=0.1)) == []
    gpu = attend("A100", dropout_p=0.1)
    assert kernels(gpu) == ["flash_attention.default", "flash_attention_backward.default"]
    assert next(op for op in gpu.ops if "scaled_dot" in op.op).instead_of == "aten._scaled_dot_product_attention_math"
    assert gpu.saved_bytes < attend("cpu", dropout_p=0.1).saved_bytes


def test_a_mask_of_bools_becomes_one_that_is_added():
    mask = torch.ones(32, 32, dtype=torch.bool).tril()
    trace = attend("A100", mask=mask)
    assert kernels(trace)[0] == "efficient_attention.default"
    assert any(op.op == "aten.where.ScalarOther" or op.op.startswith("aten.where") for op in trace.ops)


def test_head_sizes_that_flash_cannot_read_are_padded():
    trace = attend("A100", width=60)
    assert sum("constant_pad_nd" in op.op for op in trace.forward) == 3
    assert kernels(trace)[0] == "flash_attention.default"


@pytest.mark.parametrize(
    ("device", "weight", "fused"), [("cpu", None, False), ("H100", None, True), ("H100", torch.float32, False)]
)
def test_rms_norm_is_one_operator_on_cuda_unless_types_differ(device, weight, fused):
    norm = nn.RMSNorm(64, dtype=weight or torch.bfloat16)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    trace = lowtide.trace(norm, (x,), device=device)
    assert [op.op for op in trace.ops if "rms" in op.op] == (
        ["aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"] if fused else []
    )
    if fused:
        assert trace.saved_bytes == 2 * 16 * 4


def test_layer_norm_keeps_its_statistics_in_float32_on_cuda():
    norm = nn.LayerNorm(64, dtype=torch.bfloat16)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    assert lowtide.trace(norm, (x,), device="cpu").saved_bytes == 2 * 2 * 16 * 2
    assert lowtide.trace(norm, (x,), device="H100").saved_bytes == 2 * 2 * 16 * 4


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 1.0}, {"inplace": True}, {"training": False}])
def test_dropout_that_is_none_stays_what_it_is(options):
    class Drop(nn.Module):
        def forward(self, x):
            return F.dropout(x * 2, **{"p": 0.5, **options})

    x = torch.randn(4, 8, requires_grad=True)
    trace = lowtide.trace(Drop(), (x,), device="H100")
    assert not any("native_dropout" in op.op for op in trace.ops)


def test_torch_has_the_operators_of_the_table():
    for name in ("_fused_rms_norm", "native_dropout", "_scaled_dot_product_cudnn_attention", "native_layer_norm"):
        assert hasattr(torch.ops.aten, name)
        assert hasattr(torch.ops.aten, f"{name}_backward")
