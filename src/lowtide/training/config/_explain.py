"""Pydantic's errors, told as a place in a file: line, dotted path, the value, what is legal, the nearest name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from lowtide.errors import listing, nearest
from lowtide.training.config._document import Mark, Problem, Seq, Table, step, tell
from lowtide.training.config._fields import class_for, describe, entry_of
from lowtide.training.registry import Reading

__all__ = ["Explainer"]

_SAY_WHAT_IS_LEGAL = {
    "bool_parsing", "bool_type", "float_parsing", "float_type", "finite_number", "greater_than",
    "greater_than_equal", "int_from_float", "int_parsing", "int_parsing_size", "int_type", "less_than",
    "less_than_equal", "list_type", "literal_error", "model_type", "string_type", "truth_for_number",
    "tuple_type", "dict_type",
}  # fmt: skip


@dataclass
class _Place:
    """How far a pydantic location could be followed into the file, and what it means there."""

    path: list[str]
    mark: Mark
    value: Any
    annotation: Any
    rest: list[str | int]
    broken: bool = False


@dataclass(frozen=True)
class Explainer:
    """Knows the file that was validated."""

    root: Table
    model: type[BaseModel]
    source: str
    reading: Reading
    broken: set[tuple[int, str | int]]
    """Places whose reference could not be followed: they have a problem already."""
    secrets: Mapping[str, str]
    """What was read from the environment, by name: no message may hold it."""

    def explain(self, error: ValidationError) -> list[Problem]:
        """Turn every error into a problem; what several members of a union say of one place is one problem."""
        found: dict[tuple[str, str], tuple[Mark, list[str]]] = {}
        items = error.errors(include_url=False)
        for item in items:
            if item["type"] == "too_short" and any(_beneath(item["loc"], other["loc"]) for other in items):
                continue  # Its items are there, and wrong.
            place = self._follow(item["loc"])
            if place.broken:
                continue
            got, message = map(self._hide, self._tell(item, place))
            _, messages = found.setdefault((".".join(map(step, place.path)), got), (place.mark, []))
            messages.append(message)
        return [
            Problem(mark, path, got + ", or ".join(dict.fromkeys(messages)))
            for (path, got), (mark, messages) in found.items()
        ]

    def _follow(self, loc: tuple[str | int, ...]) -> _Place:
        place = _Place([], Mark(self.source), self.root, self.model, list(loc))
        while place.rest:
            box, key = place.value, place.rest[0]
            if not isinstance(box, Table | Seq):
                break
            if not _holds(box, key):
                if len(place.rest) == 1 and isinstance(box, Table):
                    break
                place.rest.pop(0)  # Not a key of ours: pydantic names the member of a union in its location.
                continue
            place.rest.pop(0)
            place.path.append(str(key))
            place.broken = place.broken or (id(box), key) in self.broken
            place.annotation = entry_of(place.annotation, box, key, reading=self.reading)
            place.mark = _mark(box, key, place.mark)
            place.value = box[key]  # pyright: ignore[reportArgumentType, reportCallIssue]
        return place

    def _tell(self, item: Any, place: _Place) -> tuple[str, str]:
        code, context = item["type"], item.get("ctx") or {}
        if code == "extra_forbidden":
            return "", self._unknown_key(place)
        if code in ("missing", "kind_missing"):
            key = str(item["loc"][-1])
            place.annotation = entry_of(place.annotation, place.value, key, reading=self.reading)
            place.path.append(key)
            return "", "is required" + _legal(context.get("legal") or describe(place.annotation))
        got = f"got {tell(place.value)}; "
        if "legal" in context:
            return got, item["msg"] + _legal(context["legal"]) + _near(place.value, context["legal"])
        legal = describe(place.annotation)
        if code in _SAY_WHAT_IS_LEGAL and legal:
            choices = legal.split(", ") if code == "literal_error" else []
            return got, f"legal: {legal}{_hint(code, place.value)}{_near(place.value, choices)}"
        return got, _plain(item["msg"]) + (_legal(legal) if code == "value_error" and legal != "text" else "")

    def _hide(self, text: str) -> str:
        for name, secret in self.secrets.items():
            if len(secret) > 2:
                text = text.replace(secret, f"${{env:{name}}}")
        return text

    def _unknown_key(self, place: _Place) -> str:
        key = place.path[-1] if place.path else ""
        parent, annotation = self.root, self.model
        for part in place.path[:-1]:
            below = int(part) if isinstance(parent, Seq) else part
            annotation = entry_of(annotation, parent, below, reading=self.reading)
            parent = parent[below]  # pyright: ignore[reportArgumentType, reportCallIssue]
        cls = class_for(annotation, parent)
        legal = list(cls.model_fields) if cls is not None else []
        return "unknown key" + _legal(legal, limit=40) + _near(key, legal)


def _beneath(place: tuple[str | int, ...], other: tuple[str | int, ...]) -> bool:
    return len(other) > len(place) and other[: len(place)] == place


def _holds(box: Table | Seq, key: str | int) -> bool:
    return key in box if isinstance(box, Table) else isinstance(key, int) and 0 <= key < len(box)


def _mark(box: Table | Seq, key: Any, otherwise: Mark) -> Mark:
    return box.marks.get(key, otherwise)


def _legal(legal: str | list[str], *, limit: int = 12) -> str:
    words = legal if isinstance(legal, str) else listing(legal, limit=limit)
    return f"; legal: {words}" if words else ""


def _near(value: object, legal: list[str]) -> str:
    found = nearest(value, legal, count=1) if isinstance(value, str) else []
    return f". Did you mean {found[0]!r}?" if found else ""


def _hint(code: str, value: object) -> str:
    return " (put it in quotes)" if code == "string_type" and isinstance(value, int | float) else ""


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return re.sub(r"^(Input|String|List|Tuple|Dictionary|Value) should ", "should ", message)
