"""What a rank tells its launcher: a file when it starts, and again when it ends.

    LOWTIDE_LAUNCH_DIR/  agent (the agent's process id)   rank0.json  rank1.json ...   run_folder   agent.json

Why files: torch's agent flattens exit codes, and a rank that is killed says nothing; what is missing here
tells as much as what is there. Without a launcher of ours (a plain process, a foreign torchrun) nothing is
written, and the rank says itself on stderr what went wrong. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from lowtide.errors import LowtideError, StoppedError, UserError, find_error
from lowtide.system.files import write_json, write_text
from lowtide.system.processes import die_with_parent
from lowtide.system.run_state import status_of
from lowtide.training.out_of_memory import explain_out_of_memory
from lowtide.training.ranks import raised_elsewhere

__all__ = [
    "AGENT_FILE",
    "FOLDER_FILE",
    "LAUNCH_DIR",
    "exit_code_of",
    "guard_rank",
    "note_run_folder",
    "run_rank",
    "under_launcher",
]

LAUNCH_DIR = "LOWTIDE_LAUNCH_DIR"
AGENT_FILE = "agent"
FOLDER_FILE = "run_folder"


def guard_rank() -> None:
    """Make sure that this rank dies with the launcher. Call it first thing, before anything slow is imported."""
    home = _home()
    if home is None:
        return
    try:
        agent = int((home / AGENT_FILE).read_text())
    except (OSError, ValueError):
        # The launcher writes it before the agent can start anything: it was killed in between.
        os._exit(1)
    die_with_parent(agent)


def under_launcher() -> bool:
    """Whether lowtide's own launcher started this process, and says how the run ended."""
    return _home() is not None


def note_run_folder(path: Path) -> None:
    """Tell the launcher where run.json is, so that it can write an end that this rank cannot."""
    home = _home()
    if home is not None:
        write_text(home / FOLDER_FILE, str(path.resolve()))


def run_rank(main: Callable[[], object], *, stream: TextIO | None = None) -> int:
    """Run one rank, report how it ended, and return the exit code for this process.

    Under our launcher the report goes into its folder and nothing is printed; a run that was stopped and
    saved returns 0 there, since any other code makes torch's agent kill the ranks that are still saving.
    Elsewhere an error that began on this rank is printed, one message for an error of ours, a traceback for
    others.
    """
    guard_rank()
    home = _home()
    rank = int(os.environ.get("RANK", "0"))
    if home is not None:
        write_json(home / f"rank{rank}.json", {"rank": rank, "pid": os.getpid(), "ended": False})
    error: BaseException | None = None
    try:
        main()
    except BaseException as raised:
        error = _as_ours(raised, rank)
    code = exit_code_of(error)
    if home is not None:
        write_json(home / f"rank{rank}.json", _report(error, rank, code))
        return 0 if isinstance(error, StoppedError) else code
    if error is not None:
        _print(error, rank, stream or sys.stderr)
    return code


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code that an error means for a process."""
    if error is None:
        return 0
    if isinstance(error, LowtideError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def _as_ours(raised: BaseException, rank: int) -> BaseException | None:
    """Find what to report: an error of ours that others wrapped, a failed allocation, or the error itself."""
    if isinstance(raised, SystemExit) and not raised.code:
        return None
    clear = explain_out_of_memory(raised, where=f"rank {rank}")
    found = clear or find_error(raised, UserError) or raised
    if clear is not None and clear is not raised:
        clear.__cause__ = raised
    return found


def _report(error: BaseException | None, rank: int, code: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "rank": rank,
        "pid": os.getpid(),
        "ended": True,
        "status": status_of(error),
        "exit_code": code,
        "at": getattr(error, "lowtide_raised_at", time.time()),
        "error": None,
    }
    if error is not None:
        report["error"] = {
            "type": type(error).__name__,
            "message": str(error) or repr(error),
            "ours": isinstance(error, LowtideError),
            "user": isinstance(error, UserError),
            "elsewhere": raised_elsewhere(error) is not None,
            "traceback": "".join(traceback.format_exception(error)),
        }
    return report


def _print(error: BaseException, rank: int, stream: TextIO) -> None:
    if raised_elsewhere(error) is not None:
        return
    if isinstance(error, LowtideError):
        text = f"error: {error}\n"
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted\n"
    else:
        text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError, ValueError):
        stream.write(text if int(os.environ.get("WORLD_SIZE", "1")) == 1 else f"rank {rank}: {text}")
        stream.flush()


def _home() -> Path | None:
    told = os.environ.get(LAUNCH_DIR)
    return Path(told) if told else None
