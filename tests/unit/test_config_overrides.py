"""``--set section.field=value``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.configs import MINIMAL, complaint, parts, parts_complaint, read


def test_the_value_is_yaml_and_the_last_one_wins(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        MINIMAL,
        "optimizer.lr=1e-2",
        "optimizer.lr=3e-4",
        "optimizer.kind=adamw",
        "policy={kind: every_nth_layer, n: 2}",
        "compile=true",
        "run.name='7'",
        "training.max_grad_norm=null",
        "run.directory=a=b",
    ).config
    assert config.optimizer.lr == 3e-4
    assert config.policy.n == 2
    assert config.compile is True
    assert config.run.name == "7"
    assert config.training.max_grad_norm is None
    assert config.run.directory == "a=b"


def test_a_field_of_a_section_that_the_file_leaves_out_changes_the_default(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL, "optimizer.lr=3e-4", "sharding.reshard_after_forward=false").config
    assert (config.optimizer.kind, config.optimizer.lr) == ("adamw", 3e-4)
    assert config.sharding.kind == "fsdp2"
    assert "policy.kind: is required" in complaint(tmp_path, MINIMAL, "policy.n=2"), "none, the default, has no n"


@pytest.mark.parametrize("path", ["many.1.size", "many[1].size"])
def test_list_items_are_set_by_index(tmp_path: Path, path: str) -> None:
    config = parts(tmp_path, "many: [{kind: leaf}, {kind: leaf}]", f"{path}=5").config
    assert [leaf.size for leaf in config.many] == [1, 5]


def test_the_index_behind_the_last_appends(tmp_path: Path) -> None:
    assert len(parts(tmp_path, "many: [{kind: leaf}]", "many.1={kind: leaf}").config.many) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "traning.steps=3",
            "--set traning.steps=3: traning: unknown key; legal: run, launch, model, data, policy, sharding, "
            "precision, compile, estimate, optimizer, schedule, training, evaluation, checkpoint, profile, logging. "
            "Did you mean 'training'?",
        ),
        (
            "training.stps=3",
            "--set training.stps=3: training.stps: unknown key; legal: steps, grad_accumulation, max_grad_norm, "
            "deterministic. Did you mean 'steps'?",
        ),
        (
            "training.steps=0",
            "--set training.steps=0: training.steps: got 0; legal: a whole number, at least 1",
        ),
        ("training.steps", "--set training.steps: write --set section.field=value"),
        ("=3", "--set =3: write --set section.field=value"),
        ("training..steps=3", "--set training..steps=3: write --set section.field=value"),
        ("compile.x.y=3", "--set compile.x.y=3: compile.x: got"),
        ("model.kind.x=3", "--set model.kind.x=3: model.kind is 'decoder', which has no fields"),
        ("training.steps=[1", "--set training.steps=[1: this is not YAML: expected ',' or ']'"),
        ("training.steps=!x 3", "--set training.steps=!x 3: the tag '!x' is refused"),
    ],
)
def test_a_wrong_override_is_named_as_it_was_written(tmp_path: Path, override: str, message: str) -> None:
    text = MINIMAL + "compile: {x: 1}\n" if override.startswith("compile") else MINIMAL
    if override.startswith("compile"):
        message = "--set compile.x.y=3: compile.x is 1, which has no fields"
    assert complaint(tmp_path, text, override).startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("many.2.size=1", "many.2: this list has 1 items; legal indices: 0 to 0"),
        ("many.x.size=1", "many.x: 'x' is no index of this list; legal: 0 to 0"),
        ("many.-1.size=1", "many.-1: this list has 1 items; legal indices: 0 to 0"),
        ("many.5={kind: leaf}", "many.5: this list has 1 items; legal indices: 0 to 1"),
        ("second.size=2", "second is the reference ${first}; set the field there, or second as a whole"),
    ],
)
def test_a_path_that_leads_nowhere(tmp_path: Path, override: str, message: str) -> None:
    text = "first: {kind: leaf}\nsecond: ${first}\nmany: [{kind: leaf}]\n"
    assert parts_complaint(tmp_path, text, override) == f"--set {override}: {message}"


def test_an_alias_is_not_changed_behind_the_back_of_what_it_names(tmp_path: Path) -> None:
    text = "first: &f {kind: leaf}\nsecond: *f\n"
    assert "second is an alias: it is one object with what it names" in parts_complaint(tmp_path, text, "second.size=2")
    shared = parts(tmp_path, text, "first.size=2").config
    assert shared.first is shared.second
    assert shared.second.size == 2
    apart = parts(tmp_path, text, "second={kind: leaf}", "second.size=2").config
    assert (apart.first.size, apart.second.size) == (1, 2)


def test_all_wrong_overrides_are_told(tmp_path: Path) -> None:
    said = complaint(tmp_path, MINIMAL, "a", "b", "training.steps=2")
    assert said.splitlines() == [
        "--set a: write --set section.field=value",
        "--set b: write --set section.field=value",
    ]


def test_an_override_beats_a_reference_of_the_file(tmp_path: Path) -> None:
    config = parts(tmp_path, "numbers: {count: 2, rate: '${numbers.count}'}", "numbers.count=5").config
    assert config.numbers.rate == 5.0
