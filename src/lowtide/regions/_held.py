"""What a recorded region holds from forward to backward: tensors with their versions, and slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.errors import RecomputeError
from lowtide.regions._tape import share

__all__ = ["Form", "Held", "HeldView", "Passed", "Slot", "copy_of_storage", "look", "version_only", "without_cycle"]

Form = tuple[torch.Size, tuple[int, ...], Any, torch.dtype]
"""Size, stride, offset in elements of ``dtype`` from the storage's start, dtype."""


class Held:
    """A tensor that stays, with the version that it must still have when it is used."""

    __slots__ = ("__weakref__", "tensor", "version", "where")

    def __init__(self, tensor: torch.Tensor, where: str) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.where = where

    def get(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RecomputeError: it was written to.
        """
        tensor = self.tensor
        if self.version >= 0 and tensor._version != self.version:
            raise changed(self.where, tensor, self.version)
        return tensor


class HeldView(Held):
    """A view that stays in the place of its whole: what is got is the whole, as it was made."""

    __slots__ = ("form",)

    def __init__(self, tensor: torch.Tensor, where: str, form: Form) -> None:
        super().__init__(tensor, where)
        self.form = form

    def get(self) -> torch.Tensor:
        """Return the whole.

        Raises:
            RecomputeError: it was written to.
        """
        return look(super().get(), self.form)


class Passed:
    """A tensor that went through the saved-tensor hooks around the region: an outer region's, or the user's."""

    __slots__ = ("__weakref__", "packed", "unpack")

    def __init__(self, tensor: torch.Tensor, hooks: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
        pack, self.unpack = hooks
        self.packed = pack(tensor)

    def get(self) -> torch.Tensor:
        """Return what the hooks give back."""
        return self.unpack(self.packed)


class Slot:
    """What autograd holds in the place of a tensor that it saved."""

    __slots__ = ("__weakref__", "form", "index", "keeps", "original", "record", "state", "value")

    def __init__(self, record: Any, state: int, form: Form | None, original: Held | None) -> None:
        self.record = record
        self.state = state
        self.form = form
        self.original = original
        """What autograd saved, as long as it is held."""
        self.index = -1
        """Its number among the slots that were alive at the end of forward."""
        self.value: torch.Tensor | None = None
        """What replay gave, where it may be asked for again."""
        self.keeps: tuple[Any, ...] = ()
        """The kept values that it depends on: they go when the last such slot goes."""

    def get(self) -> torch.Tensor:
        """Return the value."""
        if self.original is not None:
            return self.original.get()
        return self.record.take(self) if self.value is None else self.value


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def changed(where: str, tensor: torch.Tensor, expected: int) -> RecomputeError:
    """Make the error about a tensor that was written to before backward used it."""
    return RecomputeError(
        f"{where}: a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after the region "
        f"used it (version {tensor._version}, expected {expected}), so backward cannot compute the right gradient. "
        "Write it out of place, or clone it first"
    )


def copy_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor's whole storage, and look at the copy as the tensor looks at its own."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.detach().as_strided((count,), (1,), 0).clone()
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def version_only(tensor: torch.Tensor, where: str) -> Held:
    """Hold a tensor's version counter and none of its memory."""
    held = Held(share(tensor), where)
    # Assigning data keeps the counter, which the two have in common.
    held.tensor.data = tensor.detach().new_empty(0)
    return held


def without_cycle(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor to hold for long: not one that could, once written to, lead back to this region's graph."""
    if tensor.is_neg() or tensor.is_conj() or tensor.is_quantized:
        raise NotImplementedError(f"{tensor.dtype} with lazy conjugation, negation or quantization")
    if tensor.is_leaf:
        return tensor
    base = tensor._base
    return tensor if base is not None and base.is_leaf else share(tensor)


def look(base: torch.Tensor, form: Form) -> torch.Tensor:
    """Look at the storage of ``base`` as the record says."""
    size, stride, offset, dtype = form
    if base.dtype is not dtype:
        empty = torch.empty(0, dtype=dtype, device=base.device)
        return empty.set_(base.untyped_storage(), offset, size, stride)
    return base.as_strided(size, stride, offset)
