"""Stands for ``lowtide train`` in tests of sweeps: no torch, and what a cell's config says under ``do`` happens to it.

Each cell starts a "rank" in a session of its own, which listens on a port and notes who it is in ``<pids>/``.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

from lowtide.system.files import write_json
from lowtide.system.processes import identify

RANK = """
import json, os, signal, socket, sys, time
sys.path[:0] = json.loads(sys.argv[2])
from lowtide.system.processes import identify
signal.signal(signal.SIGTERM, signal.SIG_IGN)
port = socket.create_server(("127.0.0.1", 0))
note = {**identify(), "port": port.getsockname()[1]}
open(os.path.join(sys.argv[1], f".{os.getpid()}"), "w").write(json.dumps(note))
os.replace(os.path.join(sys.argv[1], f".{os.getpid()}"), os.path.join(sys.argv[1], f"{os.getpid()}.json"))
time.sleep(float(sys.argv[3]))
"""


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[2]).read_text())
    told = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=False))
    directory = Path(json.loads(told["--set"].partition("=")[2]))
    pids = Path(config["pids"])
    write_json(pids / f"{os.getpid()}.json", identify())
    folder = directory / told["--experiment-id"]
    do = config["do"]
    if do == "refuse":
        print(json.dumps({"error": {"kind": "ConfigError", "message": "data.batch_size is wrong"}, "exit_code": 2}))
        sys.exit(2)
    folder.mkdir()
    run = {"experiment_id": folder.name, "name": "cell", "started_at": "2026-01-01T00:00:00Z", "process": identify()}
    write_json(folder / "run.json", {**run, "status": "running"})
    start_rank(pids, stay=do not in ("ok", "flaky"))
    act(do, config, folder, run)


def start_rank(pids: Path, *, stay: bool) -> None:
    """Start one; one that stays outlives this process unless somebody ends it."""
    argv = [sys.executable, "-S", "-c", RANK, str(pids), json.dumps(sys.path), "600" if stay else "0"]
    pid = subprocess.Popen(argv, start_new_session=True).pid
    while not (pids / f"{pid}.json").exists():
        time.sleep(0.005)


def act(do: str, config: dict, folder: Path, run: dict) -> None:
    def end(status: str, code: int, *, kind: str = "", message: str = "", summary: dict | None = None) -> None:
        error = {"type": kind, "message": message, "rank": 1} if kind else None
        ended = {"status": status, "exit_code": code, "error": error, "summary": summary, "world_size": 2}
        write_json(folder / "run.json", {**run, **ended})
        sys.exit(code)

    if do == "raise":
        end("failed", 1, kind="ZeroDivisionError", message="a bug in the data")
    elif do == "out_of_memory":
        end("out_of_memory", 1, kind="RunOutOfMemoryError", message="out of memory on rank 1 during step 3")
    elif do == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    elif do == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "nothing":
        sys.exit(0)
    elif do == "no_numbers":
        end("done", 0)
    elif do == "cannot_write":
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        end("done", 0, summary={"steps": 4, "applied": "x" * 10_000})
    elif do == "flaky" and len(list(folder.parent.glob("attempt-*.out"))) == 1:
        end("failed", 1, kind="RankLost", message="rank 1 ended without a word")
    elif do == "sees_devices":
        (folder / "devices").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    elif do == "takes_a_port":
        with socket.create_server(("127.0.0.1", config["port"])):
            end("done", 0, summary={"steps": 4})
    peaks = [{"rank": 0, "peak_bytes": config["size"] * 1000, "method": "allocator events", "note": ""}]
    end("done", 0, summary={"steps": 4, "tokens_per_s": 5.0, "applied": "none", "peaks": peaks, "wall_s": 0.1})


if __name__ == "__main__":
    main()
