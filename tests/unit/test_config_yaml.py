"""What YAML text becomes: YAML 1.2 scalars with lines, and refusals that name the line."""

from __future__ import annotations

import math

import pytest

from lowtide.errors import ConfigError
from lowtide.training.config._document import MAX_ALIASES, MAX_DEPTH, Seq, Table, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e6", 1e6),
        ("-2.5E+3", -2500.0),
        (".5", 0.5),
        ("7.", 7.0),
        ("12", 12),
        ("-0", 0),
        ("010", 10),
        ("0o17", 15),
        ("0xff", 255),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-12-01", "2026-12-01"),
        ("'3e-4'", "3e-4"),
        ('"true"', "true"),
        ("!!str 12", "12"),
        ("1e", "1e"),
        ("nan", "nan"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    found = read_yaml(f"a: {text}\n", source="x.yaml")["a"]
    assert found == value
    assert type(found) is type(value)


def test_not_a_number_is_read() -> None:
    assert math.isnan(read_yaml("a: .nan", source="x.yaml")["a"])


def test_every_value_knows_its_line() -> None:
    root = read_yaml("a: 1\n\nb:\n  c: [1,\n    2]\n  d:\n  - x\n  - y: z\n", source="x.yaml")
    assert isinstance(root, Table)
    assert {k: m.line for k, m in root.marks.items()} == {"a": 1, "b": 3}
    inner = root["b"]
    assert {k: m.line for k, m in inner.marks.items()} == {"c": 4, "d": 6}
    assert isinstance(inner["c"], Seq)
    assert {k: m.line for k, m in inner["c"].marks.items()} == {0: 4, 1: 5}
    assert inner["d"][1].marks["y"].line == 8
    assert str(inner["d"].marks[1]) == "x.yaml:8"


def test_an_alias_is_the_object_that_it_names() -> None:
    root = read_yaml("a: &x {k: 1}\nb: *x\nc: [*x, {k: 1}]\n", source="x.yaml")
    assert root["a"] is root["b"]
    assert root["c"][0] is root["a"]
    assert root["c"][1] is not root["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: a: this key stands twice, first at x.yaml:1"),
        ("s:\n  k: 1\n  k: 2\n", "x.yaml:3: s.k: this key stands twice, first at x.yaml:2"),
        ("a: [1, 2\n", "x.yaml:2: this is not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: a second document starts here; a config is one document"),
        ("a: !!python/object/apply:os.system [x]\n", "x.yaml:1: a: the tag 'tag:yaml.org,2002:python/object/apply"),
        ("a: !mine 3\n", "x.yaml:1: a: the tag '!mine' is refused; a config holds plain values"),
        ("a: &x {k: 1}\nb:\n  <<: *x\n", "x.yaml:3: b: merge keys (<<) are not used here"),
        ("a: &x [*x]\n", "x.yaml:1: a.0: *x stands inside what it names"),
        ("a: *nowhere\n", "x.yaml:1: a: *nowhere names no anchor above it"),
        ("? [1, 2]\n: x\n", "x.yaml:1: a list or mapping stands as a key; keys are text"),
        ("a: &k b\n*k : c\n", "x.yaml:2: *k stands as a key; keys are text"),
        ('a: "\\ud800"\n', "x.yaml:1: a: text with half a surrogate pair"),
        ("a: 1" + "0" * 5000 + "\n", "x.yaml:1: a: a number of 5001 digits; at most 400 are read"),
        ("a: \x00\n", "x.yaml: this is not YAML: unacceptable character #x0000"),
        ('a: "\\UFFFFFFFF"\n', "x.yaml: this is not YAML:"),
    ],
)
def test_what_is_refused_names_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, source="x.yaml")
    assert message in str(caught.value)


def test_all_refusals_of_a_file_stand_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml("a: 1\na: 2\nb: !x 3\n", source="x.yaml")
    assert str(caught.value).splitlines() == [
        "x.yaml: 2 errors",
        "  x.yaml:2: a: this key stands twice, first at x.yaml:1",
        "  x.yaml:3: b: the tag '!x' is refused; a config holds plain values",
    ]


def test_depth_is_limited_without_a_recursion_error() -> None:
    read_yaml("a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), source="x.yaml")
    with pytest.raises(ConfigError, match=f"nested more than {MAX_DEPTH} deep"):
        read_yaml("a: " + "[" * 50_000, source="x.yaml")


def test_aliases_are_limited() -> None:
    many = "a: &x 1\nb: [" + ", ".join(["*x"] * (MAX_ALIASES + 1)) + "]\n"
    with pytest.raises(ConfigError, match=f"more than {MAX_ALIASES} aliases"):
        read_yaml(many, source="x.yaml")
