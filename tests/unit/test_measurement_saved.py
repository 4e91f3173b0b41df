"""Saved bytes by block, counted by live storages: exact against arithmetic, equal on real and fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lowtide.errors import UserError
from lowtide.measurement import SavedMeasurement, measure_saved_bytes
from lowtide.tracing import fake_building
from tests.helpers import models


class Exp(nn.Module):
    """Saves its result (exp) and the result of that (sin saves its input)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().sin()


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module, shared: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.shared = shared
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0  # made here: the caller holds its own input anyway
        for block in self.blocks:
            x = block(x)
        return x


def _names(model: Stack) -> list[str]:
    return [f"blocks.{i}" for i in range(len(model.blocks))]


def _rows(measured: SavedMeasurement) -> list[int]:
    return [block.saved_bytes for block in measured.blocks]


def _input() -> Tensor:
    return torch.zeros(1000, requires_grad=True)


def test_each_storage_counts_for_the_block_that_keeps_it() -> None:
    model, x = Stack(Exp(), Exp(), Exp()), _input()
    measured = measure_saved_bytes(model, lambda: model(x), _names(model))
    # exp saves its result, which is what sin saves as its input: one storage. Results of blocks are not kept.
    assert _rows(measured) == [4000, 4000, 4000]
    assert (measured.rest_bytes, measured.total_bytes) == (0, 12000)


def test_a_checkpointed_block_keeps_its_input_only() -> None:
    class Region(Exp):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model, x = Stack(Exp(), Region(), Exp()), _input()
    measured = measure_saved_bytes(model, lambda: model(x), _names(model))
    assert _rows(measured) == [4000, 4000, 4000]
    model = Stack(Region(), Region())
    measured = measure_saved_bytes(model, lambda: model(x), _names(model))
    assert _rows(measured) == [4000, 4000]


def test_what_the_caller_holds_anyway_is_not_saved() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()  # saves its own result

    model, x = Stack(Square(), Square()), _input()
    held = measure_saved_bytes(model, lambda: model(x), _names(model))
    # The first result is the second block's input; the last is returned, so it lives without the graph too.
    assert (_rows(held), held.rest_bytes) == ([0, 4000], 0)
    loss = measure_saved_bytes(model, lambda: model(x).sum(), _names(model))
    # Now only the graph holds the last result, and it is read outside of the blocks.
    assert (_rows(loss), loss.rest_bytes) == ([0, 4000], 4000)


def test_what_a_model_stores_without_graph_is_not_saved() -> None:
    class Storing(Exp):
        def forward(self, x: Tensor) -> Tensor:
            self.cache = torch.ones(500)
            self.last = x.exp().detach()
            return super().forward(x)

    model, x = Stack(Storing(), Storing()), _input()
    measured = measure_saved_bytes(model, lambda: model(x), _names(model))
    assert _rows(measured) == [4000, 4000]
    assert measured.rest_bytes == 0


def test_inputs_of_several_blocks_count_for_none() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, table: Tensor) -> Tensor:
            return x * table

    class Rope(Stack):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.arange(1000.0)
            for block in self.blocks:
                x = block(x, table=table)
            return x

    model, x = Rope(Scaled(), Scaled()), _input()
    measured = measure_saved_bytes(model, lambda: model(x), _names(model))
    # mul saves the table in both; x needs no saving, since the table needs no gradient.
    assert (_rows(measured), measured.rest_bytes) == ([0, 0], 4000)


def test_contexts_of_custom_functions_count() -> None:
    class Stash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.copy = x.clone()  # past save_for_backward
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.copy

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Stash.apply(x)

    model, x = Stack(Block(), Block()), _input()
    assert _rows(measure_saved_bytes(model, lambda: model(x), _names(model))) == [4000, 4000]


def test_nothing_is_saved_without_gradients_and_hooks_are_gone() -> None:
    model, x = Stack(Exp(), Exp()), _input()
    with torch.no_grad():
        measured = measure_saved_bytes(model, lambda: model(x), _names(model))
    assert measured.total_bytes == 0
    assert all(not b._forward_hooks and not b._forward_pre_hooks for b in model.blocks)


def test_the_graph_still_works_for_whom_forward_gave_it_to() -> None:
    model, x = Stack(Exp()), _input()
    kept: list[Tensor] = []

    def forward() -> Tensor:
        kept.append(model(x).sum())
        return kept[0]

    # Somebody holds the graph: nothing dies, so nothing counts; and it is unharmed.
    assert measure_saved_bytes(model, forward, _names(model)).total_bytes == 0
    kept[0].backward()
    assert torch.equal(x.grad, torch.ones(1).exp().mul(0).add(torch.ones(1).cos()).expand(1000))


def test_attention_block_arithmetic() -> None:
    """One linear projection: its input and weight; the weight is alive anyway."""
    model = Stack(nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False)))
    x = torch.zeros(8, 16)
    measured = measure_saved_bytes(model, lambda: model(x), ["blocks.0"])
    # x * 1.0 (input of the first projection), its result (for gelu), gelu's result (input of the second).
    assert _rows(measured) == [4 * 8 * (16 + 32 + 32)]


def test_names_and_compiled_code_are_checked() -> None:
    model, x = Stack(Exp(), Exp()), _input()
    with pytest.raises(UserError, match=r"'blocks.7' is no module of Stack; nearest names: .*blocks\.0"):
        measure_saved_bytes(model, lambda: model(x), ["blocks.7"])
    model.blocks[1].compile(backend="eager")
    with pytest.raises(UserError, match=r"blocks\.1 is compiled"):
        measure_saved_bytes(model, lambda: model(x), _names(model))


def _measure(spec: models.Spec) -> SavedMeasurement:
    model, tokens = models.build(spec), torch.zeros(spec.batch, spec.length, dtype=torch.int64)
    names = {f"layers.{i}": block for i, block in enumerate(model.blocks())}
    return measure_saved_bytes(model, lambda: models.loss_of(model(tokens), tokens), names)


@pytest.mark.parametrize(
    "spec",
    [
        models.Spec(),
        models.Spec(attention="plain", dropout=0.1, bias=True),
        models.Spec(table="buffer", arguments="kwargs"),
        models.Spec(arguments="dict", outputs="tensor"),
        models.Spec(outputs="dataclass", batch_norm=True),
    ],
    ids=["decoder", "plain attention, dropout, bias", "kwargs", "dict", "batch norm"],
)
def test_fake_and_real_tensors_give_the_same_bytes(spec: models.Spec) -> None:
    real = _measure(spec)
    with FakeTensorMode() as mode, fake_building(mode):
        fake = _measure(spec)
    assert fake == real
    assert real.total_bytes > 0
    rows = _rows(real)
    assert min(rows) > spec.batch * spec.length * spec.d * 4
    assert len(set(rows)) == 1, "equal blocks keep equal bytes"


def test_bf16_keeps_half_but_what_is_computed_in_float32() -> None:
    wide, narrow = _measure(models.Spec()), _measure(models.Spec(dtype=torch.bfloat16))
    assert 0.5 <= _rows(narrow)[0] / _rows(wide)[0] < 0.75


def test_functional_models_have_only_a_rest() -> None:
    model, x = nn.Linear(4, 4, bias=False), torch.zeros(2, 4)
    measured = measure_saved_bytes(model, lambda: F.relu(model(x * 1.0)).sum(), [])
    assert (measured.blocks, measured.rest_bytes) == ((), 2 * 4 * 4 * 2)
