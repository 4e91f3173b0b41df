"""The base of every section of a config: frozen, unknown keys refused, prose under each field.

Torch-free. Values arrive from YAML or from an environment variable, so numbers may come as text and are read
leniently; but a truth value is never a number here (``steps: true`` is a slip, not 1 step), and infinities
are refused unless a field allows them.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

__all__ = ["ByKind", "Section", "kind_error", "model_error"]


def kind_error(code: str, value: object, message: str, legal: list[str]) -> ValidationError:
    """Make the error of a ``kind`` that is missing or unknown, placed at that key."""
    kind = PydanticCustomError(code, "{message}", {"message": message, "legal": legal})  # pyright: ignore[reportArgumentType]
    return ValidationError.from_exception_data("kind", [InitErrorDetails(type=kind, loc=("kind",), input=value)])


@dataclass(frozen=True)
class ByKind:
    """Marks a union told apart by ``kind``, so that a missing or unknown kind says which there are."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = {str(m.model_fields["kind"].default): m for m in _members(source)}
        legal = list(members)

        def read(value: Any, _inner: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
            if isinstance(value, tuple(members.values())):
                return value
            if not isinstance(value, Mapping):
                raise model_error(legal)
            kind = value.get("kind")
            if kind is None:
                raise kind_error("kind_missing", kind, "is required", legal)
            if not isinstance(kind, str) or kind not in members:
                raise kind_error("kind_unknown", kind, "no such kind", legal)
            # Not the union's own reading: it would put the kind into the place of every error.
            return members[kind].model_validate(value, context=info.context)

        return core_schema.with_info_wrap_validator_function(read, handler(source))


def model_error(legal: list[str]) -> PydanticCustomError:
    """Make the error of a value that is no mapping where a mapping with one of these kinds belongs."""
    said = f"should be a mapping with kind: {', '.join(legal)}"
    return PydanticCustomError("kind_model", "{said}", {"said": said})


def _members(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _members(argument)


def _leaf_types(annotation: object) -> set[object]:
    if typing.get_origin(annotation) is Literal:
        return {type(value) for value in typing.get_args(annotation)}
    if typing.get_origin(annotation) in (list, tuple, set, frozenset, dict):
        return set()
    arguments = typing.get_args(annotation)
    if not arguments:
        return {annotation}
    return set[object]().union(*(_leaf_types(argument) for argument in arguments))


class Section(BaseModel):
    """A mapping in a config file whose keys are the fields of a class."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            accepted = _leaf_types(cls.model_fields[info.field_name].annotation)
            if accepted & {int, float} and bool not in accepted:
                raise PydanticCustomError("truth_for_number", "Input should be a number, not true or false")
        return value
