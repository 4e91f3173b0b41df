"""Names of operators: a packet means all its overloads; what is unknown or never runs is an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import NothingMatchedError, PolicyError
from tests.helpers import law, models, ops
from tests.helpers.families import spec_step
from tests.helpers.models import Spec


def _again(spec: Spec, save: object) -> dict[str, int]:
    plain, model = models.build(spec), models.build(spec)
    lowtide.apply(model, lowtide.SelectiveOp(save=save))
    tokens = models.tokens(spec)
    return ops.ran_again(lambda: models.loss_of(plain(tokens), tokens), lambda: models.loss_of(model(tokens), tokens))


@pytest.mark.parametrize("name", ["aten.mm", "aten.mm.default", "matmul"])
def test_a_packet_an_overload_and_an_alias_all_save(name):
    assert _again(Spec(), [name])["aten.mm.default"] == 0


def test_a_packet_is_all_its_overloads():
    spec = Spec()
    again = _again(spec, ["aten.add"])
    assert again["aten.add.Tensor"] == again["aten.add.Scalar"] == 0
    assert _again(spec, ["aten.mul.Tensor"])["aten.mul.Tensor"] == 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("aten.mn", ["no operator 'aten.mn'", "aten.mm"]),
        ("atn.mm", ["no operator 'atn.mm'", "aten.mm"]),
        ("matmull", ["no operator 'matmull'", "matmul"]),
        ("mm", ["no operator 'mm'", "aten.mm"]),
        ("aten.mm.defalt", ["no such overload", "aten.mm.default"]),
        ("aten.addmm.out_", ["no such overload", "aten.addmm.default"]),
        ("lab.silu", ["no operator 'lab.silu'", "silu"]),
    ],
)
def test_an_unknown_name_is_an_error_at_apply_with_the_nearest(name, told):
    model = models.build()
    with pytest.raises(NothingMatchedError) as caught:
        lowtide.apply(model, lowtide.SelectiveOp(save=[name]))
    for part in told:
        assert part in str(caught.value)
    assert all("forward" not in block.__dict__ for block in model.layers)


def test_a_list_for_products_without_bias_on_layers_with_bias_names_addmm():
    spec = Spec(bias=True)
    model = models.build(spec)
    lowtide.apply(model, lowtide.SelectiveOp(save=["aten.mm"]))
    with pytest.raises(NothingMatchedError, match=r"'aten\.mm' matched no operator.*aten\.addmm\.default"):
        model(models.tokens(spec))


def test_one_rule_of_several_that_matches_nothing_is_an_error_too_unless_optional():
    spec = Spec()
    model = models.build(spec)
    applied = lowtide.apply(model, lowtide.SelectiveOp(save=["aten.mm", "aten.convolution"]))
    with pytest.raises(NothingMatchedError, match=r"aten\.convolution"):
        model(models.tokens(spec))
    applied.remove()
    lowtide.apply(model, lowtide.SelectiveOp(save=["aten.mm", {"op": "aten.convolution", "optional": True}]))
    spec_step(model, 0, spec=spec)


def test_the_error_stays_until_the_policy_is_changed():
    model = models.build()
    lowtide.apply(model, lowtide.SelectiveOp(save=["aten.convolution"]))
    for _ in range(2):
        with pytest.raises(NothingMatchedError):
            model(models.tokens())


def test_all_regions_count_together():
    """A rule that only one of the blocks meets is met."""

    def build() -> nn.Module:
        model = models.build()
        model.layers[2].attention = models.Attention(Spec(bias=True))
        return models.randomized(model)

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    law.assert_law(seeded, spec_step, lowtide.SelectiveOp(save=["aten.addmm"]))


def test_a_region_that_stays_unused_does_not_hide_the_error():
    """A block that never runs (layer drop, a pipeline stage): check() and backward still tell."""
    model = models.build()
    applied = lowtide.apply(model, lowtide.SelectiveOp(save=["aten.convolution"]))
    x = torch.randn(2, 16, 32, requires_grad=True)
    y = model.layers[0](x)
    with pytest.raises(NothingMatchedError, match=r"aten\.convolution"):
        y.sum().backward()
    assert x.grad is None
    with pytest.raises(NothingMatchedError, match=r"aten\.convolution"):
        applied.check()


def test_an_operator_that_only_writes_in_place_cannot_be_saved():
    with pytest.raises(PolicyError, match="writes in place"):
        lowtide.apply(models.build(), lowtide.SelectiveOp(save=["aten.relu_"]))


def test_a_rule_that_an_earlier_one_hides_is_an_error():
    with pytest.raises(PolicyError, match="can never decide"):
        lowtide.apply(models.build(), lowtide.SelectiveOp(save=["matmul", "aten.mm"]))
    lowtide.apply(models.build(), lowtide.SelectiveOp(save=[{"op": "aten.mm", "keep": "1/2"}, "matmul"]))


def test_a_custom_operator_is_one_operator():
    @torch.library.custom_op("lowtide_test::scaled_silu", mutates_args=())
    def scaled_silu(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * 1.7

    scaled_silu.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].sigmoid(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(torch.ops.lowtide_test.scaled_silu(self.a(x)))

    def build() -> nn.Module:
        torch.manual_seed(4)
        model = models.build()
        model.layers = nn.ModuleList(Layer() for _ in range(2))
        return model

    policy = lowtide.SelectiveOp(save=["lowtide_test.scaled_silu"])
    law.assert_law(build, spec_step, policy)
    plain, model = build(), build()
    lowtide.apply(model, policy)
    tokens = models.tokens()
    again = ops.ran_again(lambda: models.loss_of(plain(tokens), tokens), lambda: models.loss_of(model(tokens), tokens))
    assert again["lowtide_test.scaled_silu.default"] == 0
    assert again["aten.mm.default"] == 2
