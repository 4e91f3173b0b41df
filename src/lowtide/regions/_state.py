"""What forward sees and changes besides its arguments: parameters, buffers and attributes of the region's modules.

Without checkpointing forward runs once. Recompute runs it again, later: what forward changed would change twice
(running statistics, counters, expert loads), and what it reads may have changed in between (another adapter switched
on, ``functional_call`` over, ``eval()`` called, a table cached). So the state from before forward is taken down;
recompute runs with it in place; afterwards what was there is put back.

Attributes and entries are compared by identity, containers also by what they hold, some levels deep. Contents of
tensors are compared by version: a buffer that forward is known to write is copied, any other tensor that changed is an
error, since its content is lost. Limits, as in autograd itself: writes through ``.data`` or NumPy raise no version;
and state outside of modules (globals, closures) is not seen here, the comparison of operators is what is left for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.errors import StateChangedError

__all__ = ["StateWatch", "frozen", "same_bits", "thawed", "unchanged"]

_ABSENT = object()
_TABLES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, deque)
_DEPTH = 4
_MOST_ITEMS = 1000


class StateWatch:
    """The state of a region's modules before one forward."""

    def __init__(self, modules: Sequence[nn.Module], *, clone: Collection[str] | None) -> None:
        """Args: ``clone`` names buffers to copy, as ``named_buffers`` of the first module does; None copies all."""
        self._places: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[dict[str, Any], str, Any]] = []
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        for module in modules:
            self._take(module)
        self._copies: list[tuple[str, nn.Module, str, torch.Tensor, int]] = []
        copied: set[int] = set()
        for name, owner, leaf, buffer in _buffers(modules[0]) if clone is None or clone else ():
            if clone is None or name in clone:
                self._copies.append((name, owner, leaf, buffer.detach().clone(), buffer._version))
                copied.add(id(buffer))
        if copied:
            self._versions = [entry for entry in self._versions if id(entry[1]) not in copied]

    def _take(self, module: nn.Module) -> None:
        values = module.__dict__
        before = values.copy()
        self._places.append((values, before))
        for name in _TABLES:
            table = values[name]
            if table:
                self._places.append((table, table.copy()))
        for name, value in before.items():
            if isinstance(value, torch.Tensor):
                self._versions.append((name, value, value._version))
            elif isinstance(value, _CONTAINERS) and value and not name.startswith("_"):
                self._containers.append((values, name, frozen(value)))
        for name in ("_parameters", "_buffers"):
            self._versions += [(k, t, t._version) for k, t in before[name].items() if t is not None]

    def forget_unchanged(self) -> tuple[str, ...]:
        """After a thorough forward: drop the copies of buffers that it left alone, and name the others."""
        self._copies = [entry for entry in self._copies if _differs(*entry[1:])]
        return tuple(entry[0] for entry in self._copies)

    @contextmanager
    def in_place(self, fqn: str) -> Generator[None]:
        """Put the state from before forward in place, and what is there now back at the end.

        Raises:
            StateChangedError: the content of a tensor changed, and is lost.
        """
        self._check_versions(fqn)
        # The mode that follows the tape must not take the copies for operators of the region.
        with _disable_current_modes() if self._copies else _nothing():
            copies = [(owner._buffers, leaf, value.clone()) for _, owner, leaf, value, _ in self._copies]
        changes = [*self._changes(), *copies]
        now = [(table, name, table.get(name, _ABSENT)) for table, name, _ in changes]
        try:
            for table, name, value in changes:
                _put(table, name, value)
            yield
        finally:
            for table, name, value in now:
                _put(table, name, value)

    def _check_versions(self, fqn: str) -> None:
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise StateChangedError(
                    f"region {fqn}: {name!r} (shape {tuple(tensor.shape)}) was written in place in or after forward "
                    f"and before backward (version {tensor._version}, then {version}); recompute would read the new "
                    "value. Step the optimizer after backward, and keep what forward writes in buffers"
                )

    def _changes(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for table, before in self._places:
            if len(table) == len(before) and all(table.get(k, _ABSENT) is v for k, v in before.items()):
                continue
            for name in {**before, **table}:
                was, now = before.get(name, _ABSENT), table.get(name, _ABSENT)
                # FSDP2 itself exchanges its parameters for their shards and back.
                if was is not now and not isinstance(was, DTensor) and not isinstance(now, DTensor):
                    yield table, name, was
        for values, name, before in self._containers:
            if not unchanged(values.get(name), before):
                yield values, name, thawed(before)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


@contextmanager
def _nothing() -> Generator[None]:
    yield


# -- containers --------------------------------------------------------------------------------------------------


def frozen(value: Any, depth: int = _DEPTH) -> Any:
    """Take down a container with the containers in it: (the container, what it held, as pairs or items)."""
    if depth == 0 or not isinstance(value, _CONTAINERS) or len(value) > _MOST_ITEMS:
        return value
    if isinstance(value, dict):
        return _Frozen(value, [(k, frozen(v, depth - 1)) for k, v in value.items()])
    if isinstance(value, set):
        return _Frozen(value, list(value))
    return _Frozen(value, [frozen(v, depth - 1) for v in value])


class _Frozen:
    """A container as it was."""

    __slots__ = ("container", "items")

    def __init__(self, container: Any, items: list[Any]) -> None:
        self.container = container
        self.items = items


def unchanged(now: Any, before: Any) -> bool:
    """Whether a value is what it was when it was frozen: by identity, containers by what they hold."""
    if not isinstance(before, _Frozen):
        return now is before
    if now is not before.container or len(now) != len(before.items):
        return False
    if isinstance(now, dict):
        return all(k in now and unchanged(now[k], v) for k, v in before.items)
    if isinstance(now, set):
        return now == set(before.items)
    return all(unchanged(n, b) for n, b in zip(now, before.items, strict=True))


def thawed(before: Any) -> Any:
    """Return a fresh container that holds what was frozen."""
    if not isinstance(before, _Frozen):
        return before
    fresh = before.container.copy()
    fresh.clear()
    if isinstance(fresh, dict):
        fresh.update((k, thawed(v)) for k, v in before.items)
    elif isinstance(fresh, set):
        fresh.update(before.items)
    else:
        fresh.extend(thawed(v) for v in before.items)
    return fresh


# -- tensors -----------------------------------------------------------------------------------------------------


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield every buffer with its name and its place, a shared module's once."""
    for prefix, owner in module.named_modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                yield (f"{prefix}.{leaf}" if prefix else leaf), owner, leaf, buffer


def _differs(owner: nn.Module, leaf: str, copy: torch.Tensor, version: int) -> bool:
    buffer = owner._buffers.get(leaf)
    return buffer is not None and (buffer._version != version or not same_bits(buffer, copy))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN equal to NaN; fake tensors are taken to."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if isinstance(a, torch._subclasses.FakeTensor) or a.is_meta:
        return True
    with torch.no_grad():
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
