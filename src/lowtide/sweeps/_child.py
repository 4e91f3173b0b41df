"""One cell as a child process: started in a session of its own, ended whatever it started.

Every process of it carries a mark in its environment that no other has, so the end reaches also those that put
themselves into other sessions, as torch's agent does with its ranks. When the sweep itself is killed the kernel kills
the child, and the launcher's own guards the rest (``system.processes``); what the kernel cannot do is done on resume,
by the same mark.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.sweeps._outcome import Ended
from lowtide.system.cgroup import oom_kills
from lowtide.system.guarded import guard
from lowtide.system.processes import kill_all, processes_with

__all__ = ["MARK", "SCRATCH", "Child", "ChildSettings", "end_marked"]

MARK = "LOWTIDE_SWEEP_CELL"
SCRATCH = "lowtide-cell-"
_OF_RANKS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "LOWTIDE_LAUNCH_DIR",
)  # fmt: skip
_LOOK_EVERY_S = 0.5
_LAST_WAIT_S = 10.0
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class ChildSettings:
    """How a child is run and ended."""

    timeout_s: float
    grace_s: float
    devices: str | None = None


class Child:
    """A running cell. Make it, ``poll`` until it returns something, and it is gone."""

    def __init__(self, command: Sequence[str], output: Path, settings: ChildSettings, mark: str, scratch: Path) -> None:
        """Start ``command``; what it prints goes to ``output`` with ``.out`` and ``.err`` behind its name."""
        self._settings = settings
        self._mark = mark
        self._scratch = scratch
        self._out, self._err = output.with_name(output.name + ".out"), output.with_name(output.name + ".err")
        self._kills_before = oom_kills()
        self._asked_at: float | None = None
        self._timed_out = False
        self._looked_at = 0.0
        self.pids: set[int] = set()
        self.started = time.monotonic()
        scratch.mkdir(mode=0o700)
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                guard(list(command)),
                env=self._environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._look()

    @staticmethod
    def new_mark() -> tuple[str, Path]:
        """Return a mark and a scratch folder that no other child has; write them down before there is either."""
        mark = secrets.token_hex(16)
        return mark, Path(tempfile.gettempdir(), f"{SCRATCH}{mark[:16]}")

    def poll(self) -> Ended | None:
        """Return how the child ended, once it and everything that it started are gone."""
        code = self._process.poll()
        now = time.monotonic()
        if code is not None:
            return self._end(code)
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._look()
        if not self._timed_out and now - self.started >= self._settings.timeout_s:
            self._timed_out = True
            self.ask()
        if self._asked_at is not None and now - self._asked_at >= self._settings.grace_s:
            return self._end(None)
        return None

    def ask(self) -> None:
        """Ask the child to end; it is killed once the grace is over."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._look()
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End it and everything that it started, now."""
        self._end(None)

    def _end(self, code: int | None) -> Ended:
        self._look()
        # Once it was waited for, its id, and so its group's, may be somebody else's.
        left = end_marked(self._mark, group=self._process.pid if self._process.returncode is None else None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WAIT_S)
        shutil.rmtree(self._scratch, ignore_errors=True)
        stderr = _tail(self._err)
        if left:
            stderr += f"\nprocesses that could not be ended: {left}"
        before, after = self._kills_before, oom_kills()
        return Ended(
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            timed_out=self._timed_out,
            oom_kills=max(0, after - before) if before is not None and after is not None else 0,
            stdout=_tail(self._out),
            stderr=stderr,
            timeout_s=self._settings.timeout_s,
        )

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        self.pids |= {self._process.pid, *processes_with(MARK, self._mark)}

    def _environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        env = {k: v for k, v in inherited.items() if k not in _OF_RANKS}
        env |= {MARK: self._mark, "TMPDIR": str(self._scratch)}
        if self._settings.devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = self._settings.devices
        return env


def end_marked(mark: str, *, group: int | None = None) -> list[int]:
    """Kill every process that carries the mark, again and again until none is left; return those that stay."""
    until = time.monotonic() + _LAST_WAIT_S
    while True:
        if group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            group = None
        left = processes_with(MARK, mark)
        if not left or time.monotonic() >= until:
            return left
        kill_all(left, signal.SIGKILL)
        time.sleep(0.02)


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            return opened.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
