"""What planning reads from a trace: values, calls, what may be saved, what backward needs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.planning import evaluate, frontier_of, graph_of, keep_all

TOKENS = 2 * 16 * 32 * 4
"""Bytes of one activation below."""


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.function(self, x)


def traced(function):
    return lowtide.trace(Function(function).train(), (torch.randn(2, 16, 32, requires_grad=True),), device="H100")


def graph(function, **kwargs):
    trace = traced(function)
    return graph_of(trace, costs_ms=[1.0] * len(trace.ops), **kwargs)


def names(graph, indices):
    return [graph.by_index[i].op for i in indices]


def savable(graph, executor="replay"):
    return [c.op for c in graph.calls if graph.can_save(c, executor)]


def test_views_are_no_calls_and_storages_count_once():
    g = graph(lambda b, x: b.down(b.up(x).view(2, 16, 64).transpose(0, 1).exp().transpose(0, 1)))
    assert [c.op for c in g.calls] == ["aten.addmm.default", "aten.exp.default", "aten.addmm.default"]
    # exp keeps its result, the second product reads it: once.
    assert keep_all(g).saved_bytes == 2 * TOKENS
    assert [c.number for c in g.calls] == [0, 0, 1]


def test_recompute_ends_before_the_last_product():
    g = graph(lambda b, x: b.down(b.up(x).exp()))
    assert g.stop == 2
    assert evaluate(g, (), "recompute").recompute_ms == 2 + g.views_ns / 1e6
    assert evaluate(g, (), "replay").recompute_ms == 2
    # Saving what is never come to is not held.
    last = g.calls[-1].index
    assert evaluate(g, (last,), "recompute") == evaluate(g, (), "recompute")


def test_what_backward_never_needs_runs_again_under_recompute_only():
    g = graph(lambda b, x: b.down(b.up(x).tanh() + x.detach().cos().sum()))
    assert evaluate(g, (), "replay").recompute_ms == 5
    g = graph(lambda b, x: (x.detach().cos().sum(), b.down(b.up(x).tanh()))[1])
    assert evaluate(g, (), "replay").recompute_ms == 2
    assert evaluate(g, (), "recompute").recompute_ns - g.views_ns == 4_000_000


def test_a_saved_value_cuts_the_chain_above_it():
    g = graph(lambda b, x: b.down(b.up(x).sin().exp().cos()))
    exp = next(c.index for c in g.calls if c.op == "aten.exp.default")
    point = evaluate(g, (exp,), "replay")
    assert (point.saved_bytes, point.recompute_ms) == (2 * TOKENS, 2)
    # sin needs the product, which is not there: it runs, and so does cos.
    assert evaluate(g, (exp,), "recompute").recompute_ns - g.views_ns == 3_000_000


def test_what_is_written_in_place_cannot_be_saved_and_its_last_content_is_what_counts():
    g = graph(lambda b, x: b.down(F.relu_(b.up(x) * 2)))
    # relu_ overwrites the product by two; relu_ itself has no output of its own.
    assert savable(g) == savable(g, "recompute") == ["aten.addmm.default"] * 2
    assert keep_all(g).saved_bytes == 2 * TOKENS
    assert evaluate(g, (), "replay").recompute_ms == 3
    assert evaluate(g, (g.calls[0].index,), "replay").recompute_ms == 2


def test_a_block_that_overwrites_its_own_copy_of_an_argument():
    g = graph(lambda b, x: b.down(b.up(x.clone().add_(1)).tanh()))
    assert [c.op for c in g.calls] == ["aten.clone.default", "aten.add_.Tensor", "aten.addmm.default",
                                       "aten.tanh.default", "aten.addmm.default"]  # fmt: skip
    assert "aten.clone.default" not in savable(g)
    assert evaluate(g, (g.calls[2].index, g.calls[3].index), "replay").recompute_ms == 2


def test_outputs_go_together():
    def function(b, x):
        values, places = b.up(x).tanh().max(-1)
        return b.down((b.up(x) * values.exp()[..., None]).gather(-1, places[..., None].expand(2, 16, 64)))

    g = graph(function)
    largest = next(c for c in g.calls if c.op == "aten.max.dim")
    # A routing operator: saved by every policy, values and places.
    assert largest.forced
    assert len(largest.makes) == len(largest.savable) == 2
    assert largest.index not in evaluate(g, [c.index for c in g.calls], "replay").saves


def test_routing_is_never_decided_twice():
    def function(b, x):
        weights, places = torch.topk(b.up(x).softmax(-1), 2)
        return b.down(F.one_hot(places, 64).to(x.dtype).mul(weights[..., None]).sum(-2))

    g = graph(function)
    topk = next(c for c in g.calls if c.op == "aten.topk.default")
    held = sum(g.nbytes[v] for v in topk.makes)
    assert evaluate(g, (), "replay").saved_bytes == evaluate(g, (), "recompute").saved_bytes == held
    assert all(topk.index not in p.saves for p in frontier_of(g, "replay").points)


def test_random_operators_may_run_again():
    g = graph(lambda b, x: b.down(F.dropout(b.up(x), 0.5)))
    (dropout,) = [c for c in g.calls if "dropout" in c.op]
    assert evaluate(g, (), "replay").recompute_ms == 2
    # The product's result is needed by dropout alone.
    point = evaluate(g, (dropout.index,), "replay")
    assert (point.recompute_ms, point.saved_bytes) == (0, 2 * 16 * 64 * (4 + 1))


def test_what_the_block_returns_is_held_by_what_comes_next():
    g = graph(lambda b, x: b.down(b.up(x).tanh()).tanh())
    tanh = g.calls[-1]
    assert tanh.op == "aten.tanh.default"
    assert evaluate(g, (tanh.index,), "replay").saved_bytes == 0
    # Free, so the smallest choice has it.
    assert tanh.index in frontier_of(g, "replay").points[0].saves


def test_arguments_are_there_anyway_or_count():
    trace = traced(lambda b, x: b.down(b.up(x).tanh()))
    argument = next(s.id for s in trace.storages if s.role == "argument" and s.name == "0")
    free, counted = graph_of(trace), graph_of(trace, counted=[argument])
    assert keep_all(free).held_bytes == 2 * TOKENS
    assert keep_all(counted).held_bytes == 2 * TOKENS + TOKENS
    assert evaluate(counted, (), "replay").input_bytes == evaluate(counted, (), "recompute").input_bytes == TOKENS


def test_buffers_written_by_the_block_are_read_for_free():
    g = graph(lambda b, x: b.down(b.up(b.norm(x)).tanh()))
    norm = next(c for c in g.calls if "batch_norm" in c.op)
    assert {c.op for c in g.calls if c.index not in (norm.index,)} >= {"aten.addmm.default", "aten.tanh.default"}
    point = evaluate(g, (), "replay")
    assert point.recompute_ms == sum(1 for c in g.calls if c.index >= norm.index) - 1


class Hides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.hidden = x.exp()
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.hidden


def test_what_python_holds_stays_whatever_is_chosen():
    g = graph(lambda b, x: b.down(Hides.apply(b.up(x)).tanh()))
    assert g.pinned_bytes == 2 * TOKENS
    assert {p.saved_bytes for p in frontier_of(g, "replay").points} >= {2 * TOKENS}


@pytest.mark.parametrize("device", ["H100", "cpu"])
def test_costs_are_those_of_the_device(device):
    trace = lowtide.trace(nn.Linear(32, 64), (torch.randn(4, 32),), device=device)
    from lowtide.prediction import op_ms

    (call,) = graph_of(trace).calls
    assert call.cost_ns == round(op_ms(trace.ops[call.index], device) * 1e6)
