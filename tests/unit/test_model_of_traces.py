"""The model of traces against the whole fake step, policy by policy, and its sums by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from benchmarks.estimate.grid import MODELS, POLICIES, PRECISIONS, PROCESSES, SHAPES, Cell
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.errors import UserError
from lowtide.policy import Block, SelectiveOp, parse_policy, resolve
from lowtide.prediction import BlockCall, BlockCost, RegionChoice, StepOutline, block_cost, predict_step, regions_of
from lowtide.prediction._outline import OutlineChange
from lowtide.tracing import trace_block, trace_outline
from lowtide.training.estimate import estimate_config
from lowtide.training.predict import outline_config, predict_policy
from tests.helpers import models
from tests.unit.test_prediction_time import ENVIRONMENT

MORE = {
    "full by replay": {"kind": "full", "executor": "replay"},
    "selective_op by replay": {**POLICIES["selective_op"], "executor": "replay"},
    "half of the layers": {"kind": "some_layers", "checkpoint": "1/2"},
    "MLP only": {"kind": "rules", "default": "save", "rules": [{"modules": ["mlp"], "action": "recompute"}]},
    "all but products": {"kind": "rules", "default": "recompute", "rules": [{"op": "matmul", "action": "save"}]},
}
POLICIES_HERE = {**POLICIES, **MORE}
QUICK = [
    ("decoder", "4x128", "fp32", 1, 1, ("none", "full", "selective_op", "MLP only", "selective_op by replay")),
    ("gpt2", "2x512", "bf16 mixed", 2, 2, ("selective_op", "every second")),
]


@functools.cache
def outlined(model: str, shape: str, precision: str, processes: int, accumulation: int):
    cell = Cell(model, "none", *SHAPES[shape], precision, processes, accumulation)
    return cell.config(), outline_config(cell.config(), world_size=processes)


def agrees(model, shape, precision, processes, accumulation, policy):
    config, parts = outlined(model, shape, precision, processes, accumulation)
    predicted = predict_policy(parts, POLICIES_HERE[policy])
    found = config.model_copy(update={"policy": parse_policy(POLICIES_HERE[policy])})
    whole = estimate_config(found, world_size=processes)
    assert abs(predicted.peak_bytes - whole.peak_bytes) <= 0.01 * whole.peak_bytes
    assert predicted.peak_phase == whole.peak_phase
    assert predicted.at_peak.parameters == whole.at_peak.parameters
    assert predicted.at_peak.optimizer_state == whole.at_peak.optimizer_state
    assert predicted.time.hardware_flops == pytest.approx(whole.time.hardware_flops, rel=1e-3)
    assert predicted.step_ms == pytest.approx(whole.step_ms, rel=0.05)


@pytest.mark.parametrize(("cell", "policy"), [(c[:5], policy) for c in QUICK for policy in c[5]], ids=str)
def test_it_agrees_with_the_whole_fake_step(cell, policy):
    agrees(*cell, policy)


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES_HERE)
@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", [m for m in MODELS if m in ("decoder", "llama", "gpt2")])
def test_it_agrees_everywhere(model, shape, precision, processes, policy):
    agrees(model, shape, precision, processes, 1, policy)


def test_alike_blocks_are_traced_once_whatever_their_number():
    config, parts = outlined("decoder", "4x128", "fp32", 1, 1)
    assert len(parts.outlined.outline.calls) == config.model.layers == 4
    assert list(parts.outlined.traces) == ["0"]


def test_an_outline_survives_json():
    _, parts = outlined("decoder", "4x128", "fp32", 1, 1)
    outline = parts.outlined.outline
    assert StepOutline.from_json(outline.to_json()) == outline


def outline(changes, calls):
    """(storage, delta) with a phase each; blocks by places."""
    storages = 1 + max(storage for storage, _, _ in changes)
    return StepOutline(
        categories=("parameters", *["transient"] * (storages - 1)),
        changes=tuple(OutlineChange(storage=s, delta=d, phase=p, module="", op="op") for s, d, p in changes),
        calls=calls,
        device="cpu",
        world_size=1,
        rank=0,
        environment=ENVIRONMENT,
    )


def two_blocks():
    changes = [
        (0, 100, "forward"),
        (1, 10, "forward"),  # input of block a
        (2, 10, "forward"),  # made by a
        (1, -10, "forward"),
        (3, 10, "forward"),  # made by b
        (2, -10, "forward"),
        (4, 5, "backward"),  # gradient of b's input
        (5, 5, "backward"),  # gradient of a's input
    ]
    calls = (
        BlockCall(block="a", kind="k", forward=(2, 3), backward=(7, 8), arguments=(("0", 1),)),
        BlockCall(block="b", kind="k", forward=(4, 5), backward=(6, 7), arguments=(("0", 2),)),
    )
    return outline(changes, calls)


def test_the_step_is_the_sum_of_its_parts():
    cost = BlockCost(saved_bytes=40, forward_bytes=60, backward_bytes=70, saved_at_peak_bytes=30, holds=frozenset("0"))
    found = predict_step(two_blocks(), [cost, cost])
    # Before b's backward: parameters, both inputs (held by the blocks), b's result, a's saved bytes; b's rise on top.
    assert found.peak_bytes == 100 + 10 + 10 + 10 + 40 + 70
    assert (found.peak_phase, found.peak_module) == ("backward", "b")
    assert found.at_peak.saved_activations == 10 + 10 + 40 + 30
    assert found.category_peaks.parameters == 100
    assert found.method == "model of traces"


def test_what_no_block_holds_goes_when_the_model_lets_go_of_it():
    cost = BlockCost(saved_bytes=40, forward_bytes=60, backward_bytes=70)
    assert predict_step(two_blocks(), {"a": cost, "b": cost}).peak_bytes == 100 + 10 + 40 + 70


def test_a_block_can_peak_in_forward():
    low, high = (BlockCost(saved_bytes=0, forward_bytes=f, backward_bytes=1) for f in (1, 500))
    found = predict_step(two_blocks(), {"a": low, "b": high})
    assert (found.peak_phase, found.peak_module, found.peak_bytes) == ("forward", "b", 100 + 10 + 500)


class Chain(nn.Module):
    """Four products of elements; backward needs the factors of each."""

    def forward(self, x):
        a = x.exp()
        b = a.exp()
        return b.exp()


def chain():
    return trace_block(Chain(), (torch.zeros(256, requires_grad=True),))


def test_a_region_holds_its_input_and_makes_the_rest_again():
    trace, nbytes = chain(), 256 * 4
    bare, full = block_cost(trace), block_cost(trace, [RegionChoice()])
    # exp needs its result: two are the block's own, the third is its result, which the outline counts.
    assert (bare.saved_bytes, bare.holds, bare.recompute_ms) == (2 * nbytes, frozenset(), 0)
    assert (full.saved_bytes, full.holds) == (0, frozenset("0"))
    assert full.recompute_ms == pytest.approx(full.forward_ms)
    one = block_cost(trace, [RegionChoice(saves=frozenset([0]))])
    assert one.saved_bytes == nbytes
    assert one.recompute_ms == pytest.approx(full.recompute_ms * 2 / 3)


def test_replay_runs_only_what_backward_asks_for():
    class Wasteful(Chain):
        def forward(self, x):
            return super().forward(x) + 1

    trace = trace_block(Wasteful(), (torch.zeros(256, requires_grad=True),))
    again, replay = (block_cost(trace, [RegionChoice(executor=executor)]) for executor in ("recompute", "replay"))
    assert replay.recompute_ms == again.recompute_ms < again.forward_ms
    saved = frozenset(op.index for op in trace.forward if op.op == "aten.add.Tensor")
    # The sum is needed by nobody, so saving it holds nothing.
    assert block_cost(trace, [RegionChoice(saves=saved, executor="replay")]).saved_bytes == 0


def test_rules_choose_operators_as_the_executors_do():
    trace = trace_block(models.Block(models.Spec()), (torch.zeros(2, 16, 32),))
    products = [op.index for op in trace.forward if op.op == "aten.mm.default"]
    assert len(products) == 7
    policy = SelectiveOp(save=[{"op": "matmul", "keep": "1/2"}])
    recipes = resolve(policy, [Block("layers.0", "layers", 0)]).regions
    (region,), said = regions_of(trace, recipes)
    assert region.saves == set(products[::2])
    assert (region.executor, said) == ("recompute", ())
    assert regions_of(trace, recipes, "replay")[0][0].executor == "replay"


def test_a_result_that_is_no_container_is_an_error_that_names_the_block():
    class Odd(models.Block):
        def forward(self, x):
            return models.BlockOutput(self.body(x))

    with FakeTensorMode():
        block = Odd(models.Spec())

        def step():
            block(torch.zeros(2, 16, 32)).hidden.sum().backward()

        with pytest.raises(UserError, match="block layer returns a BlockOutput"):
            trace_outline(step, model=block, blocks={"layer": block})
    assert "forward" not in vars(block)
