"""Which class reads which place of a config: for legal keys, nearest names and defaults.

Follows annotations the way pydantic does, but without validating: a place is still known when its neighbours
are wrong.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lowtide.errors import ConfigError
from lowtide.training.registry import Custom, Family, Reading, find_kind, kinds, target_config

__all__ = ["class_for", "describe", "entry_of", "field_annotation", "options"]


def field_annotation(info: FieldInfo) -> Any:
    """Return a field's annotation with its markers put back."""
    annotation: Any = info.annotation
    for item in info.metadata:
        annotation = typing.Annotated[annotation, item]
    return annotation


def options(annotation: Any) -> list[Any]:
    """List what an annotation allows: the members of a union, with families in place of ``Component``."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *markers = typing.get_args(annotation)
        families = [m for m in markers if isinstance(m, Family)]
        return list(families) if families else options(inner)
    if origin in (typing.Union, types.UnionType):
        return [option for argument in typing.get_args(annotation) for option in options(argument)]
    return [annotation]


def class_for(annotation: Any, value: object) -> type[BaseModel] | None:
    """Return the class that reads ``value`` under this annotation, where that is clear."""
    classes: list[type[BaseModel]] = []
    kind = value.get("kind") if isinstance(value, Mapping) else None
    for option in options(annotation):
        if isinstance(option, Family):
            classes += _component_class(option, kind)
        elif isinstance(option, type) and issubclass(option, BaseModel):
            classes.append(option)
    if len(classes) < 2:
        return classes[0] if classes else None
    tagged = {c.model_fields["kind"].default: c for c in classes if "kind" in c.model_fields}
    return tagged.get(kind) if isinstance(kind, str) else None


def _component_class(family: Family, kind: object) -> list[type[BaseModel]]:
    try:
        return [find_kind(family.name, kind)] if isinstance(kind, str) else []
    except ConfigError:
        return []


def entry_of(annotation: Any, value: object, key: str | int, *, reading: Reading) -> Any:
    """Return the annotation of one entry of ``value``, or None where it is not known."""
    cls = class_for(annotation, value)
    if cls is not None:
        if key == "config" and issubclass(cls, Custom) and isinstance(value, Mapping):
            return target_config(value.get("target"), reading)
        info = cls.model_fields.get(str(key))
        return None if info is None else field_annotation(info)
    for option in options(annotation):
        arguments = typing.get_args(option)
        origin = typing.get_origin(option)
        if origin in (list, tuple, set, frozenset) and arguments and isinstance(key, int):
            return arguments[0]
        if isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2:
            return arguments[1]
    return None


_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    types.NoneType: "null",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "of length at least"}


def describe(annotation: Any) -> str:
    """Say in words what is legal under an annotation; empty where that is not known."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        families = [m.name for m in arguments[1:] if isinstance(m, Family)]
        if families:
            return f"a mapping with kind: {', '.join(kinds(families[0]))}"
        bounds = [
            f"{word} {_bound(getattr(m, name))}"
            for m in _flat(arguments[1:])
            for name, word in _BOUNDS.items()
            if _has(m, name)
        ]
        return ", ".join(part for part in (describe(arguments[0]), " and ".join(bounds)) if part)
    if origin is typing.Literal:
        return ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return _describe_union(arguments)
    if origin in (list, tuple, set, frozenset):
        inner = describe(arguments[0]) if arguments else ""
        fixed = f" of {len(arguments)}" if origin is tuple and arguments and ... not in arguments else ""
        return f"a list{fixed} (each {inner})" if inner else f"a list{fixed}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with {', '.join(annotation.model_fields)}"
    return _NAMES.get(annotation, "a mapping" if origin is dict else "")


def _bound(value: Any) -> str:
    """Write 0 and 0.0 alike: typing gives out one annotation for both, the one that was made first in the process."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flat(markers: tuple[Any, ...]) -> list[Any]:
    return [inner for m in markers for inner in (m.metadata if isinstance(m, FieldInfo) else [m])]


def _has(marker: object, name: str) -> bool:
    return getattr(marker, name, None) is not None


def _describe_union(arguments: tuple[Any, ...]) -> str:
    models = [a for a in arguments if isinstance(a, type) and issubclass(a, BaseModel) and "kind" in a.model_fields]
    if len(models) > 1:
        return "a mapping with kind: " + ", ".join(str(m.model_fields["kind"].default) for m in models)
    # Null first: bounds stand at the end and belong to the other.
    ordered = sorted(arguments, key=lambda a: a is not types.NoneType)
    return " or ".join(filter(None, map(describe, ordered)))
