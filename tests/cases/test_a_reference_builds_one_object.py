"""Field case 34: a reference is the same object, built exactly once, in any order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.training.registry import Builder
from tests.helpers.configs import built, parts

HERE = "tests.helpers.configs"


@pytest.fixture(autouse=True)
def _count_anew() -> Iterator[None]:
    built.clear()
    yield
    built.clear()


@pytest.mark.parametrize(
    "text",
    [
        "first: {kind: leaf}\nsecond: ${first}\n",
        "second: ${first}\nfirst: {kind: leaf}\n",
        "first: &x {kind: leaf}\nsecond: *x\n",
        "free: {shared: {kind: leaf}}\nfirst: ${free.shared}\nsecond: ${free.shared}\n",
        "second: ${first}\nfirst: ${free}\nfree: {kind: leaf}\n",
        "many: [{kind: leaf}]\nfirst: ${many.0}\nsecond: ${many[0]}\n",
    ],
)
def test_two_places_that_refer_to_one_get_one(tmp_path: Path, text: str) -> None:
    config = parts(tmp_path, text).config
    assert config.first is config.second
    builder = Builder()
    a, b = builder.build(config.first), builder.build(config.second)
    assert a is b
    assert built["leaf"] == 1


def test_equal_mappings_stay_two(tmp_path: Path) -> None:
    config = parts(tmp_path, "first: {kind: leaf}\nsecond: {kind: leaf}\n").config
    builder = Builder()
    assert builder.build(config.first) is not builder.build(config.second)
    assert built["leaf"] == 2


def test_any_order_of_building_and_references_from_inside_a_list(tmp_path: Path) -> None:
    text = """
    many: ["${second}", {kind: tree, left: "${second}", right: {kind: leaf, size: 2}}, "${many.1.right}"]
    first: {kind: tree, left: "${many.1.right}", right: "${second}"}
    second: {kind: leaf}
    """
    config = parts(tmp_path, text).config
    places = {
        "first": config.first,
        "second": config.second,
        "0": config.many[0],
        "1": config.many[1],
        "2": config.many[2],
    }
    for order in itertools.permutations(places):
        built.clear()
        builder = Builder()
        made = {name: builder.build(places[name]) for name in order}
        assert built == {"leaf": 2, "tree": 2}
        assert made["0"] is made["second"] is made["1"].children[0] is made["first"].children[1]
        assert made["2"] is made["1"].children[1] is made["first"].children[0]


def test_building_twice_gives_the_same_object(tmp_path: Path) -> None:
    config = parts(tmp_path, "first: {kind: tree, left: {kind: leaf}, right: '${first.left}'}").config
    builder = Builder()
    assert builder.build(config.first) is builder.build(config.first)
    assert built == {"leaf": 1, "tree": 1}
    assert Builder().build(config.first) is not builder.build(config.first)


def test_a_custom_class_gets_the_shared_object(tmp_path: Path) -> None:
    text = f"""
    first: {{kind: custom, target: "{HERE}:Wrapped", config: {{inner: "${{second}}"}}}}
    second: {{kind: leaf}}
    """
    config = parts(tmp_path, text).config
    builder = Builder()
    assert builder.build(config.first).inner is builder.build(config.second)
    assert built == {"leaf": 1, "wrapped": 1}


def test_other_arguments_for_a_shared_object_are_an_error(tmp_path: Path) -> None:
    config = parts(tmp_path, "first: {kind: leaf}\nsecond: ${first}\n").config
    builder = Builder()
    builder.build(config.first, rank=0)
    builder.build(config.second, rank=0)
    with pytest.raises(ConfigError, match=r"the test_part of kind 'leaf' .* built before with another rank"):
        builder.build(config.second, rank=1)


def test_a_training_step_moves_the_model_that_both_places_name(tmp_path: Path) -> None:
    import torch

    from lowtide.training.optim import matrix_names
    from lowtide.training.optim_kinds import AdamWConfig

    config = parts(tmp_path, "first: {kind: torch_wrapper, model: '${second}'}\nsecond: {kind: torch_linear}\n").config
    builder = Builder()
    wrapper, model = builder.build(config.first), builder.build(config.second)
    assert wrapper.model is model
    optimizer = AdamWConfig(lr=0.1).build(model=model, matrices=matrix_names(model))
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in wrapper.model.parameters()}
    before = wrapper.model.weight.detach().clone()
    wrapper(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(wrapper.model.weight, before)
