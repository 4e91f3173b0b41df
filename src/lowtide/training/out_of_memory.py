"""Recognise a failed allocation whatever raised it, and say what one can do about it.

Why: "out of memory" arrives as ``torch.OutOfMemoryError`` (CUDA's caching allocator), as a plain
``RuntimeError`` (the CPU allocator: "DefaultCPUAllocator: can't allocate memory"; the CUDA driver: "CUDA
error: out of memory"; cuBLAS: "CUBLAS_STATUS_ALLOC_FAILED"), as ``MemoryError`` (NumPy, Python) or as
``OSError`` with ENOMEM, and libraries wrap it in errors of their own, so the whole chain of causes, contexts
and groups is looked at. Checked with torch 2.11, 2.13 and 2.14. An error that lowtide raised on purpose about
something else, and an interrupt, stay what they are. Torch is not imported here.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sys
from collections.abc import Generator, Iterator

from lowtide.errors import FailedError, LowtideError, RunOutOfMemoryError

__all__ = ["during", "explain_out_of_memory", "find_out_of_memory", "mark"]

_TEXTS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA error: out of memory|hipErrorOutOfMemory"
    r"|CUDA out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|NCCL.*Cuda failure.*out of memory",
    re.DOTALL,
)
_ASKED = re.compile(r"(?:tried to allocate|unable to allocate) ([\d.]+ ?(?:bytes|[KMGTPE]?i?B))(?!\w)", re.IGNORECASE)
_WHAT_TO_TRY = (
    "To use less: checkpoint more (policy: {kind: full} keeps least; with selective_op, save fewer "
    "operators), a smaller data.batch_size with more training.grad_accumulation, "
    "a shorter data.sequence_length, "
    "compute in bfloat16 (precision.compute), or more processes to shard over"
)


@contextlib.contextmanager
def during(phase: str) -> Generator[None]:
    """Name what is being done, for the message of an error that passes through: the innermost name counts."""
    try:
        yield
    except BaseException as error:
        mark(error, "lowtide_phase", phase)
        raise


def mark(error: BaseException, name: str, value: object) -> None:
    """Note something on an error, unless it is noted already or the error takes no attributes."""
    if not hasattr(error, name):
        with contextlib.suppress(AttributeError):
            setattr(error, name, value)


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the failed allocation among the error, its causes and contexts; None where there is none."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return None
    if isinstance(error, LowtideError) and not isinstance(error, FailedError):
        # Raised on purpose about something else, perhaps while an allocation's failure was being handled.
        return None
    return next((each for each in _chain(error) if _is_failed_allocation(each)), None)


def explain_out_of_memory(error: BaseException, *, where: str) -> RunOutOfMemoryError | None:
    """Make the clear error for a failed allocation; None for other errors. ``where``: the device and rank."""
    found = find_out_of_memory(error)
    if found is None:
        return None
    if isinstance(found, RunOutOfMemoryError):
        return found
    phases = [phase for each in _chain(error) if (phase := getattr(each, "lowtide_phase", None))]
    text = " ".join(str(found).split())
    asked = _ASKED.search(text)
    size = f"asked for {asked[1]}" if asked else "the size asked for is not known"
    said = text if len(text) <= 400 else f"{text[:400]}..."
    return RunOutOfMemoryError(
        f"out of memory on {where} during {phases[-1] if phases else 'the run'}: {size}. {_WHAT_TO_TRY}. "
        f"The allocator said: {type(found).__name__}: {said}"
    )


def _is_failed_allocation(error: BaseException) -> bool:
    if isinstance(error, RunOutOfMemoryError | MemoryError):
        return True
    torch = sys.modules.get("torch")
    kind = getattr(torch, "OutOfMemoryError", None)
    if isinstance(kind, type) and isinstance(error, kind):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Go through an error and everything behind it, each once, the outermost first."""
    seen: set[int] = set()
    waiting: list[BaseException] = [error]
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(current.exceptions)
        if current.__cause__ is not None:
            waiting.append(current.__cause__)
        elif current.__context__ is not None and not current.__suppress_context__:
            waiting.append(current.__context__)
