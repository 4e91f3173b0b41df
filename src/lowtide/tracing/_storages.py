"""The storages of one trace: from which operator each comes, and when it dies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.records import TensorRecord
from lowtide.tracing._flops import tensors


@dataclass
class Storage:
    """What is learned of a storage while the trace runs."""

    ref: weakref.ref[torch.UntypedStorage]
    id: int
    nbytes: int
    role: str
    name: str | None = None
    made_by: int | None = None
    last_use: int | None = None
    saved: bool = False
    returned: bool = False
    backward: bool = False
    freed: int | None = None
    released: int | None = None


@dataclass
class Storages:
    """Numbers storages in the order in which they appear, and notes when they die."""

    now: Callable[[], int | None]
    """How many operators have run; None once deaths do not count any more."""
    found: list[Storage] = field(default_factory=list["Storage"])
    _by_key: dict[int, Storage] = field(default_factory=dict[int, "Storage"])

    def of(self, tensor: Tensor) -> Storage | None:
        """Return what is known of a tensor's storage."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        known = self._by_key.get(id(storage))
        return known if known is not None and known.ref() is storage else None

    def add(self, tensor: Tensor, role: str, name: str | None = None) -> Storage | None:
        """Number a tensor's storage, unless it has a number."""
        known = self.of(tensor)
        if known is not None:
            return known
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        number = len(self.found)
        ref = weakref.ref(storage, lambda _: self._died(number))
        made = Storage(ref, number, storage.nbytes(), role, name)
        self.found.append(made)
        self._by_key[id(storage)] = made
        return made

    def _died(self, number: int) -> None:
        self.found[number].freed = self.now()

    def record(self, tensor: Tensor) -> TensorRecord:
        """Write a tensor down as it is now."""
        known = self.of(tensor)
        return TensorRecord(
            storage=None if known is None else known.id,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            dtype=str(tensor.dtype).removeprefix("torch."),
        )


class Releases(TorchDispatchMode):
    """Notes when Python lets go of what forward makes, if autograd holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.released: dict[tuple[int, int], int] = {}
        """(operator, which of the storages that it made) -> operators that had run when it died."""
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("prim", "profiler") or is_nothing(func):
            return result
        made, given = tensors(result), tensors((args, kwargs))
        if not (made or given):
            return result
        place = len(self.ops)
        self.ops.append(str(func))
        for tensor in given:
            self._follow(tensor, None)
        number = 0
        for tensor in made:
            number += self._follow(tensor, (place, number))
        return result

    def _follow(self, tensor: Tensor, key: tuple[int, int] | None) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return 0
        known = self._alive.get(id(storage))
        if known is not None and known() is storage:
            return 0

        def died(_: Any) -> None:
            if key is not None:
                self.released[key] = len(self.ops)

        self._alive[id(storage)] = weakref.ref(storage, died)
        return 1


def is_nothing(func: Any) -> bool:
    """Whether an operator does no work and takes no memory: autograd detaches what it packs and what it collects."""
    return func is torch.ops.aten.detach.default
