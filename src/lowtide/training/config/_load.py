"""A file and its ``--set`` values to a checked config, and back to text that says what was run.

text ─► _document ─► _overrides ─► _references ─► pydantic ─► TrainConfig
                                        │                        │
                                        └── names of secrets ────┴──► resolved (what is written and hashed)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from lowtide.errors import ConfigError, InputError, listing, nearest
from lowtide.training.config._document import MAX_BYTES, Mark, Seq, Table, read_yaml, report, tell
from lowtide.training.config._explain import Explainer
from lowtide.training.config._fields import class_for, entry_of, field_annotation
from lowtide.training.config._overrides import apply_override
from lowtide.training.config._references import Resolver
from lowtide.training.config._sections import TrainConfig
from lowtide.training.config._written import resolved_values
from lowtide.training.registry import Reading

__all__ = ["LoadedConfig", "load", "load_config"]

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True)
class LoadedConfig(Generic[ConfigT]):
    """A config that was read and found legal."""

    config: ConfigT
    """The values."""

    given: str
    """The file's text, as it is."""

    resolved: dict[str, Any]
    """Every field with its value, as plain data; what came from the environment stands there by name."""

    path: Path
    """The file."""

    overrides: tuple[str, ...] = field(default=())
    """The ``--set`` values that were put on top."""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, allow_code: bool = True
) -> LoadedConfig[TrainConfig]:
    """Read a training config.

    Args:
        path: the YAML file.
        overrides: ``section.field=value`` each, the value written as YAML; later ones win.
        allow_code: whether ``kind: custom`` may import the class it names and check its config.

    Raises:
        InputError: the file is missing or cannot be read.
        ConfigError: it is not a legal config; the message names every place, its value and what is legal.
    """
    return load(TrainConfig, path, overrides, allow_code=allow_code)


def load(
    model: type[ConfigT],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    allow_code: bool = True,
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig[ConfigT]:
    """Read a config of any class; see ``load_config``."""
    source, given = str(path), _read_file(Path(path))
    root = read_yaml(given, source=source)
    if root is None:
        root = Table()
    if not isinstance(root, Table):
        raise ConfigError(
            f"{source}: got {tell(root)}; a config is a mapping with {listing(model.model_fields, limit=40)}"
        )
    _apply(overrides, root, model)
    reading = Reading(allow_code=allow_code)
    resolver = Resolver(
        root,
        environment=os.environ if environment is None else environment,
        default=lambda place: _default(model, root, place, reading),
    )
    resolver.resolve()
    if resolver.endless:
        raise report(resolver.problems, source)
    problems = list(resolver.problems)
    config: ConfigT | None = None
    try:
        config = model.model_validate(root, context=reading)
    except ValidationError as error:
        secrets = resolver.read_from_environment
        explainer = Explainer(root, model, source, reading, broken=resolver.broken, secrets=secrets)
        problems += explainer.explain(error)
    if problems or config is None:
        raise report(problems, source)
    resolved = resolved_values(config, root, resolver.read_from_environment, source)
    return LoadedConfig(config, given, resolved, Path(path), tuple(overrides))


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.{_neighbour(path)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES // 1024} KiB, which no config is")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None


def _neighbour(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")]
    except OSError:
        return f" There is no folder {path.parent} either."
    near = nearest(path.name, names, count=1)
    return f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def _apply(overrides: Sequence[str], root: Table, model: type[BaseModel]) -> None:
    wrong: list[str] = []
    present = set(root)
    for text in overrides:
        try:
            apply_override(root, text)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    for name in root.keys() - present:
        _of_the_default_kind(root, str(name), model)


def _of_the_default_kind(root: Table, name: str, model: type[BaseModel]) -> None:
    """A section that overrides made, of fields that the default has, changes the default and is of its kind."""
    section, info = root[name], model.model_fields.get(name)
    if info is None or info.is_required() or not isinstance(section, Table) or "kind" in section:
        return
    default = to_jsonable_python(info.get_default(call_default_factory=True))
    if not isinstance(default, dict) or "kind" not in default:
        return
    cls = class_for(field_annotation(info), default)
    if cls is not None and section.keys() <= cls.model_fields.keys():
        section.put("kind", default["kind"], Mark(f"--set {name}"))


def _default(model: type[BaseModel], root: Table, place: tuple[str | int, ...], reading: Reading) -> Any:
    annotation, value = model, root
    for key in place[:-1]:
        annotation = entry_of(annotation, value, key, reading=reading)
        value = value[key]  # pyright: ignore[reportArgumentType]
    cls = class_for(annotation, value)
    info = None if cls is None else cls.model_fields.get(str(place[-1]))
    if info is None or info.is_required():
        raise KeyError(*([] if cls is None else cls.model_fields))
    default = info.get_default(call_default_factory=True)
    return _as_read(default.model_dump(mode="json") if isinstance(default, BaseModel) else default)


def _as_read(value: Any) -> Any:
    """Turn plain data into what reading a file would have given."""
    if isinstance(value, BaseModel):
        return _as_read(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        table = Table()
        table.update({str(k): _as_read(v) for k, v in value.items()})
        return table
    if isinstance(value, list | tuple):
        items = Seq()
        items.extend(map(_as_read, value))
        return items
    return value
