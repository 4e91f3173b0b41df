"""The reference page of a config, made of the prose under the fields."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from lowtide.training.config._fields import describe, field_annotation, options
from lowtide.training.config._sections import TrainConfig
from lowtide.training.registry import Family, built_in

__all__ = ["reference_page"]

_HEAD = """# Config reference

Made from the prose under the fields by `lowtide config schema --markdown`; change it there.

A config is a YAML file. `${section.field}` stands for another field's value (one that the file leaves out gives
its default; a mapping is then one object in both places), `${env:NAME}` and `${env:NAME:-text}` for an environment
variable, `$${` for a plain `${`. `--set section.field=value` puts a value on top. Numbers and truth values are
those of YAML 1.2: `3e-4` is a number, `on` and `yes` are text (and are read as true where a field is true or false).
"""


def reference_page() -> str:
    """Return the page as Markdown: one part per section, one table per class."""
    parts = [_HEAD]
    for name, info in TrainConfig.model_fields.items():
        parts.append(f"## {name}\n\n{_prose(info)}")
        members = list(_members(field_annotation(info)))
        if not members:
            parts.append(f"Legal: {describe(field_annotation(info))}. Default: {_default(info)}.")
        elif len(members) == 1:
            parts += _tables(members[0], name)
        else:
            parts.append("Required." if info.is_required() else f"Default: {_default(info)}.")
            for member in members:
                kind = member.model_fields["kind"].default
                parts += [f"### {name}: {kind}", _one_line(member.__doc__), *_tables(member, name)]
    for name, info in _list_families(TrainConfig):
        for kind, member in built_in(info).items():
            parts += [f"### {name}: {kind}", _one_line(member.__doc__), *_tables(member, name)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _members(annotation: Any) -> Iterator[type[BaseModel]]:
    for option in options(annotation):
        if isinstance(option, Family):
            yield from built_in(option.name).values()
        elif isinstance(option, type) and issubclass(option, BaseModel):
            yield option


def _list_families(cls: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields that are lists of components, with their family."""
    for name, info in cls.model_fields.items():
        below = f"{path}.{name}" if path else name
        for option in options(field_annotation(info)):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from _list_families(option, below)
            for argument in typing.get_args(option):
                yield from ((below, f.name) for f in options(argument) if isinstance(f, Family))


def _tables(cls: type[BaseModel], path: str) -> Iterator[str]:
    rows = [(name, info) for name, info in cls.model_fields.items() if name != "kind" or info.is_required()]
    if rows:
        lines = ["| field | legal | default | what it does |", "|---|---|---|---|"]
        for name, info in rows:
            cells = (describe(field_annotation(info)), _default(info), _prose(info))
            lines.append(f"| `{name}` | {' | '.join(map(_cell, cells))} |")
        yield "\n".join(lines)
    for name, info in rows:
        for nested in _inner_models(field_annotation(info)):
            yield f"Each of `{path}.{name}`:"
            yield from _tables(nested, f"{path}.{name}")


def _inner_models(annotation: Any) -> Iterator[type[BaseModel]]:
    for option in options(annotation):
        for argument in typing.get_args(option):
            if isinstance(argument, type) and issubclass(argument, BaseModel):
                yield argument


def _prose(info: FieldInfo) -> str:
    return _one_line(info.description)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("``", "`")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = to_jsonable_python(info.get_default(call_default_factory=True))
    if isinstance(value, dict) and "kind" in value:
        return f"`{value['kind']}`"
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
