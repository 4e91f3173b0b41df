"""Blocks that overwrite entries of a container they were given: recompute starts from what was given."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.helpers import law, models
from tests.helpers.families import both, spec_step
from tests.helpers.models import Spec


@pytest.mark.parametrize("trainable_input", [True, False])
@both
def test_a_dict_whose_entry_is_overwritten(policy, trainable_input):
    spec = Spec(arguments="dict", dropout=0.1)

    def build() -> nn.Module:
        model = models.build(spec)
        model.embed.weight.requires_grad_(trainable_input)
        return model

    law.assert_law(build, partial(spec_step, spec=spec), policy)


@dataclasses.dataclass
class State:
    x: Tensor
    log: list[Any] = dataclasses.field(default_factory=list)


Pair = namedtuple("Pair", ["x", "rest"])


def overwrite_dict(block: nn.Module, s: Any) -> Any:
    s["x"] = block.body(s["x"])
    return s


def overwrite_nested(block: nn.Module, s: Any) -> Any:
    s["inner"]["x"] = block.body(s["inner"]["x"])
    s["inner"]["seen"].append(s["inner"]["x"].detach())
    return s


def overwrite_list(block: nn.Module, s: Any) -> Any:
    s[0] = block.body(s[0])
    s.append(None)
    return s


def pop_and_insert(block: nn.Module, s: Any) -> Any:
    x = s.pop()
    s.insert(0, block.body(x))
    return s


def overwrite_dataclass(block: nn.Module, s: Any) -> Any:
    s.x = block.body(s.x)
    return s


def log_into_dataclass(block: nn.Module, s: Any) -> Any:
    s.log.append(s.x.detach())
    s.x = block.body(s.x) + 0.1 * len(s.log) * s.x
    return s


def overwrite_namespace(block: nn.Module, s: Any) -> Any:
    s.x = block.body(s.x)
    return s


def list_in_tuple(block: nn.Module, s: Any) -> Any:
    s.rest[0] = s.rest[0] + 1
    return Pair(block.body(s.x) * (1 + 0.1 * s.rest[0]), s.rest)


KINDS = {
    "dict": (lambda x: {"x": x}, overwrite_dict, lambda s: s["x"]),
    "ordered dict": (lambda x: OrderedDict(x=x), overwrite_dict, lambda s: s["x"]),
    "nested": (lambda x: {"inner": {"x": x, "seen": []}}, overwrite_nested, lambda s: s["inner"]["x"]),
    "list": (lambda x: [x], overwrite_list, lambda s: s[0]),
    "pop": (lambda x: [x], pop_and_insert, lambda s: s[0]),
    "dataclass": (State, overwrite_dataclass, lambda s: s.x),
    "dataclass with a list": (State, log_into_dataclass, lambda s: s.x),
    "namespace": (lambda x: SimpleNamespace(x=x), overwrite_namespace, lambda s: s.x),
    "list in a tuple": (lambda x: Pair(x, [0]), list_in_tuple, lambda s: s.x),
}


class Passing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.make, change, self.read = KINDS[kind]
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(PassingBlock(change) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.make(self.embed(tokens))
        for layer in self.layers:
            state = layer(state)
        return self.read(state) @ self.embed.weight.t()


class PassingBlock(nn.Module):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change
        self.inner = nn.Linear(32, 32, bias=False)
        self.outer = nn.Linear(32, 32, bias=False)

    def body(self, x: Tensor) -> Tensor:
        # Widths are equal and so is what is saved: no check of shapes notices another input.
        return self.outer(self.inner(x).sin()).relu()

    def forward(self, state: Any) -> Any:
        return self.change(self, state)


@pytest.mark.parametrize("kind", KINDS)
@both
def test_containers_of_every_kind_are_exact(policy, kind):
    def build() -> nn.Module:
        torch.manual_seed(8)
        return Passing(kind)

    law.assert_law(build, spec_step, policy)


def test_the_block_gets_the_very_object_it_was_given():
    """Forward must not see copies: a caller may rely on its dict being filled."""
    spec = Spec(arguments="dict", layers=1)
    model = models.build(spec)
    lowtide.apply(model, {"kind": "full"})
    state = {"hidden": torch.randn(2, 16, 32), "depth": 0}
    assert model.layers[0](state) is state
    assert state["depth"] == 1
    state["hidden"].sum().backward()
    assert state["depth"] == 1
