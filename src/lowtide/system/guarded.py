"""Become another program, as a process that dies with the one that started it.

Run as ``python -m lowtide.system.guarded PARENT_PID PROGRAM ARGUMENTS...``. The kernel keeps the death signal over
``exec``, so the program needs to know nothing of it. Where there is no death signal, the program is a child of this
process instead, which watches.
"""

from __future__ import annotations

import os
import subprocess
import sys

from lowtide.system.processes import die_with_parent

__all__ = ["guard", "main"]


def guard(command: list[str]) -> list[str]:
    """Return the command line that runs ``command`` as a process that dies with this one."""
    return [sys.executable, "-m", "lowtide.system.guarded", str(os.getpid()), *command]


def main(argv: list[str]) -> int:
    """Run the program; returns only where there is no death signal."""
    die_with_parent(int(argv[0]))
    if sys.platform == "linux":
        os.execvp(argv[1], argv[1:])
    return subprocess.call(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
