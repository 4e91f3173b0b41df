"""Programs for ranks, and a launcher of them: ``python -m tests.helpers.rank_programs PROGRAM FOLDER [NPROC]``.

Without RANK in the environment it launches itself, as ``lowtide train`` does; with it, it is the rank. The ranks
import no torch unless a program needs it. Every process of a launch writes its process id into FOLDER/pids.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lowtide.errors import ConfigError, StoppedError
from lowtide.training.launch import launch, under_torchrun
from lowtide.training.rank_status import run_rank
from lowtide.training.run_folder import RunFolder

RANK = int(os.environ.get("RANK", "0"))
FOREVER_S = 600


def note(folder: Path, pid: int, name: str) -> None:
    beside = folder / "pids" / f".{pid}-{os.getpid()}"  # both ranks note the agent
    beside.write_text(name)
    beside.rename(folder / "pids" / str(pid))


def make_run(folder: Path) -> RunFolder | None:
    if RANK != 0:
        return None
    return RunFolder.create(folder / "runs", experiment_id="id-1", name="n", given="", resolved={})


def done(folder: Path) -> None:
    run = make_run(folder)
    (folder / f"tty{RANK}").write_text(f"{sys.stdout.isatty()} {sys.stderr.isatty()} {sys.stdin.isatty()}")
    if run is not None:
        print("progress of rank 0", flush=True)
        run.finish()


def sleep(folder: Path) -> None:
    make_run(folder)
    # A process of the rank's own, in a session of its own, as a data loader could have.
    helper = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"], start_new_session=True)
    note(folder, helper.pid, "helper")
    time.sleep(FOREVER_S)


def sleep_alone(folder: Path) -> None:
    time.sleep(FOREVER_S)


def stubborn(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    (folder / f"ready{RANK}").write_text("")
    time.sleep(FOREVER_S)


def save_when_told(folder: Path) -> None:
    run = make_run(folder)
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: told.append(n))
    (folder / f"ready{RANK}").write_text("")
    while not told:
        time.sleep(0.02)
    time.sleep(0.3 if RANK == 0 else 0.9)  # the slower one must not be ended while it saves
    (folder / f"saved{RANK}").write_text(" ".join(signal.Signals(n).name for n in told))
    error = StoppedError(f"{signal.Signals(told[0]).name} came; saved at step 7")
    if run is not None:
        run.finish(error)
    raise error


def wrong_config(folder: Path) -> None:
    raise ConfigError("data.batch_size is -1, it must be at least 1")


def killed_1(folder: Path) -> None:
    make_run(folder)
    if RANK == 1:
        while not (folder / "runs" / "id-1" / "config.yaml").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def out_of_memory_1(folder: Path) -> None:
    run = make_run(folder)
    if RANK == 1:
        while not (folder / "runs" / "id-1" / "run.json").exists():
            time.sleep(0.02)
        bytearray(2**60)
    error = RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    time.sleep(1)
    if run is not None:
        run.finish(error)
    raise error


def bug_1(folder: Path) -> None:
    if RANK == 1:
        raise ZeroDivisionError("a bug of its own")
    time.sleep(FOREVER_S)


def group(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from lowtide.training.mesh import process_group
    from lowtide.training.ranks import share_string

    with process_group(60, device="cpu") as world:
        total = torch.tensor(float(world.rank + 1))
        dist.all_reduce(total)
        text = share_string(f"sum {total.item()}, said by rank {world.rank}")
    if world.is_main:
        print(text, flush=True)


def killed_in_group(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from lowtide.training.mesh import process_group

    with process_group(60, device="cpu") as world:
        dist.all_reduce(torch.ones(1))
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def main(program: str, folder: Path, nproc: int) -> int:
    if under_torchrun():
        (folder / "pids").mkdir(exist_ok=True)
        note(folder, os.getpid(), f"rank{RANK}")
        note(folder, os.getppid(), "agent")
        act: Callable[[Path], None] = globals()[program]
        return run_rank(lambda: act(folder))
    arguments = [program, str(folder), str(nproc)]
    grace_s = float(os.environ.get("TEST_GRACE_S", "60"))
    result = launch(arguments, nproc=nproc, grace_s=grace_s, module="tests.helpers.rank_programs")
    result.report(sys.stderr)
    return result.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 2))
