"""Two things that happen to memory outside the dispatcher, made visible while someone looks.

``UntypedStorage.resize_`` frees and refills a storage in place (FSDP2 does it for every parameter, in forward
and in backward) and is a plain method of C++; ``torch.get_rng_state`` allocates 5,056 bytes (a region keeps one
state for its recompute) without an operator. Both names are replaced while at least one observer is inside the
context, and put back by the last one to leave. Checked with torch 2.11, 2.13 and 2.14.

Limit: an original that somebody took before (``from torch import get_rng_state``) is not seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Observer(Protocol):
    """Who wants to know."""

    def on_resize(self, storage: torch.UntypedStorage) -> None:
        """Called when a storage has its new size."""
        ...

    def on_rng_state(self, state: torch.Tensor) -> None:
        """Called with a state of a random generator that was just copied out."""
        ...


_lock = threading.Lock()
_observers: list[Observer] = []
_undo: list[Callable[[], None]] = []


@contextmanager
def observing(observer: Observer) -> Generator[None]:
    """Tell ``observer`` about resizes and copied random states until the context ends."""
    with _lock:
        if not _observers:
            _install()
        _observers.append(observer)
    try:
        yield
    finally:
        with _lock:
            _observers.remove(observer)
            if not _observers:
                while _undo:
                    _undo.pop()()


def _install() -> None:
    original_resize = torch.UntypedStorage.resize_
    original_state = torch.random.get_rng_state

    @functools.wraps(original_resize)
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original_resize(storage, size)
        for observer in tuple(_observers):
            observer.on_resize(storage)
        return result

    @functools.wraps(original_state)
    def get_rng_state() -> torch.Tensor:
        state = original_state()
        for observer in tuple(_observers):
            observer.on_rng_state(state)
        return state

    _replace(torch.UntypedStorage, "resize_", resize_)
    for module in (torch, torch.random):
        if module.get_rng_state is original_state:
            _replace(module, "get_rng_state", get_rng_state)


def _replace(owner: Any, name: str, value: Any) -> None:
    # Inherited names are put back by removal: setting them would leave a shadow behind.
    if name in vars(owner):
        _undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
    else:
        _undo.append(functools.partial(delattr, owner, name))
    setattr(owner, name, value)
