"""From whatever holds tensors to the storages under them: each place in memory once.

Tensor subclasses that wrap others (DTensor, AsyncCollectiveTensor, NestedTensor) hold no memory themselves:
what they wrap does, and ``__tensor_flatten__`` names it. Fake tensors stand on a meta storage of the true size;
their ``device`` says where the bytes would be, so devices are always read from the tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Place = tuple[torch.UntypedStorage, torch.device]
"""A storage, and the device on which its bytes are (or would be, under fake tensors)."""


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class only wrap others."""
    return hasattr(kind, "__tensor_flatten__")


def places_of(tensor: torch.Tensor) -> Iterator[Place]:
    """Yield the storages under one tensor; none for layouts that have no storage."""
    if is_wrapper(type(tensor)):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        for name in names:
            part = getattr(tensor, name)
            # DTensor also lists its mesh.
            if isinstance(part, torch.Tensor):
                yield from places_of(part)
    elif tensor.layout is torch.strided:
        try:
            yield tensor.untyped_storage(), tensor.device
        except (NotImplementedError, RuntimeError):
            return
    else:
        for name in ("values", "indices", "crow_indices", "col_indices", "ccol_indices", "row_indices"):
            part = _sparse_part(tensor, name)
            if part is not None:
                yield from places_of(part)


def _sparse_part(tensor: torch.Tensor, name: str) -> torch.Tensor | None:
    try:
        # An uncoalesced COO tensor answers only to the underscored names.
        return getattr(tensor, f"_{name}" if tensor.layout is torch.sparse_coo else name)()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def tensors_in(*things: Any) -> list[torch.Tensor]:
    """Return every tensor that is reachable from the things given, each object once.

    Looks into modules (parameters, gradients, buffers), optimizers (states and parameters), mappings,
    sequences, sets, dataclasses and plain objects (a cache, a model's output).
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    queue: list[Any] = list(things)
    while queue:
        thing = queue.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[id(thing)] = thing
            if thing.is_leaf and thing.grad is not None:
                queue.append(thing.grad)
        else:
            queue.extend(_children(thing))
    return list(found.values())


def _children(thing: Any) -> Iterable[Any]:
    if isinstance(thing, nn.Module):
        return [*thing.parameters(), *thing.buffers()]
    if isinstance(thing, Optimizer):
        return [*thing.state.values(), *thing.param_groups]
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, field.name, None) for field in dataclasses.fields(thing)]
    if isinstance(thing, str | bytes | type) or callable(thing):
        return []
    return list(getattr(thing, "__dict__", {}).values())


def places_in(*things: Any) -> list[Place]:
    """Return every storage that is reachable from the things given, once each."""
    found: dict[int, Place] = {}
    for tensor in tensors_in(*things):
        for place in places_of(tensor):
            found.setdefault(id(place[0]), place)
    return list(found.values())
