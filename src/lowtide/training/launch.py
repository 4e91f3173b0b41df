"""Start the processes of a run on this machine, and end them, in any case, with one exit code and one
message.

    lowtide train ──► launch ──► agent (torch.distributed.run, own session) ──► rank 0, rank 1, ...
                        ▲                                                         │ files in
                        LOWTIDE_LAUNCH_DIR └──────────────────── judge ◄─────────────────────────────┘

Standard output and error are passed through as they are, so that rank 0 writes to the user's terminal.
torch's agent puts every rank in a session of its own, so neither Ctrl-C nor a kill of our child's group
reaches them: signals are passed on to the ranks by process id, once each; and the end is by the launch
folder, unique to us, which every process of the launch carries in its environment. When this process itself
is killed, the kernel kills the agent and with it the ranks (``processes.die_with_parent``). Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from lowtide.errors import ConfigError, InputError
from lowtide.system.files import read_json, write_text
from lowtide.system.processes import kill_all, processes_with
from lowtide.system.run_state import RUN_FILE, finish_run
from lowtide.training.agent import REPORT
from lowtide.training.gpus import count_gpus
from lowtide.training.rank_status import AGENT_FILE, FOLDER_FILE, LAUNCH_DIR
from lowtide.training.verdict import Verdict, judge

__all__ = ["LaunchResult", "choose_nproc", "launch", "under_torchrun"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_POLL_S = 0.1
_LAST_WAIT_S = 10.0


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended; ``exit_code`` as the design fixes it: 0, 1, 2, 3 or 75."""

    exit_code: int
    verdict: Verdict
    run_folder: Path | None

    def report(self, stream: TextIO) -> None:
        """Say what went wrong, once; nothing when the run is done."""
        if self.verdict.exit_code == 0:
            return
        log = "" if self.run_folder is None else self._log()
        title = "stopped" if self.verdict.status == "stopped" else "error"
        stream.write(f"{self.verdict.traceback}{title}: {self.verdict.message}{log}\n")
        stream.flush()

    def _log(self) -> str:
        assert self.run_folder is not None
        if self.exit_code == 2:
            return ""
        file = self.run_folder / "logs" / f"rank{self.verdict.rank or 0}.log"
        return f"\nlog: {file}" if file.exists() else f"\nrun: {self.run_folder}"


def under_torchrun(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started as one rank of several: it trains then, and launches nothing."""
    env = os.environ if environ is None else environ
    return "TORCHELASTIC_RUN_ID" in env or ("RANK" in env and "WORLD_SIZE" in env)


def choose_nproc(wanted: int | None) -> int:
    """Return how many processes to start: as many as wanted, else one per GPU, else 2.

    Raises:
        ConfigError: fewer than 1 wanted.
    """
    if wanted is not None and wanted < 1:
        raise ConfigError(f"the number of processes must be at least 1, it is {wanted}")
    return wanted if wanted is not None else count_gpus() or 2


def launch(
    arguments: Sequence[str],
    *,
    nproc: int | None = None,
    threads: int | None = None,
    grace_s: float = 120.0,
    time_limit_s: float | None = None,
    module: str = "lowtide",
) -> LaunchResult:
    """Run ``python -m <module> <arguments>`` on every rank and wait until every process is gone.

    Call it from the main thread. ``threads`` is OMP_NUM_THREADS for each rank (None: what is set, else an
    equal share of the cores). After a signal the ranks have ``grace_s`` to save; Ctrl-C twice ends them at
    once. What is not done within ``time_limit_s`` is ended.
    """
    count = choose_nproc(nproc)
    with tempfile.TemporaryDirectory(prefix="lowtide-launch-") as home, _signals() as caught:
        job = _Job(Path(home), count, grace_s, time_limit_s, caught)
        try:
            job.start([module, *arguments], _environment(home, count, threads))
            job.wait()
        finally:
            # Also when something here fails: nothing of the launch outlives it.
            job.sweep()
        verdict = job.judge()
        return LaunchResult(verdict.exit_code, verdict, _correct(Path(home), verdict))


class _Job:
    """One launch: its child, its folder, and what was told to whom."""

    def __init__(self, home: Path, nproc: int, grace_s: float, time_limit_s: float | None, caught: list[int]) -> None:
        self._home = home
        self._nproc = nproc
        self._grace_s = grace_s
        self._time_limit_s = time_limit_s
        self._caught = caught
        self._told: set[int] = set()
        self._gave_up = False
        self._out_of_time = False
        self._agent: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str], environ: dict[str, str]) -> None:
        run = ["--standalone", "--nproc-per-node", str(self._nproc), "--max-restarts", "0", "-m", *command]
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "lowtide.training.agent", str(os.getpid()), *run],
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        write_text(self._home / AGENT_FILE, str(self._agent.pid))

    def wait(self) -> None:
        assert self._agent is not None
        deadline: float | None = None
        limit = None if self._time_limit_s is None else time.monotonic() + self._time_limit_s
        while self._agent.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(_POLL_S)
            if limit is not None and time.monotonic() >= limit:
                self._out_of_time = True
                return
            if not self._caught:
                continue
            deadline = deadline or time.monotonic() + self._grace_s
            self._forward(self._caught[0])
            if time.monotonic() >= deadline or self._caught.count(signal.SIGINT) > 1:
                self._gave_up = True
                return

    def _forward(self, number: int) -> None:
        """Pass the first signal on, once to each rank; before any rank is there, end the agent."""
        assert self._agent is not None
        sent = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        reports = self._reports()
        if not reports and self._agent.pid not in self._told:
            self._told.add(self._agent.pid)
            self._agent.terminate()
        for report in reports.values():
            if report["pid"] not in self._told and not report["ended"]:
                self._told.add(report["pid"])
                kill_all([report["pid"]], sent)

    def sweep(self) -> None:
        """End whatever of this launch is left."""
        if self._agent is None:
            return
        until = time.monotonic() + _LAST_WAIT_S
        while time.monotonic() < until:
            if self._agent.poll() is None:
                self._agent.kill()
            left = processes_with(LAUNCH_DIR, str(self._home))
            kill_all([*left, *self._known_alive()], signal.SIGKILL)
            if not left and self._agent.poll() is not None:
                return
            time.sleep(0.02)

    def _known_alive(self) -> list[int]:
        """Ranks by their own word, where the system has no list of processes."""
        if Path("/proc/self/environ").exists():
            return []
        return [report["pid"] for report in self._reports().values() if not report["ended"]]

    def judge(self) -> Verdict:
        if self._out_of_time:
            return Verdict(1, "failed", f"not done within {self._time_limit_s:g} s, and ended", None, "OutOfTime")
        agent: dict[str, Any] = {}
        with contextlib.suppress(InputError):
            agent = read_json(self._home / REPORT)
        died = self._agent.returncode if self._agent is not None else None
        if died is not None and died < 0 and not self._gave_up:
            agent["died"] = -died
        name = signal.Signals(self._caught[0]).name if self._caught else None
        return judge(self._reports(), agent=agent, nproc=self._nproc, stopped_by=name, gave_up=self._gave_up)

    def _reports(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for file in self._home.glob("rank*.json"):
            with contextlib.suppress(InputError):
                report = read_json(file)
                found[report["rank"]] = report
        return found


@contextlib.contextmanager
def _signals() -> Generator[list[int]]:
    """Collect the signals that ask for an end instead of dying of them; put the handlers back afterwards."""
    caught: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(home: str, nproc: int, threads: int | None) -> dict[str, str]:
    environ = {**os.environ, LAUNCH_DIR: home}
    # Torch's profiler, which measures peak bytes, else prints marks of its own between the user's lines.
    environ.setdefault("KINETO_LOG_LEVEL", "6")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    else:
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    return environ


def _correct(home: Path, verdict: Verdict) -> Path | None:
    """Write the run's end where rank 0 could not, or did not know what another rank did; return the run folder."""
    try:
        folder = Path((home / FOLDER_FILE).read_text(encoding="utf-8"))
        written = read_json(folder / RUN_FILE).get("status")
    except (OSError, InputError):
        return None
    unknown_to_it = verdict.exit_code != 0 and verdict.rank not in (None, 0)
    if written == "running" or unknown_to_it:
        finish_run(folder, status=verdict.status, exit_code=verdict.exit_code, error=verdict.error)
    return folder
