"""``${section.field}`` and ``${env:NAME}``: put in place of the text that names them.

A reference that is the whole value keeps its type, and one to a mapping or list *is* that object: what two
places share stays shared through validation and building. Inside longer text a reference becomes text.
``${env:NAME:-text}`` gives text for a variable that is not set; ``$${`` writes a plain ``${``. A field that the
file leaves out is referred to by its default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lowtide.errors import listing, nearest
from lowtide.training.config._document import MAX_DEPTH, Mark, Problem, Seq, Shown, Table, step, tell, written

__all__ = ["FIELD", "Resolver"]

MAX_CHAIN = 32
MAX_VALUES = 20_000
MAX_TEXT = 64 * 1024

_PART = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
FIELD = re.compile(r"[^\s.\[\]:]+(\.[^\s.\[\]:]+|\[\d+\])*")
_ENV = re.compile(r"env:([A-Za-z_]\w*)(?::-(.*))?", re.ASCII | re.DOTALL)

Box = Table | Seq
Default = Callable[[tuple[str | int, ...]], Any]
"""Gives the value that a field has when the file leaves it out; raises KeyError, with the legal keys, if none."""


class _BrokenError(Exception):
    """A reference that cannot be followed; its problem is recorded."""


class Resolver:
    """Resolves all references below one root, in place."""

    def __init__(self, root: Table, *, environment: Mapping[str, str], default: Default) -> None:
        self.problems: list[Problem] = []
        self.broken: set[tuple[int, str | int]] = set()
        """Places whose reference could not be followed, as the box's identity and the key."""
        self.read_from_environment: dict[str, str] = {}
        self.endless = False
        """Whether the result contains itself or is too large, so that nothing may walk it."""
        self._root, self._environment, self._default = root, environment, default
        self._done: set[tuple[int, str | int]] = set()
        self._open: dict[tuple[int, str | int], str] = {}

    def resolve(self) -> None:
        """Resolve every place that can be reached from the root."""
        seen: set[int] = set()
        waiting: list[tuple[Box, str]] = [(self._root, "")]
        while waiting:
            box, path = waiting.pop()
            if id(box) in seen:
                continue
            seen.add(id(box))
            for key in _keys(box):
                below = _join(path, key)
                try:
                    value = self._place(box, key, below)
                except _BrokenError:
                    continue
                if isinstance(value, Table | Seq):
                    waiting.append((value, below))
        self._check_growth()

    def _place(self, box: Box, key: Any, path: str) -> Any:
        value, slot = box[key], (id(box), key)
        if slot in self.broken:
            raise _BrokenError
        if slot in self._done or not isinstance(value, str) or "${" not in value:
            return value
        if slot in self._open:
            around = list(self._open.values())
            chain = " -> ".join([*around[list(self._open).index(slot) :], path])
            raise self._fail(box, key, path, f"{tell(value)} goes round in a circle: {chain}")
        if len(self._open) >= MAX_CHAIN:
            raise self._fail(box, key, path, f"more than {MAX_CHAIN} references one behind the other")
        self._open[slot] = path
        try:
            box[key] = self._text(value, box, key, path)
        except _BrokenError:
            self.broken.add(slot)
            raise
        finally:
            del self._open[slot]
        self._done.add(slot)
        return box[key]

    def _fail(self, box: Box, key: Any, path: str, message: str) -> _BrokenError:
        self.problems.append(Problem(box.marks.get(key, Mark("default")), path, message))
        self.broken.add((id(box), key))
        return _BrokenError()

    def _text(self, text: str, box: Box, key: Any, path: str) -> Any:
        whole = _PART.fullmatch(text)
        if whole is not None and whole[1] is not None:
            return self._named(whole[1], box, key, path)
        pieces: list[str] = []
        end = 0
        for found in _PART.finditer(text):
            pieces += [text[end : found.start()], self._piece(found, box, key, path)]
            end = found.end()
        pieces.append(text[end:])
        result = "".join(pieces)
        if len(result) > MAX_TEXT:
            raise self._fail(box, key, path, f"text of {len(result)} characters; at most {MAX_TEXT} are read")
        if any(isinstance(piece, Shown) for piece in pieces):
            return Shown(result, "".join(written(piece) for piece in pieces))
        return result

    def _piece(self, found: re.Match[str], box: Box, key: Any, path: str) -> str:
        if found[0] == "$${":
            return "${"
        value = self._named(found[1], box, key, path)
        if isinstance(value, Table | Seq):
            kind = "mapping" if isinstance(value, Table) else "list"
            raise self._fail(box, key, path, f"{found[0]} is a {kind}, which cannot stand inside text")
        if isinstance(value, str):
            return value
        return {True: "true", False: "false", None: "null"}[value] if value in (True, False, None) else repr(value)

    def _named(self, name: str | None, box: Box, key: Any, path: str) -> Any:
        name = None if name is None else name.strip()
        if name is not None and name.startswith("env:"):
            return self._from_environment(name, box, key, path)
        if name is None or FIELD.fullmatch(name) is None:
            written = tell(box[key])
            legal = "${section.field}, ${env:NAME}, ${env:NAME:-text}, or $${ for a plain ${"
            raise self._fail(box, key, path, f"{written} holds no whole reference; legal: {legal}")
        return self._follow(name, box, key, path)

    def _from_environment(self, name: str, box: Box, key: Any, path: str) -> Shown:
        found = _ENV.fullmatch(name)
        if found is None:
            raise self._fail(box, key, path, f"${{{name}}} names no variable; write ${{env:NAME}}")
        value = self._environment.get(found[1], found[2])
        if value is None:
            near = nearest(found[1], self._environment, count=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            message = f"the environment has no {found[1]!r}; set it, or write ${{env:{found[1]}:-text}}.{hint}"
            raise self._fail(box, key, path, message)
        self.read_from_environment[found[1]] = value
        return Shown(value, f"${{{name}}}")

    def _follow(self, name: str, box: Box, key: Any, path: str) -> Any:
        at: Any = self._root
        walked: tuple[str | int, ...] = ()
        for part in re.sub(r"\[(\d+)\]", r".\1", name).split("."):
            if not isinstance(at, Table | Seq):
                above = _join("", *walked)
                raise self._fail(box, key, path, f"${{{name}}}: {above} is {tell(at)}, which has no fields")
            below: str | int = int(part) if isinstance(at, Seq) and part.isdecimal() and len(part) < 10 else part
            walked = (*walked, below)
            if below not in _keys(at):
                self._fill_default(name, at, walked, box, key, path)
            at = self._place(at, below, _join("", *walked))
        return at

    def _fill_default(self, name: str, at: Box, walked: tuple[str | int, ...], box: Box, key: Any, path: str) -> None:
        legal = [str(k) for k in _keys(at)]
        if isinstance(at, Table):
            try:
                at.put(str(walked[-1]), self._default(walked), Mark("default"))
                return
            except KeyError as error:
                legal = list(dict.fromkeys([*legal, *error.args]))
        above = _join("", *walked[:-1]) or "the config"
        near = nearest(str(walked[-1]), legal, count=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        said = f"${{{name}}}: {above} has no {str(walked[-1])!r}. Legal: {listing(legal) or 'nothing'}.{hint}"
        raise self._fail(box, key, path, said)

    def _check_growth(self) -> None:
        """Refuse what contains itself and what grows past the limit once shared parts are written out."""
        sizes: dict[int, int] = {}
        heights: dict[int, int] = {}
        path: dict[int, str] = {}
        waiting: list[tuple[Box, str, Mark, bool]] = [(self._root, "", Mark("default"), False)]
        while waiting:
            box, where, mark, leaving = waiting.pop()
            if leaving:
                del path[id(box)]
                sizes[id(box)] = 1 + sum(sizes.get(id(v), 1) for v in _values(box))
                heights[id(box)] = 1 + max((heights.get(id(v), 0) for v in _values(box)), default=0)
                if sizes[id(box)] > MAX_VALUES or heights[id(box)] > MAX_DEPTH:
                    limit = f"{MAX_VALUES} values or {MAX_DEPTH} levels"
                    self.endless = True
                    self.problems.append(Problem(mark, where, f"holds more than {limit} once references are followed"))
                    return
                continue
            if id(box) in path:
                self.endless = True
                self.problems.append(Problem(mark, where, f"is inside {path[id(box)] or 'the config'}, which it names"))
                return
            if id(box) in sizes:
                continue
            path[id(box)] = where
            waiting.append((box, where, mark, True))
            for key in _keys(box):
                if isinstance(box[key], Table | Seq):
                    waiting.append((box[key], _join(where, key), box.marks.get(key, mark), False))


def _keys(box: Box) -> list[Any]:
    return list(box) if isinstance(box, Table) else list(range(len(box)))


def _values(box: Box) -> list[Any]:
    return list(box.values()) if isinstance(box, Table) else list(box)


def _join(path: str, *parts: str | int) -> str:
    return ".".join([path, *map(step, parts)] if path else [*map(step, parts)])
