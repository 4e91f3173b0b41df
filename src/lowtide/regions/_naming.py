"""Names that a model's code gives to values, for rules by name (the habit of JAX's users).

``checkpoint_name`` returns its argument itself and tells every recording of a region that is under way. It is no
operator: nothing runs for it, and nothing of it is left in compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from lowtide.errors import UserError
from lowtide.regions._held import Form, look
from lowtide.regions._plan import Decision
from lowtide.regions._tape import share, storage_of

__all__ = ["Made", "Makers", "TakesNames", "checkpoint_name"]


@runtime_checkable
class TakesNames(Protocol):
    """A recording of a region's forward."""

    def take_name(self, tensor: torch.Tensor, name: str) -> None:
        """A value was given a name."""


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Give a value a name that rules of a policy can use: ``{name: ffn_in, action: save}``.

    Outside of checkpointed regions, and where no rule is about names, it does nothing. Name a value right where it is
    made: ``h = lowtide.checkpoint_name(self.up(x), "ffn_in")``.

    Args:
        x: any tensor.
        name: text, the same in every call.

    Returns:
        ``x`` itself.

    Raises:
        UserError: ``x`` is no tensor, or ``name`` no text.
    """
    if torch.compiler.is_compiling():
        return x
    if not isinstance(x, torch.Tensor) or not isinstance(name, str) or not name:
        raise UserError(
            f"checkpoint_name takes a tensor and a name, got {type(x).__name__} and {name!r}; "
            'write h = lowtide.checkpoint_name(h, "ffn_in")'
        )
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, TakesNames):
            mode.take_name(x, name)
    return x


@dataclass(frozen=True)
class Made:
    """How a value came about."""

    decision: Decision
    generators: list[tuple[str, torch.Tensor]] | None
    """Where the generators stood after it, if the operator drew random numbers."""


@dataclass(frozen=True)
class Maker:
    """The operator on a tape that made a value."""

    position: int
    made: Made
    outputs: list[tuple[StorageWeakRef, Form] | None]
    tree: Any
    routes: bool

    def holds(self, storage: int) -> bool:
        """Whether an output of it still lives there."""
        return any(o is not None and o[0].cdata == storage and not o[0].expired() for o in self.outputs)

    def output(self, tensor: torch.Tensor) -> Any:
        """Return the operator's whole output, of which ``tensor`` shows a part; None where some of it is gone."""
        with _disable_current_modes():
            leaves = [None if o is None else _rebuilt(*o, tensor) for o in self.outputs]
        return None if any(leaf is None for leaf in leaves) else tree_unflatten(leaves, self.tree)


def _rebuilt(storage: StorageWeakRef, form: Form, tensor: torch.Tensor) -> torch.Tensor | None:
    if storage.cdata == storage_of(tensor):
        return look(share(tensor), form)
    found: Any = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)  # pyright: ignore[reportAttributeAccessIssue]
    if found is None:
        return None
    size, stride, offset, dtype = form
    return tensor.new_empty(0, dtype=dtype).set_(found, offset, size, stride)


class Makers:
    """Storage -> where it was made, for the values of one recording."""

    def __init__(self) -> None:
        self._makers: dict[int, Maker] = {}
        self._latest: Any = None
        """Outputs of the last operator with several: one may be named when the others are not needed any more."""

    def note(self, position: int, out: Any, made: Made, *, routes: bool) -> None:
        """Remember an operator's output."""
        leaves, tree = tree_flatten(out)
        maker = Maker(position, made, [_form(leaf) for leaf in leaves], tree, routes)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._note(storage_of(leaf), maker)
        if len(leaves) > 1:
            self._latest = out

    def _note(self, storage: int, maker: Maker) -> None:
        """What returns the storage of another's output did not make it; an address may come again, though."""
        known = self._makers.get(storage)
        if known is None or not known.holds(storage):
            self._makers[storage] = maker

    def forget(self, tensor: torch.Tensor) -> bool:
        """A storage was written to: what made its content is not one operator any more."""
        return self._makers.pop(storage_of(tensor), None) is not None

    def find(self, tensor: torch.Tensor) -> Maker | None:
        """Return where a value was made; None for one from outside."""
        return self._makers.get(storage_of(tensor))


def _form(leaf: Any) -> tuple[StorageWeakRef, Form] | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    try:
        storage = leaf.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return StorageWeakRef(storage), (leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype)
