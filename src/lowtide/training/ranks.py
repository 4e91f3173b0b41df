"""What one rank decides and all ranks know.

    rank 0: act ──► JSON bytes ──broadcast (length, then bytes)──► every rank: the result, or rank 0's error

Why: ranks that each do "the same" by themselves (format the time, make a folder) differ sooner or later. Here
rank 0 acts alone, nobody goes on before it has, and when it fails every rank raises instead of waiting for
it. Everything works in a run of one process, with and without a process group. Torch is imported only where a
group can exist. Limit: results are JSON values (tuples come back as lists), the same object on every rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import lowtide.errors
from lowtide.errors import LowtideError, RankError
from lowtide.training.out_of_memory import mark

__all__ = ["barrier", "on_main", "raised_elsewhere", "rank", "share_string", "world_size"]

T = TypeVar("T")


def _group() -> Any:
    """Return ``torch.distributed`` where a group of several ranks exists, which implies an imported torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist


def rank() -> int:
    """Return this process's rank; 0 without a group."""
    dist = _group()
    return 0 if dist is None else int(dist.get_rank())


def world_size() -> int:
    """Return the number of ranks; 1 without a group."""
    dist = _group()
    return 1 if dist is None else int(dist.get_world_size())


def barrier() -> None:
    """Wait until every rank is here."""
    dist = _group()
    if dist is not None:
        import torch

        # An all_reduce of our own rather than dist.barrier(): under NCCL that one guesses a device.
        dist.all_reduce(torch.zeros(1, dtype=torch.int64, device=_device(dist)))


def share_string(value: str | None) -> str:
    """Return rank 0's ``value`` on every rank; the others may pass anything, their values are not looked at.

    Any string: empty, long, any Unicode, lone surrogates too.

    Raises:
        RankError: rank 0 has no string; on every rank.
    """

    def check() -> str:
        if not isinstance(value, str):
            raise RankError(f"rank 0 must give the string that all ranks share, it gave {value!r}")
        return value

    return on_main(check)


def on_main(act: Callable[[], T]) -> T:
    """Run ``act`` on rank 0 only and return its result, a JSON value, on every rank.

    What it raises is raised on rank 0 as it is; the others raise the same class of lowtide's errors with the
    same message, or a RankError that names what happened, and `raised_elsewhere` tells them apart.
    """
    dist = _group()
    if dist is None:
        return act()
    if dist.get_rank() != 0:
        packet = json.loads(_broadcast(dist, None))
        if "error" in packet:
            raise _as_here(packet["error"])
        return packet["result"]
    try:
        # ASCII only: lone surrogates, legal in a str, survive as escapes.
        payload = json.dumps({"result": act()})
    except BaseException as error:
        try:
            _broadcast(dist, json.dumps({"error": _described(error)}))
        except Exception as lost:
            error.add_note(f"and the other ranks could not be told: {lost}")
        raise
    return json.loads(_broadcast(dist, payload))["result"]


def raised_elsewhere(error: BaseException) -> int | None:
    """Return the rank on which this error began, or None where it began here."""
    return getattr(error, "lowtide_rank", None)


def _described(error: BaseException) -> dict[str, Any]:
    return {"type": type(error).__name__, "message": str(error), "ours": isinstance(error, LowtideError)}


def _as_here(told: dict[str, Any]) -> LowtideError:
    kind = getattr(lowtide.errors, told["type"], None) if told["ours"] else None
    if isinstance(kind, type) and issubclass(kind, LowtideError):
        error: LowtideError = kind(told["message"])
    else:
        error = RankError(f"rank 0 failed: {told['type']}: {told['message']}")
    mark(error, "lowtide_rank", 0)
    return error


def _device(dist: Any) -> Any:
    """Return a device that the default group can communicate on, the CPU where it can."""
    import torch

    backends = dict(part.split(":", 1) for part in str(dist.get_backend_config()).split(",") if ":" in part)
    if backends.get("cpu", "nccl") != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _broadcast(dist: Any, payload: str | None) -> str:
    import torch

    device = _device(dist)
    raw = b"" if payload is None else payload.encode("ascii")
    length = torch.tensor([len(raw)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0)
    body = torch.zeros(max(1, int(length.item())), dtype=torch.uint8, device=device)
    if raw:
        body[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    dist.broadcast(body, src=0)
    return bytes(body.cpu().numpy())[: int(length.item())].decode("ascii")
