"""Two "nodes", each with an agent of torchrun and one rank: one run, one folder, one truth.

On the loopback, and in two network namespaces with a cable between them where the system permits that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.system.run_report import describe_run
from tests.e2e.command import ROOT, Command, write

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
STEPS = ("--set", "training.steps=4")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _check(folder: Path) -> None:
    (run,) = (folder / "runs").iterdir()
    record = describe_run(run)
    assert (record.status, record.world_size) == ("ok", 2)
    assert record.result is not None
    assert len(record.result.peaks) == 2
    assert sorted(path.name for path in (run / "logs").glob("*.log")) == ["rank0.log", "rank1.log"]


def test_two_agents_on_the_loopback_are_one_run(tmp_path: Path) -> None:
    config, port = write(tmp_path), _free_port()
    nodes: list[Command] = []
    with contextlib.ExitStack() as exits:
        for number in range(2):
            module = (
                "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1",
                "--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "lowtide",
            )  # fmt: skip
            nodes.append(Command(tmp_path, ("train", config, *STEPS), module=module))
            exits.callback(nodes[-1].kill)
        ended = [node.end() for node in nodes]
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    _check(tmp_path)


@pytest.fixture
def namespaces() -> Iterator[list[tuple[str, str, str]]]:
    """Two namespaces, each with its address and the name of its end of the cable."""
    ip = shutil.which("ip")
    if ip is None:
        pytest.skip("needs `ip` (iproute2) to make network namespaces")
    names = [f"lowtide-{os.getpid()}-{n}" for n in range(2)]
    ends = [f"lt{os.getpid() % 100000}{n}" for n in "ab"]
    made = [(name, f"10.213.7.{n + 1}", end) for n, (name, end) in enumerate(zip(names, ends, strict=True))]
    try:
        for name in names:
            _ip(ip, "netns", "add", name)
        _ip(ip, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, address, end in made:
            _ip(ip, "link", "set", end, "netns", name)
            _ip(ip, "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip(ip, "-n", name, "link", "set", end, "up")
            _ip(ip, "-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in names:
            subprocess.run([ip, "netns", "del", name], check=False, capture_output=True)


def _ip(*argv: str) -> None:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"network namespaces are not permitted here: {' '.join(argv[1:])}: {done.stderr.strip()}")


def test_two_namespaces_are_one_run(tmp_path: Path, namespaces: list[tuple[str, str, str]]) -> None:
    config = write(tmp_path)
    first = namespaces[0][1]
    nodes: list[subprocess.Popen[str]] = []
    try:
        for number, (name, address, end) in enumerate(namespaces):
            env = {**os.environ, "GLOO_SOCKET_IFNAME": end, "TP_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"}
            env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
            argv = [
                "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two",
                "--rdzv-endpoint", f"{first}:29511", "--rdzv-conf",
                f"is_host={int(number == 0)}", "--local-addr", address,
                "-m", "lowtide", "train", config, *STEPS,
            ]  # fmt: skip
            nodes.append(
                subprocess.Popen(
                    argv, cwd=tmp_path, env=env, text=True, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                )
            )  # fmt: skip
        said = [node.communicate(timeout=400)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    _check(tmp_path)
