"""Count operators by overload name, in forward and in backward, and the bytes that stay alive between."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OpCounter(TorchDispatchMode):
    """Counts every operator that really runs: what a selective context answers from its cache is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd and the saved-tensor hooks detach as they please; it is no work. So are the empty tensors by which
        # torch 2.11's checkpoint ties a region's inputs to its graph.
        placeholder = func is torch.ops.aten.empty.memory_format and list(args[0]) == [0]
        if func is not torch.ops.aten.detach.default and not placeholder:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_ops(forward: Callable[[], Tensor]) -> tuple[Counter[str], Counter[str]]:
    """Run ``forward`` to a loss and its backward; the operators of each."""
    with OpCounter() as ahead:
        loss = forward()
    with OpCounter() as behind:
        loss.backward()
    return ahead.counts, behind.counts


def ran_again(plain: Callable[[], Tensor], checkpointed: Callable[[], Tensor]) -> Counter[str]:
    """The operators that backward runs under a policy and not without it."""
    ahead, behind = count_ops(plain)
    ahead_policy, behind_policy = count_ops(checkpointed)
    assert ahead_policy == ahead, f"forward differs: {ahead_policy - ahead} more, {ahead - ahead_policy} fewer"
    missing = behind - behind_policy
    assert not missing, f"backward lacks {missing}"
    return behind_policy - behind


def only(counts: Counter[str], *packets: str) -> dict[str, int]:
    """The counts of the overloads of some packets (``aten.mm``)."""
    return {n: c for n, c in counts.items() if n.rsplit(".", 1)[0] in packets}


class Storages(TorchDispatchMode):
    """Remembers every storage that operators make, without keeping it; what was there before is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.from_outside: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages_of((args, kwargs)):
            if self._alive(storage._cdata) is None:
                self.from_outside[storage._cdata] = storage
        out = func(*args, **(kwargs or {}))
        for storage in _storages_of(out):
            if storage._cdata not in self.from_outside:
                self.made[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out

    def _alive(self, key: int) -> Any:
        return self.made[key][0]() if key in self.made else None

    def alive_bytes(self) -> int:
        return sum(size for ref, size in self.made.values() if ref() is not None)


def _storages_of(value: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Bytes made by ``forward`` that are alive after it, its result included; cycles are collected first."""
    storages = Storages()
    gc.freeze()  # what is there already is not looked at: a collection takes seconds after a compile
    try:
        with storages:
            kept = forward()
        gc.collect()
        total = storages.alive_bytes()
    finally:
        gc.unfreeze()
    del kept
    return total


def peek(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Counter[str]:
    """The operators of one forward."""
    with OpCounter() as counter:
        model(*args, **kwargs)
    return counter.counts
