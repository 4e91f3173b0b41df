"""Glob patterns over fully qualified names (FQNs), matched segment by segment.

    *          one segment; inside a segment, any characters (``layer_*``)
    **         any number of segments, also none
    {0-7}      a numeric segment in a range, or in a list of ranges: ``{0-3,8,12-15}``
    {-1}       counted from the last of the numeric segments that stand at this place

A pattern matches whole names only: ``model.layers.*`` matches the blocks and not what is inside them.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.errors import PolicyError

_RANGE = re.compile(r"(-?\d{1,9})(?:-(-?\d{1,9}))?")
_LONGEST = 500
_SEGMENT = re.compile(r"[\w*?-]+")


@dataclass(frozen=True)
class _Indices:
    """A ``{...}`` segment: pairs of first and last, both included; below zero counts from the end."""

    ranges: tuple[tuple[int, int], ...]

    def contains(self, index: int, present: Sequence[int]) -> bool:
        """Tell whether ``index`` is meant, where ``present`` are all indices at this place, ascending."""
        for first, last in self.ranges:
            low, high = _absolute(first, present), _absolute(last, present)
            if low is not None and high is not None and low <= index <= high:
                return True
        return False


def _absolute(value: int, present: Sequence[int]) -> int | None:
    if value >= 0:
        return value
    return present[value] if -value <= len(present) else None


@dataclass(frozen=True)
class Pattern:
    """A parsed glob over FQNs."""

    text: str
    segments: tuple[str | _Indices, ...]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse a glob.

        Raises:
            PolicyError: an empty segment, an unclosed brace or a range that is none.
        """
        if not text.strip():
            raise PolicyError("an empty pattern matches nothing")
        if len(text) > _LONGEST:
            raise PolicyError(f"a pattern of {len(text)} characters; no name is longer than {_LONGEST}")
        return cls(text, tuple(_parse_segment(s, text) for s in _split(text)))

    def match(self, fqns: Iterable[str]) -> list[str]:
        """Return the FQNs that match, in the order given."""
        names = list(fqns)
        present = _indices_by_place(names)
        return [n for n in names if _matches(self.segments, tuple(n.split(".")), present)]


def _split(text: str) -> list[str]:
    """Split at dots outside braces."""
    return re.findall(r"(?:\{[^}]*\}|[^.])+|(?<=\.)(?=\.|$)|^(?=\.)", text)


def _parse_segment(segment: str, text: str) -> str | _Indices:
    if segment.startswith("{") and segment.endswith("}"):
        return _Indices(tuple(_parse_range(part.strip(), text) for part in segment[1:-1].split(",")))
    if not _SEGMENT.fullmatch(segment) or ("**" in segment and segment != "**"):
        raise PolicyError(
            f"{text!r}: the segment {segment!r} is not legal. A segment is a name, *, ** or indices in braces, "
            "as in model.layers.{0-7}, layers.{-1}, layers.{0-3,8}"
        )
    return segment


def _parse_range(part: str, text: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise PolicyError(f"{text!r}: {part!r} is not an index or a range of indices such as 0-7 or -1")
    first = int(found[1])
    last = int(found[2]) if found[2] is not None else first
    if (first >= 0) == (last >= 0) and last < first:
        raise PolicyError(f"{text!r}: the range {part!r} runs backwards")
    return first, last


def _indices_by_place(names: Iterable[str]) -> dict[tuple[str, ...], list[int]]:
    found: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                found[tuple(parts[:i])].add(int(part))
    return {place: sorted(indices) for place, indices in found.items()}


def _matches(
    pattern: Sequence[str | _Indices], name: tuple[str, ...], present: dict[tuple[str, ...], list[int]]
) -> bool:
    """Match by the set of places reached so far, so that many ``**`` cost a product and not a power."""
    reach = {0}
    for segment in pattern:
        if segment == "**":
            reach = set(range(min(reach), len(name) + 1)) if reach else set()
            continue
        reach = {i + 1 for i in reach if i < len(name) and _segment_matches(segment, name, i, present)}
    return len(name) in reach


def _segment_matches(
    segment: str | _Indices, name: tuple[str, ...], i: int, present: dict[tuple[str, ...], list[int]]
) -> bool:
    if isinstance(segment, _Indices):
        return name[i].isdecimal() and segment.contains(int(name[i]), present[name[:i]])
    return fnmatch.fnmatchcase(name[i], segment)


def match_fqns(patterns: Iterable[str], fqns: Iterable[str]) -> dict[str, list[str]]:
    """Return, for each pattern, the FQNs that it matches, in the order given.

    Raises:
        PolicyError: a pattern that does not parse.
    """
    names = list(fqns)
    return {text: Pattern.parse(text).match(names) for text in patterns}
