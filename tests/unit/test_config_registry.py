"""Kinds: registered beside what they build, plugins loaded when named, custom code only when allowed."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Literal

import pytest

from lowtide.errors import ConfigError, UserError
from lowtide.training.config import load, to_yaml
from lowtide.training.registry import Builder, Component, Custom, find_kind, kinds, register
from tests.helpers.configs import MINIMAL, Assembly, Leaf, Wrapped, complaint, parts, parts_complaint, read, write

HERE = "tests.helpers.configs"


class Plugged(Component):
    kind: Literal["plugged"] = "plugged"
    depth: int = 1

    def build(self) -> str:
        return f"depth {self.depth}"


def test_built_in_kinds_are_found_without_a_list() -> None:
    assert kinds("model") == ["custom", "decoder", "huggingface"]
    assert kinds("data") == ["custom", "embedded_text", "random"]
    assert kinds("optimizer") == ["adamw", "custom"]
    assert kinds("tracker") == ["console", "custom", "jsonl", "tensorboard", "wandb"]


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        find_kind("model", "decodr")
    assert str(caught.value) == (
        "'decodr' is not a kind of model. Legal: custom, decoder, huggingface. Did you mean 'decoder'?"
    )


def test_one_kind_has_one_class() -> None:
    class Other(Component):
        kind: Literal["leaf"] = "leaf"

    with pytest.raises(AssertionError, match="test_part kind 'leaf' is already"):
        register("test_part", "leaf")(Other)
    assert find_kind("test_part", "leaf") is Leaf


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (
        importlib.metadata.EntryPoint("plugged", f"{__name__}:Plugged", "lowtide.test_part"),
        importlib.metadata.EntryPoint("gone", "lowtide_no_such_package:X", "lowtide.test_part"),
        importlib.metadata.EntryPoint("odd", "pathlib:Path", "lowtide.test_part"),
    )
    found = importlib.metadata.EntryPoints(entries)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **by: found.select(**by))


@pytest.mark.usefixtures("plugin")
def test_a_plugin_is_a_kind_like_any_other(tmp_path: Path) -> None:
    config = parts(tmp_path, "first: {kind: plugged, depth: 4}\nfree: '${first.depth}'").config
    assert Builder().build(config.first) == "depth 4"
    assert config.free == 4
    assert "first.dept: unknown key; legal: kind, depth. Did you mean 'depth'?" in parts_complaint(
        tmp_path, "first: {kind: plugged, dept: 4}"
    )
    assert "legal: custom, gone, leaf, odd, plugged, torch_linear" in parts_complaint(tmp_path, "first: {kind: x}")


@pytest.mark.usefixtures("plugin")
def test_a_broken_plugin_is_named(tmp_path: Path) -> None:
    said = parts_complaint(tmp_path, "first: {kind: gone}")
    assert said.startswith("train.yaml:1: first.kind: got 'gone'; the plugin 'gone' (lowtide_no_such_package:X)")
    assert "ModuleNotFoundError: No module named 'lowtide_no_such_package'" in said
    assert "is no subclass of lowtide.training.registry.Component" in parts_complaint(tmp_path, "first: {kind: odd}")


def test_custom_is_checked_by_its_own_class(tmp_path: Path) -> None:
    text = f"first: {{kind: custom, target: '{HERE}:Wrapped', config: {{width: 5}}}}"
    config = parts(tmp_path, text).config
    assert isinstance(config.first, Custom)
    assert config.first.config == Wrapped.Config(width=5)
    made = Builder().build(config.first, rank=3)
    assert isinstance(made, Wrapped)
    assert (made.config.width, made.arguments) == (5, {"rank": 3})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "target: '{HERE}:Wrapped', config: {{width: 0}}",
            "first.config.width: got 0; legal: a whole number, at least 1",
        ),
        (
            "target: '{HERE}:Wrapped', config: {{widht: 3}}",
            "first.config.widht: unknown key; legal: width, inner. Did you mean 'width'?",
        ),
        ("target: '{HERE}:Wrappd'", "first.target: got '{HERE}:Wrappd'; no Wrappd in {HERE}; legal: "),
        ("target: '{HERE}:MINIMAL'", "first.target: got '{HERE}:MINIMAL'; should name a class"),
        ("target: '{HERE}'", "first.target: got '{HERE}'; should read package.module:Class"),
        ("target: 'no_such_thing:X'", "importing 'no_such_thing' failed with ModuleNotFoundError: No module named"),
        ("target: '{HERE}:Bare', config: {{a: 1}}", "first.config: got {{a: 1}}; {HERE}:Bare has no Config"),
        ("config: {{a: 1}}", "first.target: is required; legal: text"),
        ("target: '{HERE}:Wrapped', config: 3", "first.config: got 3; legal: a mapping with width, inner"),
    ],
)
def test_a_custom_entry_that_is_wrong(tmp_path: Path, entry: str, message: str) -> None:
    said = parts_complaint(tmp_path, "first: {kind: custom, " + entry.format(HERE=HERE) + "}")
    assert message.format(HERE=HERE) in said
    assert said.startswith("train.yaml:1: first.")


def test_code_that_fails_while_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lowtide_test_broken.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    said = complaint(tmp_path, "model: {kind: custom, target: 'lowtide_test_broken:X'}\ndata: {kind: random}\n")
    assert said == (
        "train.yaml:1: model.target: got 'lowtide_test_broken:X'; importing 'lowtide_test_broken' failed with "
        "RuntimeError: not today"
    )


def test_without_allowed_code_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "imported"
    (tmp_path / "lowtide_test_flagged.py").write_text(
        f"import pathlib\npathlib.Path({str(flag)!r}).touch()\nclass Net: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = "model: {kind: custom, target: 'lowtide_test_flagged:Net', config: {anything: [1]}}\ndata: {kind: random}\n"
    loaded = read(tmp_path, text, allow_code=False)
    assert loaded.resolved["model"]["config"] == {"anything": [1]}
    assert not flag.exists()
    with pytest.raises(UserError):
        read(tmp_path, text, allow_code=True)
    assert flag.exists()


def test_the_form_of_a_target_is_checked_without_code(tmp_path: Path) -> None:
    said = complaint(tmp_path, MINIMAL.replace("decoder", "custom, target: os.system"), allow_code=False)
    assert said == "train.yaml:1: model.target: got 'os.system'; should read package.module:Class"


def test_a_custom_component_made_in_python_is_checked_when_it_is_built() -> None:
    config = Assembly.model_validate(
        {"first": {"kind": "custom", "target": f"{HERE}:Wrapped", "config": {"inner": {"kind": "leaf", "size": 9}}}}
    )
    assert Builder().build(config.first).inner.size == 9
    wrong = Assembly.model_validate({"first": {"kind": "custom", "target": f"{HERE}:Wrapped", "config": {"width": 0}}})
    with pytest.raises(ConfigError, match=r"config\.width: Input should be greater than or equal to 1"):
        Builder().build(wrong.first)
    nowhere = Assembly.model_validate({"first": {"kind": "custom", "target": f"{HERE}:Nothing"}})
    with pytest.raises(ConfigError, match=r"no Nothing in tests\.helpers\.configs"):
        Builder().build(nowhere.first)


def test_a_class_without_config_is_called_without_one() -> None:
    config = Assembly.model_validate({"first": {"kind": "custom", "target": f"{HERE}:Bare"}})
    assert Builder().build(config.first, rank=1).arguments == {"rank": 1}


def test_the_written_config_keeps_shared_components_shared(tmp_path: Path) -> None:
    text = "first: {kind: tree, left: {kind: leaf}, right: '${first.left}'}\nmany: ['${first.left}', '${first}']\n"
    loaded = parts(tmp_path, text)
    assert loaded.resolved["first"]["right"] == "${first.left}"
    assert loaded.resolved["many"] == ["${first.left}", "${first}"]
    again = load(Assembly, write(tmp_path, to_yaml(loaded.resolved), "again.yaml"))
    assert again.config == loaded.config
    assert again.config.first.left is again.config.first.right is again.config.many[0]
    assert again.config.many[1] is again.config.first
