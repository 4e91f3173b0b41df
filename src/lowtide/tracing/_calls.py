"""Calls of modules in a trace: what each was given and returned, as a region on that module would meet it.

Hooks on the instances, not torch's global ones, since only they are told keyword arguments; the last to run, so that
they see what other hooks made of the arguments. A module that is called by its ``forward`` has no hooks and no call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowtide.records import CallRecord, TensorRecord
from lowtide.tracing._flops import tensors

__all__ = ["Calls"]


@dataclass
class _Call:
    module: str
    ops: tuple[int, int]
    saved: tuple[int, int]
    arguments: tuple[tuple[str, TensorRecord], ...]
    results: tuple[TensorRecord, ...] = ()


class Calls:
    """Notes calls, in the order in which they begin."""

    def __init__(self, record: Callable[[Tensor], TensorRecord], now: Callable[[], tuple[int, int]]) -> None:
        """Args: ``record`` writes a tensor down; ``now`` tells how many operators ran and how many were packed."""
        self._record = record
        self._now = now
        self._found: list[_Call] = []
        self._running: list[_Call] = []

    @contextmanager
    def following(self, names: Mapping[nn.Module, str]) -> Generator[None]:
        """Note the calls of these modules until the context ends."""
        with ExitStack() as stack:
            for module, name in names.items():
                before = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                after = module.register_forward_hook(self._leave, prepend=True, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
            arguments = tuple((place, self._record(t)) for place, value in given for t in tensors(value))
            ops, saved = self._now()
            call = _Call(name, (ops, ops), (saved, saved), arguments)
            self._found.append(call)
            self._running.append(call)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._running.pop()
        ops, saved = self._now()
        call.ops, call.saved = (call.ops[0], ops), (call.saved[0], saved)
        call.results = tuple(self._record(t) for t in tensors(output))

    def records(self) -> tuple[CallRecord, ...]:
        """Return what was noted."""
        return tuple(
            CallRecord(module=c.module, ops=c.ops, saved=c.saved, arguments=c.arguments, results=c.results)
            for c in self._found
        )
