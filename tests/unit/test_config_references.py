"""``${...}``: types kept, identity kept, and every way to get one wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lowtide.errors import ConfigError
from lowtide.policy import SelectiveOp
from lowtide.training.config import TrainConfig, load, to_yaml
from tests.helpers.configs import parts, parts_complaint, write


def test_a_whole_reference_keeps_the_type(tmp_path: Path) -> None:
    config = parts(
        tmp_path,
        """
        numbers: {count: 7, rate: "${numbers.count}", on: true, sizes: ["${numbers.count}", "${numbers.sizes.0}"]}
        free: {a: "${numbers.on}", b: "${numbers.count}", c: "${numbers.sizes}", d: "${free.e[1].k}", e: [0, {k: null}]}
        """,
    ).config
    assert config.numbers.rate == 7.0
    assert config.numbers.sizes == (7, 7)
    assert config.free["a"] is True
    assert config.free["b"] == 7
    assert type(config.free["b"]) is int
    assert config.free["c"] == [7, 7]
    assert config.free["d"] is None


def test_inside_text_a_reference_becomes_text(tmp_path: Path) -> None:
    config = parts(
        tmp_path,
        """
        numbers: {count: 7, rate: 3e-4, on: true, name: "n${numbers.count}-r${numbers.rate}-${numbers.on}$${x}"}
        """,
    ).config
    assert config.numbers.name == "n7-r0.0003-true${x}"


def test_a_field_that_the_file_leaves_out_gives_its_default(tmp_path: Path) -> None:
    config = parts(
        tmp_path, "free: ['${numbers.count}', '${numbers.sizes.1}', '${first.size}', '${second}']\nfirst: {kind: leaf}"
    ).config
    assert config.free == [3, 2, 1, {"kind": "leaf", "size": 1, "label": "plain"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "numbers:\n  name: ${numbers.cuont}\n",
            "train.yaml:2: numbers.name: ${numbers.cuont}: numbers has no 'cuont'. "
            "Legal: name, count, rate, on, sizes. Did you mean 'count'?",
        ),
        (
            "numbers: {count: '${nubmers.rate}'}",
            "train.yaml:1: numbers.count: ${nubmers.rate}: the config has no 'nubmers'. "
            "Legal: numbers, first, second, many, free. Did you mean 'numbers'?",
        ),
        ("free: ['${free.3}', 1]", "train.yaml:1: free.0: ${free.3}: free has no '3'. Legal: 0, 1."),
        (
            "numbers: {count: 2, name: '${numbers.count.x}'}",
            "train.yaml:1: numbers.name: ${numbers.count.x}: numbers.count is 2, which has no fields",
        ),
        (
            "free: {a: '${free.b}', b: '${free.c}', c: '${free.a}'}",
            "train.yaml:1: free.a: '${free.b}' goes round in a circle: free.a -> free.b -> free.c -> free.a",
        ),
        ("free: '${free}'", "train.yaml:1: free: '${free}' goes round in a circle: free -> free"),
        ("free: {a: {b: '${free}'}}", "free.a.b: is inside free, which it names"),
        ("free: {a: {b: '${free.c}'}, c: {d: '${free.a}'}}", ", which it names"),
        ("free: '${numbers'", "free: '${numbers' holds no whole reference; legal: ${section.field}, ${env:NAME}"),
        ("free: '${}'", "free: '${}' holds no whole reference"),
        ("free: 'a ${numbers} b'", "free: ${numbers} is a mapping, which cannot stand inside text"),
        ("free: 'a ${numbers.sizes} b'", "free: ${numbers.sizes} is a list, which cannot stand inside text"),
        ("free: '${oc.env:HOME}'", "free: '${oc.env:HOME}' holds no whole reference"),
        ("free: '${env:}'", "free: ${env:} names no variable; write ${env:NAME}"),
        (
            "free: '${env:TOKN}'",
            "free: the environment has no 'TOKN'; set it, or write ${env:TOKN:-text}. Did you mean 'TOKEN'?",
        ),
    ],
)
def test_a_reference_that_cannot_be_followed(tmp_path: Path, text: str, message: str) -> None:
    assert message in parts_complaint(tmp_path, text, TOKEN="hidden-value")


def test_a_broken_reference_is_told_once_and_other_errors_too(tmp_path: Path) -> None:
    said = parts_complaint(tmp_path, "numbers:\n  count: ${numbers.x}\n  rate: -1\n  sizes: ['${numbers.count}']\n")
    lines = said.splitlines()
    assert lines[0] == "train.yaml: 2 errors"
    assert lines[1].startswith("  train.yaml:2: numbers.count: ${numbers.x}: numbers has no 'x'.")
    assert lines[2] == "  train.yaml:3: numbers.rate: got -1; legal: a number, above 0 and below 10"


def test_environment_values_are_read_as_text_and_by_fields_as_what_they_need(tmp_path: Path) -> None:
    text = "numbers: {count: '${env:N}', name: '${env:S}/x', on: '${env:B}', rate: '${env:MISSING:-2.5}'}"
    config = parts(tmp_path, text, N="12", S="123", B="true").config
    assert (config.numbers.count, config.numbers.name, config.numbers.on) == (12, "123/x", True)
    assert config.numbers.rate == 2.5


def test_environment_values_are_never_written(tmp_path: Path) -> None:
    loaded = parts(
        tmp_path,
        """
        numbers: {count: '${env:N}', name: 'key ${env:SECRET} of $${x}', sizes: ['${env:N}']}
        first: {kind: leaf, label: '${env:SECRET}'}
        free: {deep: ['${first.label}', '${env:SECRET:-other}'], plain: '$${y}'}
        """,
        N="12",
        SECRET="hunter2-hunter2",
    )
    assert loaded.config.first.label == "hunter2-hunter2"
    assert loaded.resolved["numbers"]["count"] == "${env:N}"
    assert loaded.resolved["numbers"]["sizes"] == ["${env:N}"]
    assert loaded.resolved["numbers"]["name"] == "key ${env:SECRET} of $${x}"
    assert loaded.resolved["first"]["label"] == "${env:SECRET}"
    assert loaded.resolved["free"] == {"deep": ["${env:SECRET}", "${env:SECRET:-other}"], "plain": "$${y}"}
    for written in (json.dumps(loaded.resolved), to_yaml(loaded.resolved), loaded.given):
        assert "hunter2" not in written


def test_environment_values_that_a_class_takes_apart_are_never_written(tmp_path: Path) -> None:
    text = """
    model: {kind: decoder}
    data: {kind: random}
    policy: {kind: selective_op, save: ["${env:OP}", {op: aten.mm, keep: "${env:KEEP}"}]}
    """
    environment = {"OP": "aten.bmm", "KEEP": "3/7"}
    loaded = load(TrainConfig, write(tmp_path, text), environment=environment)
    assert loaded.config.policy == SelectiveOp(save=("aten.bmm", {"op": "aten.mm", "keep": "3/7"}))
    assert loaded.resolved["policy"]["save"] == [
        "${env:OP}",
        {"op": "aten.mm", "keep": "${env:KEEP}", "optional": False},
    ]
    again = load(TrainConfig, write(tmp_path, to_yaml(loaded.resolved)), environment=environment)
    assert again.config == loaded.config


def test_environment_values_stand_in_no_message(tmp_path: Path) -> None:
    text = """
    numbers: {count: '${env:SECRET}', rate: 'x${env:SECRET}', sizes: ['${numbers.count}'], on: '${env:SECRET}'}
    first: {kind: '${env:SECRET}'}
    second: '${env:SECRET}'
    """
    said = parts_complaint(tmp_path, text, SECRET="hunter2-hunter2")
    assert "hunter2" not in said
    assert "numbers.count: got ${env:SECRET}; legal: a whole number, at least 1" in said
    assert "numbers.rate: got x${env:SECRET}; legal: a number" in said
    assert "first.kind: got ${env:SECRET}; no such kind of test_part" in said


def test_the_written_config_loads_to_an_equal_one(tmp_path: Path) -> None:
    text = """
    numbers: {count: '${env:N}', name: '$${a} ${env:N}', rate: 3e-4}
    free: ["3e-4", "on", "1e5", "0x1f", "0o7", "12", "~", "${numbers.rate}", 1e-30, .inf, "$${numbers.rate}", "null"]
    """
    first = parts(tmp_path, text, N="5")
    again = parts(tmp_path, to_yaml(first.resolved), N="5")
    assert again.config == first.config
    assert again.resolved == first.resolved


def test_a_file_that_grows_when_written_out_is_refused(tmp_path: Path) -> None:
    lines = ["l0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"l{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 12)]
    aliases = "free: {" + ", ".join(lines) + "}"
    lines = ["l0: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"l{i}: [" + ", ".join([f"'${{free.l{i - 1}}}'"] * 10) + "]" for i in range(1, 12)]
    references = "free: {" + ", ".join(lines) + "}"
    # Written out, either holds 10**12 values: were they followed first, this would never end.
    for text in (aliases, references):
        assert "once references are followed" in parts_complaint(tmp_path, text)


def test_text_that_grows_is_refused(tmp_path: Path) -> None:
    lines = ["t0: aaaaaaaaaaaaaaaa"]
    lines += [f"t{i}: '${{free.t{i - 1}}}${{free.t{i - 1}}}'" for i in range(1, 25)]
    said = parts_complaint(tmp_path, "free: {" + ", ".join(lines) + "}")
    assert "text of 131072 characters; at most 65536 are read" in said


def test_a_long_chain_of_references_is_refused_without_a_recursion_error(tmp_path: Path) -> None:
    lines = ["t4000: 1", *(f"t{i}: '${{free.t{i + 1}}}'" for i in range(4000))]
    assert "references one behind the other" in parts_complaint(tmp_path, "free: {" + ", ".join(lines) + "}")
    nested = ["t4000: 1", *(f"t{i}: {{x: '${{free.t{i + 1}}}'}}" for i in range(4000))]
    assert "40 levels once references are followed" in parts_complaint(tmp_path, "free: {" + ", ".join(nested) + "}")


def test_the_written_yaml_is_plain_yaml_for_others_too(tmp_path: Path) -> None:
    loaded = parts(tmp_path, "numbers: {rate: 3e-4, name: 'on'}")
    assert yaml.safe_load(to_yaml(loaded.resolved)) == loaded.resolved


def test_a_reference_in_an_override_is_followed(tmp_path: Path) -> None:
    assert parts(tmp_path, "numbers: {count: 4}", "numbers.sizes=[9, '${numbers.count}']").config.numbers.sizes == (
        9,
        4,
    )


def test_messages_name_the_file_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.training.config import load_config

    write(tmp_path, "run: 3\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^train.yaml: 3 errors\n"):
        load_config("train.yaml")
