"""What a block returns keeps its type and its gradients; keywords, flags and containers go in as they are."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.helpers import law, models
from tests.helpers.families import FULL, SELECTIVE, both, spec_step
from tests.helpers.models import BlockOutput, NamedOutput, Spec

OUTPUTS = {"tensor": Tensor, "tuple": tuple, "dataclass": BlockOutput, "named": NamedOutput}


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("arguments", ["tensor", "kwargs"])
@both
def test_outputs_keep_their_type_and_their_gradients(policy, arguments, outputs):
    spec = Spec(outputs=outputs, arguments=arguments, dropout=0.1)
    law.assert_law(partial(models.build, spec), partial(spec_step, spec=spec), policy)
    bare, model = models.build(spec), models.build(spec)
    lowtide.apply(model, policy)
    x = torch.randn(2, 16, 32, requires_grad=True)
    given = {"hidden": x, "scale": 0.5, "flags": {"shift": torch.zeros(()), "on": False}}
    for block in (bare.layers[0], model.layers[0]):
        out = block(x) if arguments == "tensor" else block(**given)
        assert type(out) is OUTPUTS[outputs]
        hidden = models.hidden_of(out)
        assert hidden.requires_grad
        assert hidden.grad_fn is not None
        if outputs == "named":
            assert out._fields == ("hidden", "extra")
        if outputs != "tensor":
            assert (out[1] if isinstance(out, tuple) else out.extra) is None


class Branching(nn.Module):
    """Returns a dict of tensors, some without gradients, some of them inputs, views, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block(Spec())
        self.side = nn.Linear(32, 4)

    def forward(self, x: Tensor, /, *, mask: Tensor | None = None, want: tuple[str, ...] = ()) -> dict[str, Any]:
        h = self.block(x)
        h = h if mask is None else h.masked_fill(mask, 0.0)
        out: dict[str, Any] = {
            "x": h,
            "given": x,
            "ids": h.argmax(-1),
            "view": h[:, :1],
            "nested": [None, {"s": self.side(h)}],
        }
        return {k: v for k, v in out.items() if k in want or not want}


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Branching() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = torch.zeros(16, 1, dtype=torch.bool)
        mask[3] = True
        total = torch.zeros(())
        for layer in self.layers:
            out = layer(x, mask=mask)
            assert not out["ids"].requires_grad
            total = total + out["nested"][1]["s"].square().mean() + out["view"].mean() + out["given"].mean()
            x = out["x"] + layer(x, want=("x",))["x"]
        return x @ self.embed.weight.t() + total


@both
def test_dicts_views_integers_and_inputs_among_the_outputs(policy):
    law.assert_law(Trunk, spec_step, policy)


def test_the_signature_and_the_name_of_forward_are_kept():
    bare, model = Trunk(), Trunk()
    lowtide.apply(model, FULL)
    assert inspect.signature(model.layers[0].forward) == inspect.signature(bare.layers[0].forward)
    assert model.layers[0].forward.__name__ == "forward"
    with pytest.raises(TypeError):
        model.layers[0](torch.randn(2, 16, 32), wrong=1)


def test_a_missing_argument_is_the_blocks_own_error():
    model = Trunk()
    lowtide.apply(model, SELECTIVE)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model.layers[0]()


@both
def test_no_tensor_at_all_among_the_arguments(policy):
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.block = nn.Parameter(torch.randn(2, 16, 32)), models.Block(Spec())

        def forward(self, *, scale: float) -> Tensor:
            return self.block(self.start * scale)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(14)
            self.layers = nn.ModuleList(Made() for _ in range(2))
            self.head = nn.Linear(32, 64)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(sum(layer(scale=0.5) for layer in self.layers))

    law.assert_law(Root, spec_step, policy)


@both
def test_non_contiguous_and_expanded_inputs(policy):
    class Odd(models.Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks():
                x = block(x.transpose(0, 1).contiguous().transpose(0, 1))
                x = block(x[:, :1].expand_as(x)) + x
            return self.head(x)

    def build() -> nn.Module:
        torch.manual_seed(15)
        return Odd(Spec())

    law.assert_law(build, spec_step, policy)
