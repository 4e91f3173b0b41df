"""Components: what a config names by ``kind`` and what builds it.

    config mapping ──Family("model")──► a Component (checked, frozen, no torch) ──Builder──► the object, once

A component is a pydantic class that lives beside what it builds and registers itself there:

    @register("model", "decoder")
    class DecoderConfig(Component):
        kind: Literal["decoder"] = "decoder"
        layers: int = Field(default=4, ge=1)
        \"\"\"How many blocks.\"\"\"

        def build(self) -> nn.Module:
            from lowtide.training.model.decoder import Decoder   # torch is imported here, not above
            return Decoder(self)

There is no list of them: the modules ``lowtide.training.<package>.kinds`` and ``lowtide.training.<name>_kinds``
are found on disk and imported when a family is first asked for. They, and the ``__init__`` of their package, must
not import torch. Plugins are entry points of the group ``lowtide.<family>``, loaded when a config names them.
``kind: custom`` names a class by ``target`` and is imported only where the reader of the config allows code.

Two places that refer to one mapping (``${model}``, a YAML alias) get one component, and a ``Builder`` builds
one object for one component: identity goes all the way through. Mappings that are merely equal stay apart.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lowtide.errors import ConfigError, listing, nearest
from lowtide.training.section import Section, kind_error, model_error

__all__ = [
    "Builder",
    "Component",
    "Custom",
    "Family",
    "Reading",
    "built_in",
    "find_kind",
    "kinds",
    "register",
    "target_config",
]

_KINDS: dict[str, dict[str, type[Component]]] = {}
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


class Component(Section):
    """A section tagged by ``kind`` that builds an object.

    ``build`` takes what its family is given (see the family's package). Where fields hold components
    themselves, at any depth, it is also given ``builder=`` and builds them with ``builder.build(self.field)``.
    """

    family: ClassVar[str] = ""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Build the object; import what it needs here, not at the top of the module."""
        raise NotImplementedError(f"{type(self).__name__} has no build()")


ComponentT = TypeVar("ComponentT", bound=Component)


def register(family: str, kind: str) -> Callable[[type[ComponentT]], type[ComponentT]]:
    """Register a component class under ``kind`` in ``family``; its field ``kind`` must default to the same."""

    def add(cls: type[ComponentT]) -> type[ComponentT]:
        tag = cls.model_fields.get("kind")
        assert tag is not None, f"{cls.__name__} needs the field kind"
        assert tag.default == kind, f"{cls.__name__}.kind is {tag.default!r}, registered as {kind!r}"
        known = _KINDS.setdefault(family, {})
        assert kind != "custom", "custom is every family's own word for a class outside lowtide"
        taken = known.get(kind)
        same = taken is None or (taken.__module__, taken.__qualname__) == (cls.__module__, cls.__qualname__)
        assert same, f"{family} kind {kind!r} is already {taken}"
        cls.family = family
        known[kind] = cls
        return cls

    return add


@cache
def _load_built_in() -> None:
    import lowtide.training as home

    for found in pkgutil.iter_modules(home.__path__, prefix=f"{home.__name__}."):
        if found.name.endswith("_kinds"):
            importlib.import_module(found.name)
        elif found.ispkg and importlib.util.find_spec(f"{found.name}.kinds") is not None:
            importlib.import_module(f"{found.name}.kinds")


def _plugins(family: str) -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=f"lowtide.{family}")}


def kinds(family: str) -> list[str]:
    """List the kinds that a config may name in this family: built in, plugins (not imported), custom."""
    _load_built_in()
    return sorted({*_KINDS.get(family, {}), *_plugins(family), "custom"})


def built_in(family: str) -> dict[str, type[Component]]:
    """Return the component classes registered in this family so far, ``custom`` last."""
    _load_built_in()
    return {**dict(sorted(_KINDS.get(family, {}).items())), "custom": _custom(family)}


def find_kind(family: str, kind: str) -> type[Component]:
    """Find the component class of a kind; a plugin's is imported.

    Raises:
        ConfigError: no such kind, or a plugin that cannot be loaded.
    """
    _load_built_in()
    if kind == "custom":
        return _custom(family)
    registered = _KINDS.get(family, {}).get(kind)
    if registered is not None:
        return registered
    entry = _plugins(family).get(kind)
    if entry is None:
        near = nearest(kind, kinds(family), count=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{kind!r} is not a kind of {family}. Legal: {listing(kinds(family))}.{hint}")
    return _load_plugin(family, entry)


def _load_plugin(family: str, entry: importlib.metadata.EntryPoint) -> type[Component]:
    try:
        cls = entry.load()
    except Exception as error:
        raise ConfigError(
            f"the plugin {entry.name!r} ({entry.value}) of lowtide.{family} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Component)):
        raise ConfigError(
            f"the plugin {entry.name!r} ({entry.value}) of lowtide.{family} is no subclass of "
            f"lowtide.training.registry.Component"
        )
    cls.family = family
    return cls


@dataclass(frozen=True)
class Reading:
    """How one config is read: handed to pydantic as the context of validation."""

    allow_code: bool = False
    """Whether ``kind: custom`` may import what it names."""

    components: dict[tuple[int, str], tuple[object, Component]] = field(default_factory=dict, repr=False)
    """Components by the identity of the mapping they were read from (kept alive here) and their family."""

    @classmethod
    def of(cls, info: ValidationInfo) -> Reading:
        """Return the reading that pydantic was given."""
        return info.context if isinstance(info.context, cls) else cls()


@dataclass(frozen=True)
class Family:
    """Marks a field that holds a component: ``model: Annotated[Component, Family("model")]``."""

    name: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def dump(value: Any, info: SerializationInfo) -> Any:
            return value.model_dump(mode=info.mode) if isinstance(value, BaseModel) else value

        return core_schema.with_info_plain_validator_function(
            self._read,
            serialization=core_schema.plain_serializer_function_ser_schema(dump, info_arg=True),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        known = built_in(self.name)
        choices = [handler(cls.__pydantic_core_schema__) for cls in known.values()]
        plugins = sorted(set(_plugins(self.name)) - set(known))
        choices += [{"type": "object", "properties": {"kind": {"const": p}}, "required": ["kind"]} for p in plugins]
        return {"anyOf": choices}

    def _read(self, value: Any, info: ValidationInfo) -> Component:
        if isinstance(value, Component):
            if value.family != self.name:
                raise PydanticCustomError(
                    "wrong_family",
                    "Input should be a component of {family}, not of {other}",
                    {"family": self.name, "other": value.family},
                )
            return value
        if not isinstance(value, Mapping):
            raise model_error(kinds(self.name))
        reading = Reading.of(info)
        key = (id(value), self.name)
        if key not in reading.components:
            component = self._class_for(value).model_validate(value, context=reading)
            reading.components[key] = (value, component)
        return reading.components[key][1]

    def _class_for(self, value: Mapping[Any, Any]) -> type[Component]:
        kind, legal = value.get("kind"), kinds(self.name)
        if kind is None:
            raise kind_error("kind_missing", kind, "is required", legal)
        if not isinstance(kind, str) or kind not in legal:
            raise kind_error("kind_unknown", kind, f"no such kind of {self.name}", legal)
        try:
            return find_kind(self.name, kind)
        except ConfigError as error:
            raise kind_error("kind_broken", kind, str(error), []) from error


class Custom(Component):
    """A class outside lowtide. It is imported, and its ``config`` checked, only where code is allowed."""

    kind: Literal["custom"] = "custom"

    target: str
    """The class, as ``package.module:Class``. The working directory is importable. It is called as
    ``Class(config, **what the family is given)``."""

    config: Any = {}
    """The fields of the class's own ``Config``, a pydantic class; unknown keys are refused. A class without a
    ``Config`` takes no ``config`` and is called without it."""

    @field_validator("target")
    @classmethod
    def _found(cls, value: str, info: ValidationInfo) -> str:
        if _TARGET.fullmatch(value) is None:
            raise PydanticCustomError("target_form", "Input should read package.module:Class")
        if Reading.of(info).allow_code:
            _import_target(value)
        return value

    @field_validator("config", mode="plain")
    @classmethod
    def _checked_by_its_class(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping | BaseModel):
            raise PydanticCustomError("dict_type", "Input should be a mapping")
        target, reading = info.data.get("target"), Reading.of(info)
        if target is None or not reading.allow_code or isinstance(value, BaseModel):
            return value
        config_class = _config_class(_import_target(target))
        if config_class is None:
            if value:
                raise PydanticCustomError("no_config", "{target} has no Config, so it takes none", {"target": target})
            return value
        extra = None if config_class.model_config.get("extra") == "allow" else "forbid"
        return config_class.model_validate(value, context=reading, extra=extra)

    def checked(self) -> Custom:
        """Return the component with its config read by its class, as where code was allowed from the start.

        Raises:
            ConfigError: the class cannot be imported, or refuses its config.
        """
        if isinstance(self.config, BaseModel):
            return self
        try:
            return type(self).model_validate(dict(self), context=Reading(allow_code=True))
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"{_title(self)}, {self.target}: {said}") from None

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Import the class and call it with its config."""
        config, target = self.checked().config, _import_target(self.target)
        return target(*args, **kwargs) if _config_class(target) is None else target(config, *args, **kwargs)


@cache
def _custom(family: str) -> type[Component]:
    return type("Custom", (Custom,), {"family": family, "__module__": __name__, "__doc__": Custom.__doc__})


def _config_class(target: Any) -> type[BaseModel] | None:
    found = getattr(target, "Config", None)
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def target_config(target: object, reading: Reading) -> type[BaseModel] | None:
    """Return the ``Config`` that a custom target brings, where code is allowed and the target is found."""
    if not reading.allow_code or not isinstance(target, str) or _TARGET.fullmatch(target) is None:
        return None
    with contextlib.suppress(PydanticCustomError):
        return _config_class(_import_target(target))
    return None


def _import_target(target: str) -> Any:
    module_name, _, path = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        # The console script has no working directory on its path, as `python -m` has. It goes last, so that
        # nothing installed is shadowed, and stays: the class may import its neighbours later.
        sys.path.append(str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        said = f"importing {module_name!r} failed with {type(error).__name__}: {error}"
        raise PydanticCustomError("target_import", "{said}", {"said": said}) from error
    for name in path.split("."):
        if not hasattr(found, name):
            legal = [public for public in dir(found) if not public.startswith("_")]
            raise PydanticCustomError(
                "target_unknown", "no {name} in {module}", {"name": name, "module": module_name, "legal": legal}
            )
        found = getattr(found, name)
    if not callable(found):
        raise PydanticCustomError("target_not_callable", "Input should name a class")
    return found


class Builder:
    """Builds one object for one component, whoever asks and however often."""

    def __init__(self) -> None:
        self._built: dict[int, tuple[Component, dict[str, Any], Any]] = {}
        self._open: list[Component] = []

    def build(self, component: Component, **arguments: Any) -> Any:
        """Build the component's object, or return the one that was built from this very component before.

        Raises:
            ConfigError: it was built with other arguments, or its building needs itself.
        """
        if id(component) in self._built:
            return self._again(component, arguments)
        if any(component is other for other in self._open):
            raise ConfigError(f"building {_title(component)} needs itself")
        self._open.append(component)
        try:
            ready = component.checked() if isinstance(component, Custom) else component
            extra = {"builder": self} if any(True for _ in _components_in(ready)) else {}
            made = ready.build(**arguments, **extra)
        finally:
            self._open.pop()
        self._built[id(component)] = (component, arguments, made)
        return made

    def _again(self, component: Component, arguments: dict[str, Any]) -> Any:
        _, before, made = self._built[id(component)]
        other = [k for k, v in arguments.items() if not _same(before.get(k), v)]
        if other:
            raise ConfigError(
                f"{_title(component)} is referred to by several places and was built before with another "
                f"{listing(other)}; give each place its own mapping"
            )
        return made


def _same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, str | int | float | PurePath) and a == b)


def _title(component: Component) -> str:
    kind = getattr(component, "kind", type(component).__name__)
    return f"the {component.family or 'component'} of kind {kind!r}"


def _components_in(value: object, *, top: bool = True) -> Iterator[Component]:
    if isinstance(value, Component) and not top:
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _components_in(getattr(value, name), top=False)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _components_in(item, top=False)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _components_in(item, top=False)
