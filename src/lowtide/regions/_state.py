"""What forward changes besides tensors in the graph: buffers and plain attributes of modules.

Without checkpointing forward runs once. Recompute runs it again, so what it changes would change twice (running
statistics, counters, expert loads), and what it reads may have changed in between. So the values from before forward
are taken down; recompute runs with them in place; afterwards what was there is put back. A table that forward builds
at its first call and caches in an attribute is built again by that call's recompute, as it must be.

Attributes are compared by identity, lists, dicts and sets also by their items. Limits: state outside of modules
(globals, closures, other objects' attributes) is not seen here; the comparison of operators is what is left for it.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.errors import RefusedError

__all__ = ["Before", "StateWatch", "same_bits"]

_ABSENT = object()
_OWN_KEYS = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, dict, set)


@dataclass(frozen=True)
class Before:
    """What was there before forward, of what forward changed."""

    buffers: tuple[tuple[nn.Module, str, torch.Tensor], ...] = ()
    attributes: tuple[tuple[nn.Module, str, Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.buffers or self.attributes)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Put the values from before forward in place, and what is there now back at the end."""
        if not self:
            yield
            return
        # The mode that follows the tape must not take the copies for operators of the region.
        with _disable_current_modes():
            copies = [(owner, leaf, value.clone()) for owner, leaf, value in self.buffers]
        now = [(owner, leaf, owner._buffers[leaf]) for owner, leaf, _ in self.buffers]
        now_attributes = [(m, name, m.__dict__.get(name, _ABSENT)) for m, name, _ in self.attributes]
        try:
            for owner, leaf, value in copies:
                owner._buffers[leaf] = value
            for module, name, value in self.attributes:
                _put(module, name, value.copy() if isinstance(value, _CONTAINERS) else value)
            yield
        finally:
            for owner, leaf, value in now:
                owner._buffers[leaf] = value
            for module, name, value in now_attributes:
                _put(module, name, value)


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


class StateWatch:
    """Takes down the state of a region's modules before forward, and finds what changed after it."""

    def __init__(self, modules: Sequence[nn.Module], *, clone: Collection[str] | None) -> None:
        """Args: ``clone`` names buffers to copy, as ``named_buffers`` of the first module does; None copies all."""
        self._modules = modules
        self._dicts = [m.__dict__.copy() for m in modules]
        self._lists = [
            (m, name, value.copy())
            for m, values in zip(modules, self._dicts, strict=True)
            for name, value in values.items()
            if isinstance(value, _CONTAINERS) and name not in _OWN_KEYS
        ]
        self._copies: list[tuple[str, nn.Module, str, torch.Tensor, int]] = []
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        for name, owner, leaf, buffer in _buffers(modules[0]):
            if clone is None or name in clone:
                self._copies.append((name, owner, leaf, buffer.detach().clone(), buffer._version))
            else:
                self._versions.append((name, buffer, buffer._version))

    def changed(self, fqn: str) -> tuple[Before, tuple[str, ...]]:
        """Return what was there before, of what changed, and the names of the changed buffers.

        Raises:
            RefusedError: a buffer changed that never changed before, and its value from before is lost.
        """
        for name, buffer, version in self._versions:
            if buffer._version != version:
                raise RefusedError(
                    f"region {fqn}: forward wrote to the buffer {name}, which it had left alone for such inputs, so "
                    "backward would start from the new value. Run the step again: the buffer is copied from now on"
                )
        buffers = [entry for entry in self._copies if self._differs(*entry[1:])]
        return (
            Before(tuple((o, leaf, value) for _, o, leaf, value, _ in buffers), tuple(self._attributes())),
            tuple(entry[0] for entry in buffers),
        )

    @staticmethod
    def _differs(owner: nn.Module, leaf: str, copy: torch.Tensor, version: int) -> bool:
        buffer = owner._buffers.get(leaf)
        return buffer is not None and (buffer._version != version or not same_bits(buffer, copy))

    def _attributes(self) -> list[tuple[nn.Module, str, Any]]:
        found: list[tuple[nn.Module, str, Any]] = []
        for module, before in zip(self._modules, self._dicts, strict=True):
            now = module.__dict__
            if len(now) == len(before) and all(now.get(k, _ABSENT) is v for k, v in before.items()):
                continue
            names = [*before, *(k for k in now if k not in before)]
            found += [
                (module, k, before.get(k, _ABSENT))
                for k in names
                if k not in _OWN_KEYS and now.get(k, _ABSENT) is not before.get(k, _ABSENT)
            ]
        replaced = {(id(m), name) for m, name, _ in found}
        for module, name, copied in self._lists:
            if (id(module), name) not in replaced and _items_differ(module.__dict__.get(name), copied):
                found.append((module, name, copied))
        return found


def _items_differ(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return True
    if isinstance(now, dict):
        return any(now.get(k, _ABSENT) is not v for k, v in before.items())
    if isinstance(now, set):
        return now != before
    return any(a is not b for a, b in zip(now, before, strict=True))


def _buffers(module: nn.Module) -> Generator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield every buffer with its name and its place, a shared module's once."""
    for prefix, owner in module.named_modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                yield (f"{prefix}.{leaf}" if prefix else leaf), owner, leaf, buffer


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN equal to NaN; fake tensors are taken to."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if isinstance(a, torch._subclasses.FakeTensor) or a.is_meta:
        return True
    with torch.no_grad():
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
