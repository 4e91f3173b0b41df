"""Files that are whole or absent, and files that one process writes.

``write_text`` writes beside, flushes to the disk, and renames: a reader sees the old text or the new one,
never half of it, also after a kill. ``lock`` is an advisory ``flock``; the kernel drops it with the process,
so no lock outlives a crash. File systems without ``flock`` (some network mounts) are written without one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from lowtide.errors import InputError

__all__ = ["lock", "read_json", "sync_folder", "write_json", "write_text"]

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step; the folder must exist."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace ``path`` by one strict JSON document."""
    write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON mapping.

    Raises:
        InputError: the file is missing, cannot be read, or holds anything else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds a {type(found).__name__}, expected a JSON mapping")
    return found


def lock(file: IO[Any], *, what: str) -> None:
    """Take the only writer's place for an open file, until it is closed.

    Raises:
        InputError: somebody else has it.
    """
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"{what} is being written by another process or another writer of this one; "
            f"wait until that run has ended, or use another run folder"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise


def sync_folder(folder: Path) -> None:
    """Have the names in a folder reach the disk: else a rename may be lost in a power cut. Not every system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
