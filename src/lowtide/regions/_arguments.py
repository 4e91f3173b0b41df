"""A call's arguments taken apart into leaves, and put together again as they were before forward.

torch's checkpoint keeps tensors only where they stand among the arguments it is given, so they are handed over as
leaves. Recompute gets fresh containers, and objects with the attributes from before: a block that assigns into a
dictionary it was given starts recompute from what it was given (pytorch issue 178568).
"""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lowtide.errors import StateChangedError
from lowtide.regions._state import frozen, thawed, unchanged

__all__ = ["Spec", "flatten"]


@dataclass(frozen=True)
class Spec:
    """How leaves become arguments again, in fresh containers, as they were before forward."""

    tree: TreeSpec | None
    positional: int
    names: tuple[str, ...]
    objects: tuple[tuple[int, _Attributes | None], ...]
    """Leaves that are objects with attributes, and those attributes before forward; None where a copy was made."""

    def rebuild(self, given: tuple[Any, ...], fqn: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs.

        Raises:
            StateChangedError: a tensor inside an object was written in place; its content from before is lost.
        """
        leaves = list(given)
        for i, before in self.objects:
            leaves[i] = copy.copy(leaves[i]) if before is None else before.restored(leaves[i], fqn)
        if self.tree is not None:
            args, kwargs = tree_unflatten(leaves, self.tree)
            return tuple(args), kwargs
        return tuple(leaves[: self.positional]), dict(zip(self.names, leaves[self.positional :], strict=True))


class _Attributes:
    """The attributes of an object before forward, with what containers among them held."""

    def __init__(self, value: Any) -> None:
        self._values = {k: frozen(v) for k, v in vars(value).items()}
        self._versions = [(k, v, v._version) for k, v in self._values.items() if isinstance(v, torch.Tensor)]

    def restored(self, value: Any, fqn: str) -> Any:
        """Return an object with these attributes: itself, if nothing in it changed."""
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise StateChangedError(
                    f"region {fqn}: the tensor {name!r} of an argument ({type(value).__name__}) was written in place "
                    "between forward and backward; recompute would read the new value. Write it out of place"
                )
        now = vars(value)
        if len(now) == len(self._values) and all(k in now and unchanged(now[k], v) for k, v in self._values.items()):
            return value
        fresh = copy.copy(value)
        vars(fresh).clear()
        vars(fresh).update((k, thawed(v)) for k, v in self._values.items())
        return fresh


_SIMPLE = (torch.Tensor, int, float, bool, str, type(None), torch.dtype, torch.device)
_SHARED = (torch.Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Spec]:
    """Take arguments apart, so that recompute starts from what forward was given."""
    flat = [*args, *kwargs.values()]
    if all(isinstance(v, _SIMPLE) for v in flat):
        return flat, Spec(None, len(args), tuple(kwargs), ())
    leaves, tree = tree_flatten((args, kwargs))
    objects: list[tuple[int, _Attributes | None]] = []
    for i, value in enumerate(leaves):
        if isinstance(value, _SIMPLE + _SHARED):
            continue
        if hasattr(value, "__dict__"):
            objects.append((i, _Attributes(value)))
        elif hasattr(type(value), "__slots__") and type(value).__module__ != "builtins":
            leaves[i] = copy.copy(value)
            objects.append((i, None))
    return leaves, Spec(tree, 0, (), tuple(objects))
