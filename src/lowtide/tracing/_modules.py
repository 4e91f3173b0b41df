"""Which module an operator belongs to, in forward, in recompute and in backward, without touching the model.

Forward and recompute: torch's global module hooks say which module runs; ours are removed at the end. Backward: every
autograd node carries the sequence number that was current when its operator ran in forward
(``torch.autograd._get_sequence_nr``), and the running node is ``torch._C._current_autograd_node``; torch's own
tracers pair operators in the same way. Checked with torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_ACCUMULATE = 2**64 - 1
"""Sequence number of the nodes that collect gradients of leaves."""

T = TypeVar("T")


class Modules:
    """Follows which module runs; ``names`` maps modules to what they are called."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self._names = {id(module): name for module, name in names.items()}
        self._running: list[tuple[int, str]] = []
        self.on_enter: Callable[[nn.Module, Any], None] | None = None
        """Called with a named module and its positional arguments."""
        self.on_leave: Callable[[nn.Module, Any], None] | None = None
        """Called with a named module and what its forward returned."""

    @property
    def current(self) -> str | None:
        """Name of the innermost module that runs; None outside of all."""
        return self._running[-1][1] if self._running else None

    @contextmanager
    def following(self) -> Generator[None]:
        """Follow the modules that run until the context ends."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._running.append((id(module), name))
            if self.on_enter is not None:
                self.on_enter(module, args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._names:
            return
        # A recompute that ends early leaves its inner modules behind.
        while self._running and self._running.pop()[0] != id(module):
            pass
        if self.on_leave is not None:
            self.on_leave(module, output)


def sequence_number() -> int:
    """Return the number of the autograd node that the running forward operator belongs to."""
    return torch.autograd._get_sequence_nr() - 1


def running_node() -> int | None:
    """Return the sequence number of the node that runs; None outside backward or for leaves."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return None if number >= _ACCUMULATE else number


def in_backward() -> bool:
    """Whether autograd's engine runs."""
    return torch._C._current_graph_task_id() != -1
