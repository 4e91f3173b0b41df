"""Patterns over FQNs: parsing never surprises, matching agrees with a matcher written apart from it."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lowtide.policy import Pattern, match_fqns

SEGMENTS = st.sampled_from(["layers", "layer_a", "mlp", "0", "1", "2", "3", "7", "10", "m"])
FQNS = st.lists(st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join), max_size=10, unique=True)
INDEX = st.integers(-3, 11)


@st.composite
def ranges(draw: st.DrawFn) -> str:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(INDEX)
        if draw(st.booleans()):
            last = draw(INDEX)
            if (first >= 0) == (last >= 0):
                first, last = min(first, last), max(first, last)
            parts.append(f"{first}-{last}")
        else:
            parts.append(str(first))
    return "{" + ",".join(parts) + "}"


PATTERN_SEGMENTS = st.one_of(SEGMENTS, st.sampled_from(["*", "**", "layer*", "?", "m*", "*_?", "1*"]), ranges())
PATTERNS = st.lists(PATTERN_SEGMENTS, min_size=1, max_size=5).map(".".join)


def brute_match(pattern: str, name: str, names: list[str]) -> bool:
    """By trying every way to share the name's segments out, straight from the description of patterns."""
    return _brute(re.split(r"\.(?![^{]*\})", pattern), name.split("."), [], names)


def _brute(pattern: list[str], rest: list[str], before: list[str], names: list[str]) -> bool:
    if not pattern:
        return not rest
    head, *tail = pattern
    if head == "**":
        return any(_brute(tail, rest[i:], before + rest[:i], names) for i in range(len(rest) + 1))
    return bool(rest) and _one(head, rest[0], before, names) and _brute(tail, rest[1:], [*before, rest[0]], names)


def _one(head: str, segment: str, before: list[str], names: list[str]) -> bool:
    if not head.startswith("{"):
        regex = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in head)
        return re.fullmatch(regex, segment) is not None
    if not segment.isdecimal():
        return False
    paths = [n.split(".") for n in names]
    siblings = {p[len(before)] for p in paths if p[: len(before)] == before and len(p) > len(before)}
    numbers = sorted(int(s) for s in siblings if s.isdecimal())
    wanted: set[int] = set()
    for part in head[1:-1].split(","):
        first, last = _ends(part)
        low = numbers[first] if first < 0 and -first <= len(numbers) else first
        high = numbers[last] if last < 0 and -last <= len(numbers) else last
        if low < 0 or high < 0:
            continue
        wanted.update(range(low, high + 1))
    return int(segment) in wanted


def _ends(part: str) -> tuple[int, int]:
    found = re.fullmatch(r"(-?\d+)(?:-(-?\d+))?", part)
    assert found is not None
    return int(found[1]), int(found[2] if found[2] is not None else found[1])


@given(PATTERNS, FQNS)
@example("**.{-1}", ["a.0.1", "a.0.2", "a.1.0", "b"])
@example("**.**.0", ["0", "a.0"])
@example("layers.{-1}", ["layers.2", "layers.10"])
def test_matching_agrees_with_a_matcher_by_brute_force(pattern, names):
    assert Pattern.parse(pattern).match(names) == [n for n in names if brute_match(pattern, n, names)]


@given(st.text(max_size=30) | st.text(alphabet="ab0.{}-,*?[]! ", max_size=20))
def test_parsing_any_text_gives_a_pattern_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        pattern = Pattern.parse(text)
        assert pattern.text == text
        pattern.match(["a.0.b", "a.1.b", "", "0"])


@given(FQNS)
def test_a_plain_name_matches_itself_only(names):
    for name in names:
        assert Pattern.parse(name).match(names) == [name]


@given(st.lists(PATTERNS, min_size=1, max_size=3, unique=True), FQNS)
def test_match_fqns_answers_for_every_pattern_in_the_order_of_names(patterns, names):
    found = match_fqns(patterns, names)
    assert list(found) == patterns
    for matched in found.values():
        assert matched == [n for n in names if n in matched]


def test_many_double_stars_do_not_explode():
    pattern = Pattern.parse(".".join(["**", "a"] * 20 + ["z"]))
    assert pattern.match([".".join(["a"] * 200)]) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ".",
        "a.",
        ".a",
        "a..b",
        "a.{0",
        "a.0}",
        "a.{}",
        "a.{x}",
        "a.{3-1}",
        "a.{-1--3}",
        "a.{0}{1}",
        "a***",
        "a.[01]",
        "a b",
    ],
)
def test_what_is_no_pattern_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match=re.escape(repr(text)) if text.strip() else "empty pattern"):
        Pattern.parse(text)
