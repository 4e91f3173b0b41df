"""A launch in a process of its own, for tests that signal and kill: ``launched("program")`` starts one.

Import the fixture ``launched`` into the test module. Whatever is left of a launch is killed after the test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowtide.system.processes import identify, is_alive

__all__ = ["PATIENCE_S", "ROOT", "Launched", "all_gone", "launched", "wait_for"]

PATIENCE_S = 120  # a bound against hanging, not a measurement
ROOT = Path(__file__).parents[2]


def wait_for(what: Callable[[], bool], description: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until, f"waited in vain for {description}"
        time.sleep(0.02)


class Launched:
    """A launch in a process of its own, and the identities of all processes that it noted."""

    def __init__(self, program: str, folder: Path, nproc: int = 2, **environ: str) -> None:
        self.folder = folder
        (folder / "pids").mkdir()
        inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.rank_programs", program, str(folder), str(nproc)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**inherited, **environ},
            start_new_session=True,
        )

    def pids(self) -> dict[int, str]:
        return {int(f.name): f.read_text() for f in (self.folder / "pids").iterdir() if f.name.isdigit()}

    def names(self) -> list[str]:
        return sorted(self.pids().values())

    def identities(self, *names: str) -> list[dict]:
        """Wait until all these processes are there, and say who they are."""
        wait_for(lambda: self.names() == sorted(names), f"{names}, got {self.names()}")
        return [identify(pid) for pid in self.pids()]

    def ready(self) -> None:
        wait_for(lambda: len(list(self.folder.glob("ready*"))) == 2, "both ranks")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(program: str, **environ: str) -> Launched:
        started.append(Launched(program, tmp_path, **environ))
        return started[-1]

    yield start
    for each in started:
        for pid in [each.process.pid, *each.pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.communicate()


def all_gone(told: list[dict]) -> None:
    wait_for(lambda: not any(is_alive(each) for each in told), "the end of every process")
