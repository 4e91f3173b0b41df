"""What the kernel knows about processes: who lives, who belongs to a launch, who dies with whom.

Why: a process id alone says little, since ids are used again; the id with its start time names one process
for good. Read from /proc on Linux. Elsewhere there is no start time, no list and no death signal:
``is_alive`` asks for the id only, and ``die_with_parent`` watches from a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

__all__ = [
    "die_with_parent",
    "identify",
    "is_alive",
    "kill_all",
    "processes_with",
    "same_machine",
]

_PR_SET_PDEATHSIG = 1


def identify(pid: int | None = None) -> dict[str, Any]:
    """Return what names a process for good, as JSON: id, start time in clock ticks, machine, boot, namespace."""
    pid = os.getpid() if pid is None else pid
    return {"pid": pid, "start_ticks": _start_ticks(pid), **_machine()}


def same_machine(told: dict[str, Any]) -> bool:
    """Whether an identity was made where process ids mean what they mean here."""
    here = _machine()
    return told.get("hostname") == here["hostname"] and told.get("pid_namespace") == here["pid_namespace"]


def is_alive(told: dict[str, Any]) -> bool | None:
    """Whether the process of an identity still runs; None where that cannot be known from here."""
    if not same_machine(told):
        return None
    pid = told.get("pid")
    if not isinstance(pid, int) or told.get("boot_id") != _machine()["boot_id"]:
        return False
    fields = _stat(pid)
    if fields is not None:
        return fields[0] not in ("Z", "X") and int(fields[19]) == told.get("start_ticks")
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def processes_with(variable: str, value: str) -> list[int]:
    """List this user's processes that were started with ``variable=value``; empty where there is no /proc."""
    wanted = f"{variable}={value}".encode()
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        fields = _stat(int(entry.name))
        if wanted in environment.split(b"\0") and fields is not None and fields[0] not in ("Z", "X"):
            found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def kill_all(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent does; end at once if ``parent`` is no longer the
    parent.

    The kernel counts the death of the thread that started us, so that thread should be the parent's main one.
    """
    try:
        done = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):
        done = False
    if os.getppid() != parent:
        os._exit(1)
    if not done:
        threading.Thread(target=_watch, args=(parent,), name="lowtide-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third on: state, parent, ..., start time at index 19."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    # The second field is a name in parentheses that may itself hold anything.
    return text.rpartition(")")[2].split()


def _start_ticks(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if fields is not None else None


def _machine() -> dict[str, Any]:
    boot: str | None = None
    namespace: str | None = None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return {"hostname": os.uname().nodename, "boot_id": boot, "pid_namespace": namespace}
