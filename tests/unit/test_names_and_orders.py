"""Nothing of a model changes its name, class or place under a policy, in any order with compile; see also
tests/distributed/test_names_sharded.py for the wrappers of distributed training.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import RefusedError
from tests.helpers import families, law, models
from tests.helpers.identity import identity
from tests.helpers.models import Spec

FULL = {"kind": "full"}
SELECTIVE = {"kind": "selective_op", "save": [{"op": "matmul", "keep": "1/2"}]}
BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch._dynamo.reset()


def _compile_blocks(model: nn.Module, backend: str, *, fullgraph: bool = True) -> nn.Module:
    for block in families.blocks(model):
        block.compile(backend=backend, fullgraph=fullgraph)
    return model


def _replace_blocks(model: nn.Module, backend: str) -> nn.Module:
    for i, block in enumerate(model.layers):
        model.layers[i] = torch.compile(block, backend=backend)
    return model


def _compile_model(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)


WRAPS: dict[str, Callable[..., nn.Module]] = {
    "block.compile()": _compile_blocks,
    "torch.compile(block)": _replace_blocks,
    "torch.compile(model)": _compile_model,
}


@pytest.mark.parametrize("policy", [FULL, SELECTIVE], ids=["full", "selective_op"])
def test_a_plain_model_keeps_every_name_class_and_place(policy):
    bare, model = families.build("decoder"), families.build("decoder")
    modules = {name: id(m) for name, m in model.named_modules()}
    parameters = {name: id(p) for name, p in model.named_parameters()}
    lowtide.apply(model, policy)
    assert identity(model) == identity(bare)
    assert {name: id(m) for name, m in model.named_modules()} == modules
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    families.step(model, 0)
    assert identity(model) == identity(bare)


@pytest.mark.parametrize("policy", [FULL, SELECTIVE], ids=["full", "selective_op"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hugging_face_models_keep_them_too(family, policy):
    bare, model = families.build(family), families.build(family)
    lowtide.apply(model, policy)
    assert identity(model) == identity(bare)
    families.step(model, 0)
    assert identity(model) == identity(bare)
    model.load_state_dict(bare.state_dict(), strict=True)


@pytest.mark.parametrize("last", [False, True], ids=["apply first", "compile first"])
@pytest.mark.parametrize("policy", [FULL, SELECTIVE], ids=["full", "selective_op"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_names_under_compile_are_those_of_compile_alone(wrap, policy, last):
    wrapping = partial(WRAPS[wrap], backend="eager")
    bare = wrapping(families.build("decoder"))
    model = families.build("decoder")
    if last:
        model = wrapping(model)
        lowtide.apply(model, policy)
    else:
        lowtide.apply(model, policy)
        model = wrapping(model)
    assert identity(model) == identity(bare)
    families.step(model, 0)
    assert identity(model) == identity(bare)


def _compiled_cells() -> list[Any]:
    """Every backend, order and way to compile; by default each way once, and that of trainers in both orders."""
    cells = list(itertools.product(WRAPS, BACKENDS, (False, True)))
    usual = {(w, "aot_eager", False) for w in WRAPS} | {("block.compile()", "aot_eager", True)}
    return [pytest.param(*c, marks=() if c in usual else pytest.mark.full) for c in cells]


@pytest.mark.parametrize(("wrap", "backend", "last"), _compiled_cells())
@pytest.mark.parametrize("policy", [FULL, SELECTIVE], ids=["full", "selective_op"])
def test_the_law_holds_under_compile_against_the_same_compiled_model(wrap, policy, last, backend):
    found = law.assert_law(
        families.builder("decoder", torch.float32, False),
        families.step,
        policy,
        wrap=partial(WRAPS[wrap], backend=backend),
        apply_last=last,
        steps=2,
    )
    assert len(found.applied.regions) == 3


@pytest.mark.parametrize("policy", [FULL, SELECTIVE], ids=["full", "selective_op"])
def test_a_compiled_block_is_one_graph_with_its_region_inside(policy):
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append([str(n.target) for n in graph.graph.nodes])
        return graph.forward

    model = families.build("decoder")
    lowtide.apply(model, policy)
    for block in model.layers:
        block.compile(backend=backend, fullgraph=True)
    families.step(model, 0)
    assert seen
    assert all(any("checkpoint" in target for target in targets) for targets in seen)


@pytest.mark.parametrize("compiled", ["module.compile()", "torch.compile(module)", "torch.compile(forward)"])
def test_operators_to_save_inside_compiled_code_are_refused_with_the_right_order(compiled):
    model = families.build("decoder")
    for block in model.layers:
        if compiled == "module.compile()":
            block.feed.compile(backend="eager")
        elif compiled == "torch.compile(module)":
            block.feed = torch.compile(block.feed, backend="eager")
        else:
            block.forward = torch.compile(block.forward, backend="eager")
    with pytest.raises(RefusedError, match="compile") as caught:
        lowtide.apply(model, SELECTIVE)
    assert "layers.0" in str(caught.value)
    assert "lowtide.apply first" in str(caught.value)
    assert not any(_has_region(block) for block in model.layers)


def test_a_block_that_holds_compiled_code_is_checkpointed_in_full():
    def build() -> nn.Module:
        model = families.build("decoder")
        for block in model.layers:
            block.feed.compile(backend="eager")
        return model

    law.assert_law(build, families.step, FULL, steps=2)


def _has_region(block: nn.Module) -> bool:
    from lowtide.regions import Region

    return isinstance(block.__dict__.get("forward"), Region)


# Applying again, removing


def test_applying_twice_is_the_same_as_once():
    model = families.build("decoder")
    first = lowtide.apply(model, SELECTIVE)
    second = lowtide.apply(model, lowtide.SelectiveOp(save=[{"op": "matmul", "keep": "1/2"}]))
    assert [a.fqn for a in first.regions] == [b.fqn for b in second.regions]
    assert str(first) == str(second)
    control = law.check_control(families.builder("decoder", torch.float32, False), families.step)

    def twice() -> nn.Module:
        model = families.build("decoder")
        lowtide.apply(model, SELECTIVE)
        return model

    law.assert_law(twice, families.step, SELECTIVE, control=control)
    second.remove()
    assert not any(_has_region(block) for block in model.layers)


@pytest.mark.parametrize("other", [FULL, {"kind": "none"}, {**SELECTIVE, "preserve_rng": False}])
def test_another_policy_is_refused_until_the_first_is_removed(other):
    model = families.build("decoder")
    applied = lowtide.apply(model, SELECTIVE)
    before = [block.__dict__["forward"] for block in model.layers]
    with pytest.raises(RefusedError, match=r"remove\(\)"):
        lowtide.apply(model, other)
    assert [block.__dict__["forward"] for block in model.layers] == before
    applied.remove()
    lowtide.apply(model, other)


def test_another_policy_on_a_part_of_the_model_is_refused():
    model = families.build("decoder")
    lowtide.apply(model, FULL)
    with pytest.raises(RefusedError):
        lowtide.apply(model.layers, SELECTIVE)


def test_remove_gives_back_what_was_there_and_may_be_called_twice():
    model = families.build("decoder")
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}

    own = partial(models.Block.forward, model.layers[1])
    model.layers[1].forward = own
    applied = lowtide.apply(model, FULL)
    assert _has_region(model.layers[1])
    families.step(model, 0)
    applied.remove()
    applied.remove()
    assert model.layers[1].__dict__["forward"] is own
    assert "forward" not in model.layers[0].__dict__
    del model.layers[1].forward
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == {n: set(d) for n, d in before.items()}


def test_a_forward_of_its_own_on_an_instance_runs_inside_the_region():
    def build() -> nn.Module:
        model = families.build("decoder")
        for block in model.layers:
            block.forward = partial(_scaled, block)
        return model

    law.assert_law(build, families.step, FULL)


def _scaled(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return models.Block.forward(block, x) * 0.5


def test_remove_is_refused_where_something_stands_on_top():
    model = families.build("decoder")
    applied = lowtide.apply(model, FULL)
    region = model.layers[0].forward
    model.layers[0].forward = lambda x: region(x)
    with pytest.raises(RefusedError, match=r"layers\.0\.forward was replaced"):
        applied.remove()
    assert _has_region(model.layers[1])
    model.layers[0].forward = region
    applied.remove()
    assert not any(_has_region(block) for block in model.layers)


def test_remove_works_between_forward_and_backward():
    control = law.check_control(families.builder("decoder", torch.float32, True), families.step, steps=1)
    model = families.build("decoder", dropout=True)
    applied = lowtide.apply(model, SELECTIVE)
    torch.manual_seed(104_729 * 31)
    tokens = models.tokens(Spec(), step=0)
    loss = models.loss_of(model(tokens), tokens)
    applied.remove()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert law.same_bits(parameter.grad, control.gradients[0][name]), name


# Copies


def _copies() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def saved(model: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved}


@pytest.mark.parametrize("how", _copies())
@pytest.mark.parametrize("ran", [False, True], ids=["unused", "trained"])
def test_a_copy_runs_its_own_parameters_and_carries_the_policy(how, ran):
    model = families.build("decoder", dropout=True)
    lowtide.apply(model, SELECTIVE)
    if ran:
        families.step(model, 0)
        model.zero_grad()
    twin = _copies()[how](model)
    assert all(_has_region(block) for block in twin.layers)
    assert identity(twin) == identity(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    families.step(twin, 0)
    assert all(p.grad is None for p in model.parameters())

    bare = families.build("decoder", dropout=True)
    with torch.no_grad():
        for parameter in bare.parameters():
            parameter.mul_(1.5)
    torch.manual_seed(3)
    families.step(bare, 1)
    twin.zero_grad()
    torch.manual_seed(3)
    families.step(twin, 1)
    for (name, p), q in zip(bare.named_parameters(), twin.parameters(), strict=True):
        assert law.same_bits(p.grad, q.grad), name
    lowtide.apply(twin, SELECTIVE)
    with pytest.raises(RefusedError):
        lowtide.apply(twin, FULL)


def test_a_copy_of_one_block_stands_on_its_own():
    model = families.build("decoder")
    lowtide.apply(model, FULL)
    block = copy.deepcopy(model.layers[1])
    x = torch.randn(2, 16, 32)
    block(x).sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    assert all(p.grad is None for p in model.parameters())


# Refusals of what would nest


def test_another_kind_of_checkpointing_is_refused():
    from torch.distributed._composable import checkpoint as composable
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = families.build("decoder")
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    with pytest.raises(RefusedError, match=r"layers\.1 .*checkpoint"):
        lowtide.apply(model, FULL)
    model = families.build("decoder")
    composable(model.layers[2])
    with pytest.raises(RefusedError, match=r"layers\.2 .*checkpoint"):
        lowtide.apply(model, FULL)
    model = families.build("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(RefusedError, match="gradient_checkpointing_disable"):
        lowtide.apply(model, FULL)
    assert not any(_has_region(block) for block in families.blocks(model))


def test_a_scripted_block_is_refused():
    model = nn.ModuleDict({"layers": nn.ModuleList(torch.jit.script(nn.Sequential(nn.Linear(4, 4))) for _ in range(2))})
    with pytest.raises(RefusedError, match="TorchScript"):
        lowtide.apply(model, {**FULL, "layers": "layers.*"})


def test_regions_inside_torchs_own_checkpoint_are_exact():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = families.build("decoder", dropout=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if not getattr(self, "nested", False):
                return self.model(tokens)
            return checkpoint(self.model, tokens, use_reentrant=False)

    control = law.check_control(Outer, families.step)

    def nested() -> nn.Module:
        outer = Outer()
        outer.nested = True
        return outer

    for policy in (FULL, SELECTIVE):
        law.assert_law(nested, families.step, policy, control=control)
