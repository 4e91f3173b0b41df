"""A checked config as plain data and as YAML, to be written beside the run, and the hash of what it says.

The data loads again to an equal config. What came from the environment stands there as ``${env:NAME}``, never by
its value, and the hash is taken of that. A component that several places share stands there once; the others
refer to it, so that it is still one object when the written file is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from lowtide.errors import ConfigError
from lowtide.training.config._document import FLOAT, INT, Shown, Table, written
from lowtide.training.config._references import FIELD
from lowtide.training.registry import Component

__all__ = ["config_hash", "resolved_values", "to_yaml"]

Place = tuple[str | int, ...]


class _Dumper(yaml.SafeDumper):
    """Quotes text that the reader here would take for a number, which YAML 1.1 would not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # PyYAML writes line separators other than \n into plain quotes, where they read back as spaces.
    style = None if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
for _pattern, _name in ((INT, "int"), (FLOAT, "float")):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, list("-+.0123456789"))


def to_yaml(values: Mapping[str, Any]) -> str:
    """Write plain data as YAML in the order in which it stands."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)


def config_hash(resolved: Mapping[str, Any]) -> str:
    """Hash what a config says, whatever its file is called and in whatever order its keys stand (64 hex digits)."""
    text = json.dumps(resolved, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def resolved_values(config: BaseModel, root: Table, secrets: Mapping[str, str], source: str) -> dict[str, Any]:
    """Write a config down as plain data that loads again to an equal one.

    Raises:
        ConfigError: a custom config holds a value that has no JSON form.
    """
    try:
        # Not mode="json": that writes null for infinities.
        plain = to_jsonable_python(config.model_dump(), inf_nan_mode="constants")
    except (PydanticSerializationError, ValueError, TypeError) as error:
        raise ConfigError(f"{source}: a value cannot be written down: {error}") from None
    names = dict(_from_environment(root, ()))
    lost = [name for name in names if not _stands(plain, name)]
    # Where a class reshaped what it was given, its place is lost: look for the text itself.
    hidden = {v: f"${{env:{k}}}" for k, v in secrets.items() if len(v) > 2} if lost else {}
    return _write(plain, (), names, _shared(config), hidden)


def _items(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield name, getattr(value, name)


def _from_environment(value: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(value, Shown):
        yield place, value.shown
    for key, below in _items(value):
        yield from _from_environment(below, (*place, key))


def _stands(plain: Any, place: Place) -> bool:
    for key in place:
        try:
            plain = plain[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _shared(config: BaseModel) -> dict[Place, str]:
    """Find the places of components that stand elsewhere too, but for the first, and a reference to that."""
    first: dict[int, Place] = {}
    again: dict[Place, str] = {}
    waiting: list[tuple[Place, Any]] = [((), config)]
    while waiting:
        place, value = waiting.pop(0)
        if isinstance(value, Component):
            name = ".".join(map(str, first.setdefault(id(value), place)))
            # Under a key that no reference can name, it is written out.
            if first[id(value)] != place and FIELD.fullmatch(name):
                again[place] = f"${{{name}}}"
                continue
        waiting += [((*place, key), below) for key, below in _items(value)]
    return again


def _write(
    value: Any, place: Place, names: Mapping[Place, str], shared: Mapping[Place, str], hidden: Mapping[str, str]
) -> Any:
    if place in shared or place in names:
        return shared.get(place) or names[place]
    if isinstance(value, dict):
        return {str(k): _write(v, (*place, k), names, shared, hidden) for k, v in _kind_first(value)}
    if isinstance(value, list):
        return [_write(v, (*place, i), names, shared, hidden) for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value
    for secret, shown in hidden.items():
        if secret in value:
            return shown.join(map(written, value.split(secret)))
    return written(value)


def _kind_first(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return sorted(value.items(), key=lambda item: item[0] != "kind")
