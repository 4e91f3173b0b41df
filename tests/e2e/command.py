"""Runs ``lowtide`` as a command and finds every process that it started: a mark in the environment tells them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.system.processes import kill_all, processes_with
from lowtide.system.run_state import RunState, read_run
from tests.helpers.launched import wait_for

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PATIENCE_S = 150  # a bound against hanging, not a measurement
_MARK = "LOWTIDE_E2E_MARK"
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOWTIDE_LAUNCH_DIR")

TINY = """\
run: {name: tiny}
model: {kind: decoder, dim: 32, layers: 2, heads: 2}
data: {kind: embedded_text, sequence_length: 16, batch_size: 2}
policy: {kind: selective_op, save: [sdpa, {op: aten.mm, keep: 1/2}]}
optimizer: {kind: adamw, lr: 1.0e-2}
training: {steps: 40}
estimate: false
logging: {every: 1, trackers: [{kind: console, every_s: 0}, {kind: jsonl}]}
"""


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_the_tests() -> None:
    """Have the kernel end the command when pytest is killed and runs no ``finally``."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str
    folder: Path
    """Where it ran."""

    @property
    def runs(self) -> list[Path]:
        return sorted(path for path in (self.folder / "runs").glob("*") if path.is_dir())

    @property
    def run(self) -> Path:
        (only,) = self.runs
        return only

    @property
    def state(self) -> RunState:
        return read_run(self.run)

    def document(self) -> dict[str, Any]:
        return json.loads(self.out)


@dataclass
class Command:
    """A command that runs in a folder of its own."""

    folder: Path
    arguments: tuple[str, ...]
    module: tuple[str, ...] = ("lowtide",)
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        inherited = {k: v for k, v in os.environ.items() if k not in _OF_RANKS}
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        env = {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **self.environ, _MARK: self.mark}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.module, *self.arguments],
            cwd=self.folder,
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_the_tests,
        )

    def end(self) -> Ended:
        """Wait for the end; no process of the command may outlive it."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        left = processes_with(_MARK, self.mark)
        assert left == [], f"left behind: {left}\n{err}"
        return Ended(self.process.returncode, out, err, self.folder)

    def kill(self) -> None:
        kill_all([*processes_with(_MARK, self.mark), self.process.pid], signal.SIGKILL)
        self.process.communicate()

    def rank_pid(self, rank: int) -> int:
        """Find the process of a rank by its environment."""
        ours = set(processes_with(_MARK, self.mark))
        (pid,) = ours & set(processes_with("RANK", str(rank)))
        return pid

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics hold a step."""
        wait_for(lambda: self._ended() or last_step(self.folder) >= step, f"step {step}")
        assert not self._ended(), self.process.communicate()

    def _ended(self) -> bool:
        return self.process.poll() is not None


@contextmanager
def started(folder: Path, *arguments: str, **options: Any) -> Iterator[Command]:
    command = Command(folder, arguments, **options)
    try:
        yield command
    finally:
        command.kill()


def lowtide(folder: Path, *arguments: str, **options: Any) -> Ended:
    """Run one command to its end."""
    with started(folder, *arguments, **options) as command:
        return command.end()


def write(folder: Path, text: str = TINY, name: str = "train.yaml") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return name


def records(run: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """Read whole lines; one that is being written is left out."""
    try:
        lines = (run / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line, parse_constant=_refuse) for line in lines if line.endswith("\n")]


def last_step(folder: Path) -> int:
    found = [record["step"] for run in (folder / "runs").glob("*") for record in records(run)]
    return max(found, default=0)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")
