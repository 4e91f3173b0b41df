"""Kind ``rules`` in real models: the law, which operators run again, what stays alive, and rules that match nothing."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import NothingMatchedError, PolicyError, RefusedError, UserError, find_error
from lowtide.policy import parse_policy
from tests.helpers import law, models, ops
from tests.helpers.models import Spec

EXECUTORS = pytest.mark.parametrize("executor", ["recompute", "replay"])


def rules(default: str, *items: dict[str, Any], **common: Any) -> dict[str, Any]:
    return {"kind": "rules", "default": default, "rules": list(items), **common}


POLICIES: dict[str, dict[str, Any]] = {
    "attention outputs only": rules("recompute", {"modules": "attention", "op": "sdpa", "action": "save"}),
    "the MLP only": rules("save", {"modules": "feed", "action": "recompute"}),
    "norms only": rules("save", {"modules": ["*_norm"], "action": "recompute"}),
    "operators, all else saved": rules("save", {"op": "aten.silu", "action": "recompute"}),
    "the MLP but for two products": rules(
        "save",
        {"modules": "feed", "op": "matmul", "action": "save", "keep": "2/3"},
        {"modules": "feed", "action": "recompute"},
    ),
    "all of a module saved": rules("recompute", {"modules": "feed", "action": "save"}),
    "by layers": rules(
        "recompute",
        {"layers": "**.{0}", "action": "recompute"},
        {"layers": "**.{1}", "op": "matmul", "action": "save", "keep": "1/2"},
        {"layers": "**.{-1}", "action": "none"},
    ),
    "calls by number": rules("recompute", {"op": "aten.mm", "action": "save", "keep": [0, 4]}),
    "half of attention": rules("save", {"op": "sdpa", "action": "save", "keep": "1/2"}),
}
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"
AGAIN: dict[str, dict[str, int]] = {
    "attention outputs only": {"aten.mm.default": 18, "aten.silu.default": 3},
    "the MLP only": {"aten.mm.default": 6, "aten.silu.default": 3},
    "norms only": {},
    "operators, all else saved": {"aten.silu.default": 3},
    "the MLP but for two products": {"aten.silu.default": 3},
    "all of a module saved": {"aten.mm.default": 12, SDPA: 3},
    "by layers": {"aten.mm.default": 9, SDPA: 2, "aten.silu.default": 2},
    "calls by number": {"aten.mm.default": 12, SDPA: 3, "aten.silu.default": 3},
    "half of attention": {},
}
"""Of the operators that matter, how often each runs again in three blocks of the decoder of ``models``."""


def step_of(spec: Spec, model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(spec)
    loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss.detach()


@EXECUTORS
@pytest.mark.parametrize("name", POLICIES)
def test_the_law_and_the_operators_that_run_again(name, executor):
    spec = Spec()
    policy = {**POLICIES[name], "executor": executor}
    law.assert_law(partial(models.build, spec), partial(step_of, spec), policy)
    plain, model = models.build(spec), models.build(spec)
    applied = lowtide.apply(model, policy)
    for i in range(2):
        step_of(spec, model, i)
    assert {r.executor for r in applied.regions} == {executor}
    tokens = models.tokens(spec)
    again = ops.ran_again(lambda: models.loss_of(plain(tokens), tokens), lambda: models.loss_of(model(tokens), tokens))
    counted = {op: n for op, n in again.items() if op in ("aten.mm.default", SDPA, "aten.silu.default")}
    assert counted == AGAIN[name]


@EXECUTORS
@pytest.mark.parametrize(
    "spec", [Spec(feed="moe", dropout=0.1), Spec(dropout=0.1, dtype=torch.bfloat16)], ids=["moe", "bf16"]
)
def test_the_law_with_dropout_routers_and_bf16(spec, executor):
    wanted = [
        rules("recompute", {"modules": "**.router", "op": "matmul", "action": "save"}) if spec.feed == "moe" else None,
        rules("save", {"modules": "feed", "action": "recompute"}),
        rules("save", {"modules": "attention", "op": "matmul", "action": "save", "keep": "1/3"}),
    ]
    for policy in filter(None, wanted):
        law.assert_law(partial(models.build, spec), partial(step_of, spec), {**policy, "executor": executor})


@EXECUTORS
def test_a_router_is_never_decided_again(executor):
    """The router's product is saved by a rule; its integer choice always is."""
    spec = Spec(feed="moe")
    policy = rules("recompute", {"modules": "**.router", "op": "matmul", "action": "save"}, executor=executor)
    plain, model = models.build(spec), models.build(spec)
    lowtide.apply(model, policy)
    for i in range(2):
        step_of(spec, model, i)
    tokens = models.tokens(spec)
    ahead, _ = ops.count_ops(lambda: models.loss_of(plain(tokens), tokens))
    again = ops.ran_again(lambda: models.loss_of(plain(tokens), tokens), lambda: models.loss_of(model(tokens), tokens))
    assert again["aten.topk.default"] == 0
    assert 0 < again["aten.mm.default"] <= ahead["aten.mm.default"] - 3 - 1, (
        "three routers' products stay, and the head's"
    )


def test_default_save_keeps_what_backward_needs_and_nothing_else():
    """Under replay, which ``auto`` chooses here, only the recomputed value goes."""
    spec = Spec(layers=2)
    tokens = models.tokens(spec)

    def held(policy: Any) -> int:
        model = models.build(spec)
        if policy is not None:
            lowtide.apply(model, policy)
        for i in range(2):
            step_of(spec, model, i)
        return ops.saved_bytes(lambda: models.loss_of(model(tokens), tokens))

    policy = rules("save", {"op": "aten.silu", "action": "recompute"})
    silu = spec.batch * spec.length * spec.hidden * 4
    assert held(None) - held(policy) == spec.layers * silu
    model = models.build(spec)
    applied = lowtide.apply(model, policy)
    assert {(r.executor, r.reason) for r in applied.regions} == {
        ("replay", "saves what backward needs, and nothing else")
    }


# -- names -----------------------------------------------------------------------------------------------------------


class NamedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 96, bias=False)
        self.o = nn.Linear(32, 32, bias=False)
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(F.dropout(x, 0.1, self.training)).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(lowtide.checkpoint_name(y, "attention").transpose(1, 2).reshape(2, 8, 32))
        h = lowtide.checkpoint_name(self.up(x), "ffn_in")
        return x + self.down(F.gelu(h))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NamedBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def named() -> Named:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(31)
        return Named()


def named_loss(model: nn.Module) -> Tensor:
    torch.manual_seed(7)
    return model(torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32)).pow(2).mean()


def named_step(model: nn.Module, i: int) -> Tensor:
    loss = named_loss(model)
    loss.backward()
    return loss.detach()


BY_NAME: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "save one": (
        rules("recompute", {"name": "ffn_in", "action": "save"}),
        {"aten.mm.default": 6, SDPA: 3, "aten.gelu.default": 3},
    ),
    "attention with its normaliser": (
        rules("recompute", {"name": "attention", "action": "save"}),
        {"aten.mm.default": 9, "aten.gelu.default": 3},
    ),
    "a name before an operator": (
        rules("recompute", {"name": "ffn_in", "action": "recompute"}, {"op": "matmul", "action": "save"}),
        {"aten.mm.default": 3, SDPA: 3, "aten.gelu.default": 3},
    ),
    "an operator before a name": (
        rules("recompute", {"op": "matmul", "action": "save"}, {"name": "ffn_in", "action": "recompute"}),
        {SDPA: 3, "aten.gelu.default": 3},
    ),
    "all but one": (rules("save", {"name": "ffn_in", "action": "recompute"}), {"aten.mm.default": 3}),
}


@EXECUTORS
@pytest.mark.parametrize("name", BY_NAME)
def test_names_decide(name, executor):
    policy, expected = BY_NAME[name]
    policy = {**policy, "executor": executor}
    law.assert_law(named, named_step, policy)
    plain, model = named(), named()
    lowtide.apply(model, policy)
    for i in range(2):
        named_step(model, i)
    again = ops.ran_again(lambda: named_loss(plain), lambda: named_loss(model))
    assert {op: n for op, n in again.items() if op in ("aten.mm.default", SDPA, "aten.gelu.default")} == expected


@EXECUTORS
def test_a_value_written_in_place_is_saved_as_it_was_named_or_refused(executor):
    def written(block: Any, x: Tensor) -> Tensor:
        h = block.up(x)
        h = lowtide.checkpoint_name(h.add_(1.0), "h")
        return block.down(h.tanh())

    from tests.helpers import replayed

    policy = rules("recompute", {"name": "h", "action": "save"}, executor=executor)
    build = partial(replayed.build, written)
    if executor == "replay":
        law.assert_law(build, replayed.step, policy)
        return
    model = build()
    lowtide.apply(model, policy)
    with pytest.raises(RefusedError, match=r"'h' cannot be saved by executor recompute: it was written in place"):
        replayed.step(model, 0)


def test_checkpoint_name_returns_its_argument_and_says_what_it_takes():
    x = torch.ones(3)
    assert lowtide.checkpoint_name(x, "x") is x
    for wrong in (("x", x), (x, 3), (x, ""), (None, "x")):
        with pytest.raises(UserError, match=r"takes a tensor and a name"):
            lowtide.checkpoint_name(*wrong)
    compiled = torch.compile(lambda y: lowtide.checkpoint_name(y * 2, "y") + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x * 2 + 1)


# -- what cannot be ---------------------------------------------------------------------------------------------------


@EXECUTORS
@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"name": "ffn_inn", "action": "save"}, r"rules\.0: no value was given the name 'ffn_inn'.*ffn_in \(3 times\)"),
        (
            {"name": "ffn_in", "modules": "up", "action": "save"},
            r"rules\.0: no value was given the name 'ffn_in' inside modules up",
        ),
        ({"op": "aten.addmm", "action": "save"}, r"rules\.0: 'aten\.addmm' matched no operator.*aten\.mm\.default"),
        (
            {"op": "aten.gelu", "modules": "up", "action": "save"},
            r"rules\.0: 'aten\.gelu' matched no operator inside modules up",
        ),
    ],
    ids=["name", "name in module", "operator", "operator in module"],
)
def test_what_matches_nothing_is_an_error_before_backward(rule, says, executor):
    model = named()
    lowtide.apply(model, rules("recompute", rule, executor=executor))
    with pytest.raises(NothingMatchedError, match=says):
        named_loss(model).backward()
    assert all(p.grad is None for p in model.parameters())
    model = named()
    lowtide.apply(model, rules("recompute", {**rule, "optional": True}, executor=executor))
    named_loss(model).backward()


def test_what_can_never_be_is_an_error_at_apply():
    def applying(*items: dict[str, Any], default: str = "recompute") -> None:
        lowtide.apply(named(), rules(default, *items))

    with pytest.raises(NothingMatchedError, match=r"rules\.0: torch .* has no operator 'aten\.matmull'"):
        applying({"op": "aten.matmull", "action": "save"})
    with pytest.raises(
        PolicyError, match=r"rules\.1: 'aten\.mm' can never decide anything, since matmul stands before"
    ):
        applying({"op": "matmul", "action": "save"}, {"op": "aten.mm", "action": "recompute"})
    applying({"op": "matmul", "modules": "up", "action": "save"}, {"op": "aten.mm", "action": "save"})
    with pytest.raises(PolicyError, match="writes in place"):
        applying({"op": "aten.relu_", "action": "save"})
    with pytest.raises(NothingMatchedError, match=r"rules\.0\.modules: 'mlp'.*nearest: .*up"):
        applying({"modules": "mlp", "action": "recompute"}, default="save")
    model = models.build(Spec(feed="moe"))
    with pytest.raises(PolicyError, match=r"'feed\.experts' in layers\.0 is a ModuleList.*feed\.experts\.\*"):
        lowtide.apply(model, rules("save", {"modules": "feed.experts", "action": "recompute"}))
    applied = lowtide.apply(model, rules("save", {"modules": "feed.experts.*", "action": "recompute"}))
    assert str(applied).startswith("rules: 3 of 3 blocks checkpointed in 12 regions (layers.0.feed.experts.{0-3}, ")


def test_compiled_blocks_refuse_rules_that_compiled_code_does_not_show():
    for rule in ({"modules": "up", "op": "matmul", "action": "save"}, {"name": "ffn_in", "action": "save"}):
        model = named()
        lowtide.apply(model, rules("recompute", rule))
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        with pytest.raises(Exception, match=r"torch\.compile shows operators only") as caught:
            named_loss(model)
        assert isinstance(find_error(caught.value), RefusedError)


# -- one policy, one model ---------------------------------------------------------------------------------------------


def test_copies_pickles_and_a_second_apply_behave_as_with_other_kinds():
    policy = parse_policy(POLICIES["the MLP but for two products"])
    spec = Spec()
    model = models.build(spec)
    applied = lowtide.apply(model, policy)
    assert [r.fqn for r in applied.regions] == [f"layers.{i}.feed" for i in range(3)]
    assert [r.fqn for r in lowtide.apply(model, policy).regions] == [r.fqn for r in applied.regions]
    with pytest.raises(RefusedError, match="differs from it"):
        lowtide.apply(model, POLICIES["the MLP only"])
    step_of(spec, model, 0)
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        step_of(spec, other, 0)
        assert all(torch.equal(p.grad, wanted[n]) for n, p in other.named_parameters() if p.grad is not None)
    applied.remove()
    assert "forward" not in model.layers[0].feed.__dict__
