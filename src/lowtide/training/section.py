"""The base of every section of a config: frozen, unknown keys refused, prose under each field.

Torch-free. Values arrive from YAML or from an environment variable, so numbers may come as text and are read
leniently; but a truth value is never a number here (``steps: true`` is a slip, not 1 step), and infinities
are refused unless a field allows them.
"""

from __future__ import annotations

import typing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

__all__ = ["Section"]


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
