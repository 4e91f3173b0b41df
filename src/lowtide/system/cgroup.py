"""How often the kernel's out-of-memory killer struck in this process's control group.

A process that the killer ends dies of SIGKILL and says nothing, and so does one that anybody else kills. The
count tells them apart: version 2 keeps it in ``memory.events``, version 1 in ``memory.oom_control``, both as a line
``oom_kill N``. The files of a group count kills in groups below it too (version 2), so where a container has a
limit of its own its group is the one to read. None where there is no such file, as outside Linux.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["oom_kills"]

_ROOT = Path("/sys/fs/cgroup")
_MINE = Path("/proc/self/cgroup")


def oom_kills(*, root: Path = _ROOT, mine: Path = _MINE) -> int | None:
    """Return the count of this process's control group, or of the nearest one above that has it."""
    try:
        lines = mine.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found = _nearest(root, path, "memory.events")
        elif "memory" in controllers.split(","):
            found = _nearest(root / "memory", path, "memory.oom_control")
        else:
            continue
        if found is not None:
            return found
    return None


def _nearest(root: Path, path: str, name: str) -> int | None:
    """Look in the group and upward: inside a container the path may be one that only the host has."""
    folder = Path(path.lstrip("/"))
    for below in [folder, *folder.parents]:
        count = _read(root / below / name)
        if count is not None:
            return count
    return None


def _read(file: Path) -> int | None:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts and counts[0].isdecimal() else None
