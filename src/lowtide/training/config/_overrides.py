"""``--set a.b=value``: one value put into a config before references are resolved. Later ones win."""

from __future__ import annotations

import re
from typing import Any

from lowtide.errors import ConfigError
from lowtide.training.config._document import Mark, Seq, Table, read_yaml, tell

__all__ = ["apply_override"]

_INDEX = re.compile(r"\[(-?\d{1,9})\]")


def apply_override(root: Table, text: str) -> None:
    """Put the value of ``section.field=value`` where its path says; a missing section is made.

    Raises:
        ConfigError: no ``=``, no YAML behind it, or a path through what is no mapping or list.
    """
    path, equals, written = text.partition("=")
    mark = Mark(f"--set {text}" if len(text) <= 80 else f"--set {text[:60]}...")
    parts = [part.strip() for part in _INDEX.sub(r".\1", path).split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"{mark}: write --set section.field=value")
    value = read_yaml(written, source=str(mark), first_line=None)
    box: Table | Seq = root
    for depth, part in enumerate(parts[:-1]):
        box = _step(box, part, path=".".join(parts[: depth + 1]), mark=mark)
    _put(box, parts[-1], value, path=".".join(parts), mark=mark)


def _step(box: Table | Seq, part: str, *, path: str, mark: Mark) -> Table | Seq:
    key: Any = _index(box, part, path=path, mark=mark, grow=0) if isinstance(box, Seq) else part
    if key in box.aliases:
        raise ConfigError(
            f"{mark}: {path} is an alias: it is one object with what it names, so set the field there, "
            f"or set {path} as a whole"
        )
    if isinstance(box, Table) and box.get(key) is None:
        box.put(key, Table(), mark)
    found: Any = box[key]
    if isinstance(found, str) and "${" in found:
        raise ConfigError(f"{mark}: {path} is the reference {found}; set the field there, or {path} as a whole")
    if not isinstance(found, Table | Seq):
        raise ConfigError(f"{mark}: {path} is {tell(found)}, which has no fields")
    return found


def _put(box: Table | Seq, part: str, value: Any, *, path: str, mark: Mark) -> None:
    if isinstance(box, Table):
        box.aliases.discard(part)
        box.put(part, value, mark)
        return
    index = _index(box, part, path=path, mark=mark, grow=1)
    box.aliases.discard(index)
    box.put(index, value, mark)


def _index(box: Seq, part: str, *, path: str, mark: Mark, grow: int) -> int:
    legal = f"0 to {len(box) - 1 + grow}" if len(box) + grow else "none, it is empty"
    try:
        index = int(part)
    except ValueError:
        raise ConfigError(f"{mark}: {path}: {part!r} is no index of this list; legal: {legal}") from None
    if not 0 <= index < len(box) + grow:
        raise ConfigError(f"{mark}: {path}: this list has {len(box)} items; legal indices: {legal}")
    return index
