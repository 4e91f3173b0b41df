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

import random
import weakref
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.errors import StateChangedError

__all__ = ["HostRandom", "StateWatch", "frozen", "modules_of", "same_bits", "thawed", "unchanged"]

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
                if value.grad_fn is None:
                    self._versions.append((name, value, value._version))
                else:
                    before[name] = _Weakly(value)
            elif isinstance(value, _CONTAINERS) and value and not name.startswith("_"):
                self._containers.append((values, name, frozen(value, weakly=True)))
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
                was = was.value(_ABSENT) if isinstance(was, _Weakly) else was
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


def modules_of(module: nn.Module) -> list[nn.Module]:
    """List a module and all below it, each once, itself first."""
    found = {id(module): module}
    stack = [module]
    while stack:
        for child in stack.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                stack.append(child)
    return list(found.values())


class HostRandom:
    """The generators of Python and NumPy before forward, which torch does not put back."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)

    def changed(self) -> bool:
        """Whether something drew from them since."""
        now: Any = np.random.get_state(legacy=True)
        same = now[2:] == self._numpy[2:] and np.array_equal(now[1], self._numpy[1])
        return not same or random.getstate() != self._python

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Put them back to before forward, and to where they are now at the end."""
        now = HostRandom()
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)


# -- containers --------------------------------------------------------------------------------------------------


class _Weakly:
    """A tensor with a graph that is not kept alive here.

    A block that stores its auxiliary loss on itself would otherwise chain the graphs of all steps together. Where the
    tensor is gone by the time of recompute, so is the attribute, and a block that reads it fails loudly.
    """

    __slots__ = ("_ref",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = weakref.ref(tensor)

    def value(self, gone: Any = None) -> Any:
        """Return the tensor, or ``gone``."""
        tensor = self._ref()
        return gone if tensor is None else tensor


def frozen(value: Any, depth: int = _DEPTH, *, weakly: bool = False) -> Any:
    """Take down a container with the containers in it; ``weakly`` does not keep tensors with a graph alive."""
    if weakly and isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return _Weakly(value)
    if depth == 0 or not isinstance(value, _CONTAINERS) or len(value) > _MOST_ITEMS:
        return value
    if isinstance(value, dict):
        return _Frozen(value, [(k, frozen(v, depth - 1, weakly=weakly)) for k, v in value.items()])
    if isinstance(value, set):
        return _Frozen(value, list(value))
    return _Frozen(value, [frozen(v, depth - 1, weakly=weakly) for v in value])


class _Frozen:
    """A container as it was."""

    __slots__ = ("container", "items")

    def __init__(self, container: Any, items: list[Any]) -> None:
        self.container = container
        self.items = items


def unchanged(now: Any, before: Any) -> bool:
    """Whether a value is what it was when it was frozen: by identity, containers by what they hold."""
    if isinstance(before, _Weakly):
        return now is before.value(_ABSENT)
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
    if isinstance(before, _Weakly):
        return before.value()
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
