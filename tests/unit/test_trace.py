"""A trace says what a block would do, on any device, without doing it."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.errors import RefusedError, UserError
from lowtide.measurement import measure_saved_bytes
from lowtide.records import OpTrace
from tests.helpers import families, models
from tests.helpers.models import Spec


def small(**changes):
    return models.Block(Spec(d=64, hidden=96, **changes)).train()


def hidden(dtype=torch.float32, d=64):
    return torch.randn(2, 16, d, dtype=dtype, requires_grad=True)


def ops(trace, name, phase=None):
    return [op for op in trace.ops if name in op.op and phase in (None, op.phase)]


def measured_saved(block, x):
    """What forward really keeps, without the argument itself."""
    return measure_saved_bytes(block, lambda: block(x), {}).total_bytes


@pytest.mark.parametrize("attention", ["sdpa", "plain"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_those_of_a_real_forward(attention, dropout, dtype):
    block = small(attention=attention, dropout=dropout).to(dtype)
    trace = lowtide.trace(block, (hidden(dtype),), device="cpu")
    assert trace.saved_bytes == measured_saved(block, hidden(dtype))


def test_saved_bytes_of_hugging_face_blocks_are_those_of_a_real_forward():
    for family in ("gpt2", "llama"):
        block = families.blocks(families.build(family))[0]
        x = hidden(d=32)
        kwargs = {}
        if family == "llama":
            kwargs = {"position_embeddings": (torch.randn(1, 16, 8), torch.randn(1, 16, 8))}
        trace = lowtide.trace(block, (x,), kwargs, device="cpu")
        given = [x, *kwargs.get("position_embeddings", ())]
        block(x, **kwargs)
        real = measure_saved_bytes(block, lambda x=x, kwargs=kwargs, block=block: block(x, **kwargs), {}).total_bytes
        assert trace.saved_bytes == real, (family, len(given))


def test_a_module_on_meta_or_made_under_fake_tensors_gives_the_same_trace():
    real = lowtide.trace(small(), (hidden(),), device="H100")
    with torch.device("meta"):
        meta = small()
    assert lowtide.trace(meta, (torch.empty(2, 16, 64, device="meta", requires_grad=True),), device="H100") == real
    with FakeTensorMode():
        fake, x = small(), hidden()
    assert lowtide.trace(fake, (x,), device="H100") == real
    assert OpTrace.from_json(real.to_json()) == real


def test_a_huge_block_costs_nothing():
    with torch.device("meta"):
        block = nn.Sequential(nn.Linear(16384, 53248, bias=False), nn.SiLU(), nn.Linear(53248, 16384, bias=False))
    trace = lowtide.trace(block, (torch.empty(1, 8192, 16384, device="meta", dtype=torch.float32),), device="B200")
    # Saved: what silu reads and what it gives, for the second product.
    assert trace.saved_bytes == 2 * 8192 * 53248 * 4
    assert trace.input_bytes == 8192 * 16384 * 4
    forward = 2 * 2 * 8192 * 16384 * 53248 + 8192 * 53248
    assert trace.flops("forward") == forward
    assert trace.flops("backward") == 2 * 2 * 2 * 8192 * 16384 * 53248 + 8192 * 53248


def test_the_module_is_left_alone():
    block, x = small(), hidden()
    before = {name: (id(p), p.data_ptr(), p._version) for name, p in block.named_parameters()}
    lowtide.trace(block, (x,), device="A100")
    assert {name: (id(p), p.data_ptr(), p._version) for name, p in block.named_parameters()} == before
    assert all(p.grad is None for p in block.parameters())
    assert x.grad is None
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_random_state_is_left_alone():
    block, x = small(dropout=0.3), hidden()
    torch.manual_seed(3)
    lowtide.trace(block, (x,), device="cpu")
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


def test_operators_know_their_modules_their_forward_and_their_storages():
    trace = lowtide.trace(small(), (hidden(),), device="cpu")
    products = ops(trace, "aten.mm", "forward")
    assert [op.module for op in products] == [
        *(f"attention.{name}" for name in "qkvo"), "feed.gate", "feed.up", "feed.down",
    ]  # fmt: skip
    backward = ops(trace, "aten.mm", "backward")
    assert len(backward) == 2 * len(products)
    assert {op.forward_op for op in backward} == {op.index for op in products}
    assert all(op.module == trace.ops[op.forward_op].module for op in backward)
    weight = next(s for s in trace.storages if s.name == "attention.q.weight")
    assert weight.role == "parameter"
    assert any(t.storage == weight.id for t in products[0].inputs)
    for op in trace.ops:
        if op.view:
            assert op.bytes_moved == op.flops == 0
            assert {t.storage for t in op.outputs} <= {t.storage for t in op.inputs}
    silu = ops(trace, "silu.default")[0]
    assert trace.storages[silu.outputs[0].storage].made_by == silu.index


class Writes(nn.Module):
    def forward(self, x):
        y = x * 2
        y[:, 0].add_(1)
        return y.relu_() + torch.rand_like(y)


def test_writes_in_place_and_random_operators_are_marked():
    trace = lowtide.trace(Writes(), (hidden(),), device="cpu")
    made = ops(trace, "aten.mul")[0].outputs[0].storage
    assert [op.writes for op in ops(trace, "add_") + ops(trace, "relu_")] == [(made,), (made,)]
    assert [op.op for op in trace.ops if op.random] == ["aten.rand_like.default"]


class Hides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.hidden = x.exp()
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.hidden


class Hiding(nn.Module):
    def forward(self, x):
        return Hides.apply(x)


def test_what_a_custom_function_keeps_on_its_context_counts_and_is_named():
    trace = lowtide.trace(Hiding(), (hidden(),), device="cpu")
    assert trace.saved_bytes == 2 * 16 * 64 * 4
    assert any("aten.exp.default stay alive" in text for text in trace.assumptions)


class Routes(nn.Module):
    def forward(self, x):
        return x[x > 0].sum()


def test_a_forward_that_depends_on_values_is_an_error_that_says_so():
    with pytest.raises(UserError, match="Routes cannot be traced: its forward depends on the values"):
        lowtide.trace(Routes(), (hidden(),), device="cpu")


def test_an_applied_policy_is_refused():
    model = models.build(Spec())
    lowtide.apply(model, lowtide.Full())
    with pytest.raises(RefusedError, match=r"layers\.0 has a policy applied"):
        lowtide.trace(model, (models.tokens(),), device="cpu")


@torch.library.custom_op("lowtide_test::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x):
    return torch.empty_like(x)


torch.library.register_autograd(
    "lowtide_test::cube",
    lambda ctx, grad: grad * 3,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Cubes(nn.Module):
    def forward(self, x):
        return cube(x)


def test_an_operator_without_a_formula_is_named_and_never_zero():
    trace = lowtide.trace(Cubes(), (hidden(),), device="cpu")
    found = ops(trace, "cube", "forward")
    assert [op.flops for op in found] == [None]
    assert any("lowtide_test.cube.default has no FLOP formula" in text for text in trace.assumptions)


def test_no_gradient_asked_for_means_the_first_argument_gets_one_and_it_is_said():
    trace = lowtide.trace(Writes(), (torch.randn(2, 16, 64),), device="cpu")
    assert trace.backward
    assert any("the first floating-point one" in text for text in trace.assumptions)


def test_unknown_devices_are_named_with_the_nearest():
    with pytest.raises(UserError, match=r"'H10'.*Did you mean 'H100'"):
        lowtide.trace(Writes(), (hidden(),), device="H10")


def test_tied_parameters_are_one_storage():
    block = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    block[1].weight = block[0].weight
    trace = lowtide.trace(block, (hidden(),), device="cpu")
    assert sum(s.role == "parameter" for s in trace.storages) == 1


def test_the_json_of_a_trace_is_plain():
    document = json.loads(lowtide.trace(small(), (hidden(),), device="L40S").to_json())
    assert document["kind"] == "OpTrace"
    assert document["device"] == "L40S"


def test_workspaces_of_the_cpu_attention_are_in_the_trace():
    trace = lowtide.trace(small(), (hidden(),), device="cpu")
    forward, backward = ops(trace, "flash_attention_for_cpu")
    # 16 queries by 16 keys, heads of 16: scores, row maxima and sums, a block of the output.
    assert forward.workspace_bytes == (16 * 16 + 2 * 16 + 16 * 16) * 4
    assert backward.workspace_bytes == (16 + 2 * 16 * 16) * 4


class Dropped(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.25, self.training)


def test_dropout_on_a_gpu_keeps_bools():
    cpu = lowtide.trace(Dropped(), (hidden(torch.bfloat16),), device="cpu")
    gpu = lowtide.trace(Dropped(), (hidden(torch.bfloat16),), device="H100")
    assert (cpu.saved_bytes, gpu.saved_bytes) == (2 * 2048, 2048)
    assert ops(gpu, "native_dropout.default")[0].instead_of == "aten.bernoulli_.float"
    assert ops(gpu, "native_dropout.default")[0].random


def test_storages_die_where_autograd_and_python_let_go_of_them():
    class Squares(nn.Module):
        def forward(self, x):
            once = x * x
            twice = once * once
            return twice.sum(-1)

    trace = lowtide.trace(Squares(), (torch.zeros(2, 4, requires_grad=True),), device="cpu")
    once, twice = (s for s in trace.storages if s.role == "made" and not s.backward and not s.returned)
    # sum needs no content, so the second product goes when forward's frame ends; the first one backward needs.
    assert [op.op for op in trace.forward] == ["aten.mul.Tensor", "aten.mul.Tensor", "aten.sum.dim_IntList"]
    assert (twice.freed, twice.released) == (3, 3)
    assert once.released == 3
    assert once.freed is not None
    assert once.freed > 3
    incoming = next(s for s in trace.storages if (s.name or "").startswith("gradient of result"))
    assert incoming.freed is not None


def test_what_is_packed_says_where_and_when_it_is_asked_for():
    block = small()
    trace = lowtide.trace(block, (hidden(),), device="cpu")
    assert len(trace.saved) == len(trace.saved_at) == len(trace.saved_in) == len(trace.asked_at)
    assert {"attention", "feed", "attention.q"} <= set(trace.saved_in)
    first_backward = trace.backward[0].index
    asked = [at for at in trace.asked_at if at is not None]
    assert min(asked) >= first_backward
    # Backward goes from the end to the start.
    assert trace.asked_at[0] is not None
    assert trace.asked_at[0] > min(asked)
