"""Ask a run to stop: signals set a flag, and all ranks agree on the step at which they do.

SIGTERM, SIGUSR1 (Slurm's warning) and SIGINT (Ctrl-C) mean "save and stop"; a second Ctrl-C interrupts at once. A
scheduler may signal one rank only, so the flag is the largest over all ranks, exchanged once a step on the CPU.
Handlers are put back at the end. A signal that comes before the first step is kept until then.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType

import torch
import torch.distributed as dist

__all__ = ["StopRequest", "stop_on_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Whether somebody asked this run to stop."""

    def __init__(self) -> None:
        self.number = 0

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Take a signal."""
        if number == signal.SIGINT and self.number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    def agreed(self) -> str | None:
        """Return the signal's name if any rank was asked to stop. Collective: once a step, on every rank."""
        flag = torch.tensor([self.number], dtype=torch.int32)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        number = int(flag.item())
        return signal.Signals(number).name if number else None


@contextlib.contextmanager
def stop_on_signals() -> Generator[StopRequest]:
    """Turn these signals into a request; outside the main thread signals stay as they are."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
