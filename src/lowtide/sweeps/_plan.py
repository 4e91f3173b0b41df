"""The cells of a sweep, checked: each with its whole config and a key that depends on nothing but that."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.errors import ConfigError, NothingMatchedError, UserError, listing, nearest
from lowtide.sweeps._config import SweepConfig
from lowtide.sweeps._grid import Point, expand, flatten, label_of

__all__ = ["Cell", "Resolved", "larger_than", "plan_cells"]

_MOST_FAULTS = 10
_OWN = ("run.name", "run.directory")
"""Fields that the sweep sets itself; they are no part of what a cell is."""


@dataclass(frozen=True)
class Resolved:
    """The config of a cell, read and found legal."""

    config: dict[str, Any]
    """Every field, as plain data."""
    text: str
    """The same as YAML."""
    hash: str
    """Of the content: equal configs have equal hashes."""


@dataclass(frozen=True)
class Cell:
    """One training run of a sweep."""

    number: int
    key: str
    """Names the cell and its folder: what varies in a few words, and the start of its config's hash."""
    label: str
    settings: dict[str, Any]
    config: dict[str, Any]
    text: str
    flat: dict[str, Any] = field(repr=False)


def plan_cells(
    sweep: SweepConfig, base: Mapping[str, Any], resolve: Callable[[Mapping[str, Any]], Resolved]
) -> list[Cell]:
    """Expand a sweep and check the config of every cell.

    Args:
        sweep: the file.
        base: the base config as plain data.
        resolve: makes the config of a cell from what the cell sets.

    Raises:
        ConfigError: a cell's config is not legal; the first few faults are named.
        NothingMatchedError: a condition or one of ``prune_fields`` meets nothing.
    """
    cells: list[Cell] = []
    faults: list[str] = []
    seen: set[str] = set()
    for point in expand(sweep, base):
        label = label_of(point)
        try:
            resolved = resolve(point.settings)
        except UserError as error:
            faults.append(f"cell {label}: {error}")
            continue
        key = _key(point, resolved.hash)
        if resolved.hash not in seen:
            seen.add(resolved.hash)
            flat = {k: v for k, v in flatten(resolved.config).items() if k not in _OWN}
            cells.append(Cell(len(cells), key, label, point.settings, resolved.config, resolved.text, flat))
    if faults:
        more = f"\n  and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        raise ConfigError(
            f"{len(faults)} of {len(faults) + len(cells)} cells are not legal (leave_out leaves cells out):\n  "
            + "\n  ".join(faults[:_MOST_FAULTS])
            + more
        )
    _check_prune_fields(sweep, cells)
    return cells


def _key(point: Point, content_hash: str) -> str:
    words = re.sub(r"[^A-Za-z0-9.=_-]+", "-", label_of(point)).replace("=", "-").strip("-._")
    return f"{words[:60].rstrip('-._') or 'cell'}-{content_hash[:10]}"


def _check_prune_fields(sweep: SweepConfig, cells: Sequence[Cell]) -> None:
    names = {name for cell in cells for name in cell.flat}
    for path in sweep.prune_fields:
        if "prune_fields" in sweep.model_fields_set and path not in names:
            near = nearest(path, sorted(names))
            hint = f" Nearest: {listing(near)}." if near else ""
            raise NothingMatchedError(f"prune_fields: no cell of this sweep has a field {path!r}.{hint}")


def larger_than(cell: Cell, other: Cell, fields: Sequence[str]) -> list[str]:
    """Return the fields in which ``cell`` is larger, where it is smaller in none and otherwise the same; else none."""
    if cell.flat.keys() != other.flat.keys():
        return []
    larger: list[str] = []
    for name, value in cell.flat.items():
        before = other.flat[name]
        if value == before and type(value) is type(before):
            continue
        if name not in fields or not _numbers(value, before) or value < before:
            return []
        larger.append(name)
    return larger


def _numbers(*values: Any) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
