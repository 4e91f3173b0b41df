"""``keep: m/n`` counts anew in every call of a region: each layer saves the same set, whatever happened before."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from tests.helpers import models, ops
from tests.helpers.models import Spec

WEIGHTS = ("attention.q", "attention.k", "attention.v", "attention.o", "feed.gate", "feed.up", "feed.down")


class _WhichProducts(TorchDispatchMode):
    """Which projections a product belongs to, by the storage of its weight."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.names = {p.untyped_storage()._cdata: n for n, p in model.named_parameters()}
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[1].untyped_storage()._cdata in self.names:
            name = self.names[args[1].untyped_storage()._cdata].removesuffix(".weight")
            if args[1].shape == args[1].t().t().shape and args[1].stride(0) == 1:
                self.ran.append(name)
        return func(*args, **(kwargs or {}))


def _again(model: Any, loss: Tensor) -> dict[int, list[str]]:
    """By layer, the projections whose forward product runs in backward."""
    with _WhichProducts(model) as mode:
        loss.backward()
    found: dict[int, list[str]] = {i: [] for i in range(len(model.layers))}
    for name in mode.ran:
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            found[int(index)].append(rest)
    return found


def _loss(model: Any, step: int = 0) -> Tensor:
    tokens = models.tokens(step=step)
    return models.loss_of(model(tokens), tokens)


def _model(keep: str) -> Any:
    model = models.build(Spec(layers=3))
    lowtide.apply(model, lowtide.SelectiveOp(save=[{"op": "aten.mm", "keep": keep}]))
    return model


LEFT_OUT = {
    "1/2": ["attention.k", "attention.o", "feed.up"],
    "2/3": ["attention.v", "feed.up"],
    "1/3": ["attention.k", "attention.v", "feed.gate", "feed.up"],
}


@pytest.mark.parametrize("keep", LEFT_OUT)
def test_every_layer_leaves_out_the_same_products(keep):
    assert len(WEIGHTS) % 2 == 1, "an odd number of products: one counter for all layers would drift"
    model = _model(keep)
    for step in range(3):
        assert _again(model, _loss(model, step)) == dict.fromkeys(range(3), LEFT_OUT[keep])


def test_micro_batches_and_interleaved_forwards_do_not_shift_it():
    model = _model("1/2")
    first, second = _loss(model, 0), _loss(model, 1)
    assert _again(model, second) == dict.fromkeys(range(3), LEFT_OUT["1/2"])
    assert _again(model, first) == dict.fromkeys(range(3), LEFT_OUT["1/2"])


@pytest.mark.parametrize("where", ["attention.v", "feed.gate", "feed.down"])
def test_an_exception_in_between_does_not_shift_it(where):
    model = _model("1/2")

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    for layer in (0, 2):
        handle = model.layers[layer].get_submodule(where).register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            _loss(model)
        handle.remove()
        assert _again(model, _loss(model)) == dict.fromkeys(range(3), LEFT_OUT["1/2"])


def test_an_exception_in_backward_does_not_shift_it():
    model = _model("1/2")

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    handle = model.layers[1].attention.k.weight.register_hook(fail)
    with pytest.raises(KeyError):
        _loss(model).backward()
    handle.remove()
    assert _again(model, _loss(model)) == dict.fromkeys(range(3), LEFT_OUT["1/2"])


def test_a_forward_without_gradients_does_not_shift_it():
    model = _model("1/2")
    loss = _loss(model)
    with torch.no_grad():
        _loss(model)
    assert _again(model, loss) == dict.fromkeys(range(3), LEFT_OUT["1/2"])


def test_a_second_model_counts_for_itself():
    first, second = _model("1/2"), _model("2/3")
    a, b = _loss(first), _loss(second)
    assert _again(first, a) == dict.fromkeys(range(3), LEFT_OUT["1/2"])
    assert _again(second, b) == dict.fromkeys(range(3), LEFT_OUT["2/3"])


def test_one_counter_per_rule_over_everything_that_it_matches():
    """Under ``matmul`` bmm and mm share a counter; as two rules each has its own."""
    spec = Spec(attention="plain")
    tokens = models.tokens(spec)
    counts: dict[str, Counter[str]] = {}
    for name, save in {
        "one": [{"op": "matmul", "keep": "1/2"}],
        "two": [{"op": "aten.mm", "keep": "1/2"}, {"op": "aten.bmm", "keep": "1/2"}],
    }.items():
        plain, model = models.build(spec), models.build(spec)
        lowtide.apply(model, lowtide.SelectiveOp(save=save))
        counts[name] = ops.ran_again(
            lambda plain=plain: models.loss_of(plain(tokens), tokens),
            lambda model=model: models.loss_of(model(tokens), tokens),
        )
    # q k v scores values o gate up down; one counter keeps q v values gate down.
    assert (counts["one"]["aten.mm.default"], counts["one"]["aten.bmm.default"]) == (3 * 3, 1 * 3)
    # Two counters: mm keeps q v gate down, bmm keeps the scores.
    assert (counts["two"]["aten.mm.default"], counts["two"]["aten.bmm.default"]) == (3 * 3, 1 * 3)
