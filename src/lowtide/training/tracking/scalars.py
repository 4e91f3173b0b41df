"""Any value that people log, as a plain one.

Python, NumPy and torch scalars (0-d tensors of any dtype, bfloat16 too) become int, float or bool; small
arrays become lists; anything else its text. Nothing here imports torch or NumPy: values are asked for what
they can do.

A DTensor that is whole on this rank gives its local value. One that is sharded or a partial sum cannot be
read without a collective, which the other ranks would not join when only rank 0 logs: it becomes ``Unread``,
and the loop should call ``.full_tensor()`` on every rank before it publishes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["STEP_SCALARS", "Unread", "as_number", "plain", "strict"]

STEP_SCALARS = ("loss", "tokens_per_s", "learning_rate", "grad_norm", "peak_bytes", "step_ms")
"""The fields of a ``StepDone`` that viewers draw as curves."""

_LONGEST_LIST = 1024


@dataclass(frozen=True)
class Unread:
    """A value that could not be read here, and why."""

    reason: str


def plain(value: Any) -> Any:
    """Return ``value`` as None, bool, int, float, str, list, dict or Unread; never raises for odd values."""
    if value is None or isinstance(value, bool | str):
        return value if type(value) in (type(None), bool, str) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    try:
        return _container_or_array(value)
    except Exception as error:  # a value's own methods may raise anything
        return Unread(f"{type(value).__name__} could not be read: {type(error).__name__}: {error}")


def as_number(value: Any) -> float | None:
    """Return a value as a float, NaN and infinities included; None where it is no single number."""
    read = plain(value)
    return float(read) if isinstance(read, int | float) else None


def strict(value: Any) -> tuple[Any, dict[str, str]]:
    """Return ``value`` as strict JSON can hold it, and what was lost by dotted path.

    NaN, infinities and unread values become None; the flags say which: "nan", "inf", "-inf" or the reason.
    """
    flags: dict[str, str] = {}
    return _strict(plain(value), "", flags), flags


def _container_or_array(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "to_local") and hasattr(value, "placements"):
        value = _local(value)
        if isinstance(value, Unread):
            return value
    if callable(getattr(value, "numel", None)):
        return _listed(value.detach() if hasattr(value, "detach") else value, int(value.numel()))
    if callable(getattr(value, "tolist", None)):
        return _listed(value, int(getattr(value, "size", 1)))
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [plain(item) for item in value]
    return str(value)


def _listed(array: Any, count: int) -> Any:
    if count > _LONGEST_LIST:
        return Unread(f"{type(array).__name__} of {count} elements is too large to log")
    if count == 1 and callable(getattr(array, "item", None)):
        return plain(array.item())
    return plain(array.tolist())


def _local(value: Any) -> Any:
    if not all(placement.is_replicate() for placement in value.placements) and value.device_mesh.size() > 1:
        return Unread(
            f"DTensor with placements {tuple(value.placements)}: call .full_tensor() on every rank before logging"
        )
    torch = sys.modules["torch"]
    with torch.no_grad():
        return value.to_local()


def _strict(value: Any, path: str, flags: dict[str, str]) -> Any:
    if isinstance(value, Unread):
        flags[path] = value.reason
        return None
    if isinstance(value, float) and not math.isfinite(value):
        flags[path] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        return None
    if isinstance(value, dict):
        return {key: _strict(item, f"{path}.{key}" if path else key, flags) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item, f"{path}.{index}" if path else str(index), flags) for index, item in enumerate(value)]
    return value
