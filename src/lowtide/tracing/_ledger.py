"""Live bytes over time: every storage from the operator that made it to the moment it dies.

A dispatch mode sees each operator's results; a weak reference to each new storage tells when it goes. The ledger only
appends (time, storage, change of bytes); what a storage was for is often known later (a gradient is one when the
optimizer reads it, an activation is saved when backward begins and it is still there), so categories are given at
the end. Storages that FSDP2 frees and refills in place are followed through ``UntypedStorage.resize_``, and the
generator states that checkpointing copies (5,056 bytes each, made in C++) through ``torch.get_rng_state``.

This is the prediction's own account of memory: the truth (``lowtide.measurement``) shares no code with it. Like any
account by operators, it sees no memory that a kernel allocates inside, except what ``_workspace`` knows.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.records import Category

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
# A wrapper that holds no memory itself: DTensor, AsyncCollectiveTensor.
_PARTS = "__tensor_flatten__"


@dataclass(slots=True, eq=False)
class Life:
    """One storage, from its making on."""

    number: int
    nbytes: int
    stage: str
    """Where in the step it was made."""
    module: str
    op: str
    category: Category | None = None
    """Known where it is certain; the rest is decided at the end."""
    outlived_forward: bool = False
    counted: bool = True
    """Whether its bytes count; what was there before and nobody named does not, until it is resized."""


class _Ref(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("life",)
    life: Life


class Ledger:
    """Storages that are alive, and everything that changed."""

    def __init__(self, block_bytes: int = 1) -> None:
        """``block_bytes``: what the target's allocator rounds every size up to, and counts."""
        self._block_bytes = block_bytes
        self.lives: list[Life] = []
        self.changes: list[tuple[int, int, int]] = []
        """(operator number, number of the life, change of bytes), in order."""
        self.operators: list[tuple[str, str, str]] = []
        """(stage, module, operator) of every operator number."""
        self._alive: dict[int, _Ref] = {}
        self._dead: deque[tuple[int, _Ref]] = deque()

    def alive(self) -> Iterator[Life]:
        """Yield the lives that go on."""
        self.bury()
        for ref in self._alive.values():
            yield ref.life

    def find(self, storage: torch.UntypedStorage) -> Life | None:
        """Return the life of a storage; None where it was never seen."""
        self.bury()
        ref = self._alive.get(id(storage))
        return None if ref is None else ref.life

    def add(self, storage: torch.UntypedStorage, stage: str, module: str, op: str, *, counted: bool = True) -> Life:
        """Follow a new storage."""
        life = Life(len(self.lives), 0, stage, module, op, counted=counted)
        self.lives.append(life)
        key = id(storage)
        ref = _Ref(storage, lambda dead: self._dead.append((key, dead)))  # pyright: ignore[reportArgumentType]
        ref.life = life
        self._alive[key] = ref
        if counted:
            self.resize(life, storage.nbytes())
        return life

    def resize(self, life: Life, nbytes: int) -> None:
        """Count a life by its new size."""
        nbytes = -(-nbytes // self._block_bytes) * self._block_bytes
        if nbytes != life.nbytes:
            self.changes.append((len(self.operators) - 1, life.number, nbytes - life.nbytes))
            life.nbytes = nbytes

    def pulse(self, nbytes: int, stage: str, module: str, op: str) -> None:
        """Count what a kernel allocates and frees inside."""
        life = Life(len(self.lives), 0, stage, module, f"{op} (workspace)", "transient")
        self.lives.append(life)
        now = len(self.operators) - 1
        nbytes = -(-nbytes // self._block_bytes) * self._block_bytes
        self.changes += [(now, life.number, nbytes), (now, life.number, -nbytes)]

    def bury(self) -> None:
        """Take out the storages that died since the last look."""
        while self._dead:
            key, ref = self._dead.popleft()
            if self._alive.get(key) is ref:
                del self._alive[key]
                self.resize(ref.life, 0)


def storages_of(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages under tensors in a result, each tensor's parts where it only wraps others."""
    if isinstance(value, Tensor):
        if hasattr(type(value), _PARTS) and not _is_fake(value):
            names, _ = value.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
            for name in names:
                yield from storages_of(getattr(value, name))
        else:
            try:
                yield value.untyped_storage()
            except (NotImplementedError, RuntimeError):
                return
    elif isinstance(value, list | tuple):
        for item in value:
            yield from storages_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from storages_of(item)


def _is_fake(value: Tensor) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor)


class Watch(TorchDispatchMode):
    """Calls ``seen(func, args, kwargs, result)`` for every operator on plain tensors; wrappers are let through.

    ``wrapped(func, args)`` is called with operators on wrappers, before those on their parts.
    """

    def __init__(
        self, before: Callable[[Any], None], seen: Callable[..., Any], wrapped: Callable[[Any, Sequence[Any]], None]
    ) -> None:
        super().__init__()
        self._before, self._seen, self._wrapped = before, seen, wrapped

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, _PARTS) and not issubclass(kind, torch._subclasses.FakeTensor) for kind in types):
            self._wrapped(func, args)
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        self._before(func)
        return self._seen(func, args, kwargs, func(*args, **kwargs))


def is_lift(func: Any) -> bool:
    """Whether an operator shows a tensor that C++ made for the first time."""
    return func in _LIFTS


@contextmanager
def following_resizes(on_resize: Callable[[torch.UntypedStorage], None]) -> Generator[None]:
    """Call ``on_resize`` after every ``UntypedStorage.resize_``."""
    own = "resize_" in vars(torch.UntypedStorage)
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        on_resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        if own:
            torch.UntypedStorage.resize_ = original  # pyright: ignore[reportAttributeAccessIssue]
        else:
            del torch.UntypedStorage.resize_


@contextmanager
def following_rng_states(on_state: Callable[[Tensor], None]) -> Generator[None]:
    """Call ``on_state`` with every copy of the CPU generator's state."""
    original = torch.random.get_rng_state

    def get_rng_state() -> Tensor:
        state = original()
        on_state(state)
        return state

    torch.random.get_rng_state = get_rng_state
    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.random.get_rng_state = original
        torch.get_rng_state = original
