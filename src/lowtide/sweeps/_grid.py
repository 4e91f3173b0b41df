"""From a sweep file to its cells: each a mapping of dotted paths to values, in a fixed order.

grid x paired ──► combinations ─┐
                   points ──────┴─► settings below ─► adjust ─► leave_out ─► equal ones once
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.errors import ConfigError, NothingMatchedError, listing, nearest
from lowtide.sweeps._config import SweepConfig

__all__ = ["MOST_CELLS", "Point", "canonical", "expand", "flatten", "label_of"]

MOST_CELLS = 20_000
_MISSING = object()


@dataclass(frozen=True)
class Point:
    """One cell of a grid: what it sets over the base."""

    settings: dict[str, Any]
    varied: tuple[str, ...]
    """The fields by which it differs from others."""


def expand(sweep: SweepConfig, base: Mapping[str, Any]) -> list[Point]:
    """Return the cells of a sweep.

    Args:
        sweep: the file.
        base: the config below every cell, as plain data; conditions may name any field of it.

    Raises:
        ConfigError: there are too many cells, or none.
        NothingMatchedError: a condition names a field that no cell has, or meets none.
    """
    found: list[Point] = []
    for own in _combinations(sweep):
        settings = {**sweep.settings, **own}
        varied = list(own)
        for adjustment in sweep.adjust:
            if _meets(_overlay(base, settings), adjustment.when):
                settings |= adjustment.settings
                varied += [name for name in adjustment.settings if name not in varied]
        found.append(Point(settings, tuple(varied)))
    _check_conditions(sweep, base, found)
    kept = [p for p in found if not any(_meets(_overlay(base, p.settings), when) for when in sweep.leave_out)]
    if not kept:
        raise ConfigError("this sweep has no cells: leave_out leaves all of them out")
    once = {canonical(point.settings): point for point in reversed(kept)}
    return list(reversed(once.values()))


def _combinations(sweep: SweepConfig) -> list[dict[str, Any]]:
    axes: list[list[dict[str, Any]]] = [[{name: value} for value in values] for name, values in sweep.grid.items()]
    axes += [
        [dict(zip(entry, row, strict=True)) for row in zip(*entry.values(), strict=True)] for entry in sweep.paired
    ]
    count = math.prod(len(axis) for axis in axes) + len(sweep.points)
    if count > MOST_CELLS:
        raise ConfigError(f"this sweep has {count:,} cells; {MOST_CELLS:,} at most are legal. Split it up")
    if not axes and sweep.points:
        return [dict(point) for point in sweep.points]
    product = [_merged(parts) for parts in itertools.product(*axes)]
    return [*product, *(dict(point) for point in sweep.points)]


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= part
    return merged


def _check_conditions(sweep: SweepConfig, base: Mapping[str, Any], points: Sequence[Point]) -> None:
    conditions = [("leave_out", i, when) for i, when in enumerate(sweep.leave_out)]
    conditions += [("adjust", i, each.when) for i, each in enumerate(sweep.adjust)]
    if not conditions:
        return
    documents = [_overlay(base, point.settings) for point in points]
    for where, index, when in conditions:
        for path in when:
            if all(_look(document, path) is _MISSING for document in documents):
                names = {name for document in documents[:50] for name in _all_paths(document)}
                near = nearest(path, sorted(names))
                hint = f" Nearest: {listing(near)}." if near else ""
                raise NothingMatchedError(f"{where}[{index}]: no cell of this sweep has a field {path!r}.{hint}")
        if where == "leave_out" and not any(_meets(document, when) for document in documents):
            raise NothingMatchedError(
                f"{where}[{index}]: {canonical(when)} meets none of the {len(points)} cells; correct it or leave it out"
            )


def _overlay(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    document: Any = copy.deepcopy(dict(base))
    for path, value in settings.items():
        *parents, last = path.split(".")
        box = document
        for part in parents:
            inner = box.get(part)
            if not isinstance(inner, dict):
                inner = box[part] = {}
            box = inner
        box[last] = value
    return document


def _look(document: Mapping[str, Any], path: str) -> Any:
    value: Any = document
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _meets(document: Mapping[str, Any], when: Mapping[str, Any]) -> bool:
    return all(_is(_look(document, path), wanted) for path, wanted in when.items())


def _is(value: Any, wanted: Any) -> bool:
    if value is _MISSING:
        return False
    if isinstance(wanted, Mapping) and wanted and set(wanted) <= {"min", "max"}:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return wanted.get("min", -math.inf) <= value <= wanted.get("max", math.inf)
    if isinstance(wanted, list) and not isinstance(value, list):
        return any(_is(value, each) for each in wanted)
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _all_paths(document: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in document.items():
        here = f"{path}.{key}" if path else str(key)
        yield here
        if isinstance(value, Mapping):
            yield from _all_paths(value, here)


def flatten(document: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves of a document by dotted path; lists are leaves."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            found |= flatten(value, here)
        else:
            found[here] = value
    return found


def canonical(value: Any) -> str:
    """Write plain data so that equal data is equal text, whatever the order of its keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def label_of(point: Point) -> str:
    """Say in a few words what sets a cell apart."""
    parts = [f"{name.rsplit('.', 1)[-1]}={_short(point.settings[name])}" for name in point.varied]
    return " ".join(parts) or "base"


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "kind" in value:
        rest = {k: v for k, v in value.items() if k != "kind"}
        inner = ",".join(f"{k}={_short(v)}" for k, v in rest.items())
        return f"{value['kind']}({inner})" if inner else str(value["kind"])
    if isinstance(value, Mapping):
        return ",".join(f"{k}={_short(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_short, value)) + "]"
    return str(value) if isinstance(value, str) else json.dumps(value, default=str)
