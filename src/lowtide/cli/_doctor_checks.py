"""The checks of ``lowtide doctor``, each a record; nothing here raises, whatever is missing or broken.

    versions · optional parts · devices · compiler · process groups · runs folder ──► Check, Check, ...

Torch is asked in a child process, and the group of processes is started exactly as ``lowtide train`` starts one,
with a time limit after which all of it is ended.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lowtide import __version__
from lowtide.units import format_bytes

__all__ = ["Check", "Status", "run_checks"]

Status = Literal["ok", "missing", "broken"]
"""``missing``: an optional part; ``broken``: something that training needs."""

_OLDEST_TORCH = (2, 11)
_OPTIONAL = {
    "transformers": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
_CPP = "#include <Python.h>\n#include <omp.h>\nint probe() { return omp_get_max_threads(); }\n"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do about it; empty where nothing is to be done."""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """The same for programs."""


def run_checks(*, runs_dir: Path, timeout_s: float) -> Iterator[Check]:
    """Carry out every check, the quick ones first."""
    yield Check("lowtide", "ok", __version__)
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Check("system", "ok", platform.platform())
    torch = _ask_torch(timeout_s)
    yield _torch_check(torch)
    for package, extra in _OPTIONAL.items():
        yield _optional(package, extra)
    yield _cpu()
    yield _memory()
    yield _gpus(torch)
    yield _compiler()
    yield _folder(runs_dir)
    yield from _groups(torch, timeout_s)


def _ask_torch(timeout_s: float) -> dict[str, Any]:
    argv = [sys.executable, "-m", "lowtide.cli._doctor_probe", "torch"]
    done = _run(argv, timeout_s)
    if isinstance(done, str):
        return {"error": done}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"error": f"importing it ended the process with code {done.returncode}. {last}".strip()}


def _torch_check(torch: dict[str, Any]) -> Check:
    oldest = ".".join(map(str, _OLDEST_TORCH))
    install = f"pip install 'torch>={oldest}'"
    if "error" in torch:
        return Check("torch", "broken", torch["error"], install, torch)
    version = torch["version"]
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU only"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        return Check("torch", "broken", f"{version}, and lowtide needs {oldest} or newer", install, torch)
    return Check("torch", "ok", f"{version} ({build})", data=torch)


def _optional(package: str, extra: str) -> Check:
    try:
        return Check(package, "ok", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Check(package, "missing", "not installed", f"pip install 'lowtide[{extra}]'")


def _cpu() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _cgroup("cpu.max")
    cores = None
    if limit is not None and not limit.startswith("max"):
        with contextlib.suppress(ValueError, ZeroDivisionError):
            quota, period = limit.split()
            cores = int(quota) / int(period)
    said = "" if cores is None else f", limited to the time of {cores:g} by the cgroup"
    data = {"cores": os.cpu_count(), "usable_cores": usable, "cgroup_cores": cores}
    return Check("cpu", "ok", f"{usable} of {os.cpu_count()} cores usable, {platform.machine()}{said}", data=data)


def _memory() -> Check:
    found: dict[str, int | None] = {"total_bytes": None, "available_bytes": None, "cgroup_limit_bytes": None}
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        found["total_bytes"] = kib["MemTotal"] * 1024
        found["available_bytes"] = kib["MemAvailable"] * 1024
    limit = _cgroup("memory.max") or _cgroup_v1("memory", "memory.limit_in_bytes")
    if limit is not None and limit.isdigit() and int(limit) < (found["total_bytes"] or 2**60):
        found["cgroup_limit_bytes"] = int(limit)
    words = {"total_bytes": "in all", "available_bytes": "free to use", "cgroup_limit_bytes": "the cgroup's limit"}
    parts = [f"{format_bytes(found[name] or 0)} {word}" for name, word in words.items() if found[name] is not None]
    return Check("memory", "ok", ", ".join(parts) or "this system does not say", data=dict(found))


def _cgroup(name: str) -> str | None:
    """Return the tightest file of this name from our own group up to the root (cgroup v2)."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = root / own.lstrip("/")
    values: list[str] = []
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            values.append((place / name).read_text().strip())
        if place == root:
            break
    limits = [value for value in values if not value.startswith("max")]
    return min(limits, key=lambda v: int(v.split()[0]), default=None)


def _cgroup_v1(controller: str, name: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path("/sys/fs/cgroup", controller, name).read_text().strip()
    return None


def _gpus(torch: dict[str, Any]) -> Check:
    gpus = torch.get("gpus", [])
    driver = _driver()
    data = {"gpus": gpus, "driver": driver}
    if torch.get("gpu_problem"):
        advice = "the driver or this build of torch does not fit the GPU; CUDA_VISIBLE_DEVICES= trains on the CPU"
        return Check("gpus", "broken", str(torch["gpu_problem"]), advice, data)
    if gpus:
        names = [f"{gpu['name']} {format_bytes(gpu['total_bytes'])}" for gpu in gpus]
        said = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Check("gpus", "ok", said + (f", driver {driver}" if driver else ""), data=data)
    if driver and "error" not in torch:
        advice = "install a build of torch for CUDA, or look at CUDA_VISIBLE_DEVICES"
        return Check("gpus", "missing", f"driver {driver} is there, and torch sees no GPU", advice, data)
    return Check("gpus", "missing", "none; training runs on the CPU", data=data)


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    done = _run([tool, "--query-gpu=driver_version", "--format=csv,noheader"], 20) if tool else ""
    if isinstance(done, str) or done.returncode != 0:
        return None
    return next(iter(done.stdout.split()), None)


def _compiler() -> Check:
    """Build what torch.compile builds on a CPU: a shared object with Python's headers and OpenMP."""
    advice = "only `compile: true` needs it: install g++ and Python's headers (python3-dev), or set CXX"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        return Check("c++ compiler", "missing", "none found", advice)
    with tempfile.TemporaryDirectory(prefix="lowtide-doctor-") as home:
        source = Path(home, "probe.cpp")
        source.write_text(_CPP)
        headers = sysconfig.get_paths()["include"]
        flags = ["-fopenmp", "-shared", "-fPIC", f"-I{headers}", str(source), "-o", f"{home}/probe.so"]
        done = _run([*compiler.split(), *flags], 60)
    if isinstance(done, str):
        return Check("c++ compiler", "missing", f"{compiler}: {done}", advice)
    if done.returncode != 0:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        return Check("c++ compiler", "missing", f"{compiler} does not build: {said}", advice)
    return Check("c++ compiler", "ok", compiler)


def _folder(runs_dir: Path) -> Check:
    """Write and remove a file where runs would go; a folder that is not there is not made."""
    place = runs_dir.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".lowtide-doctor-") as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(place).free
    except OSError as error:
        advice = "set run.directory to a folder that this user may write"
        return Check("runs folder", "broken", f"{runs_dir} cannot be written: {error.strerror or error}", advice)
    said = "" if place == runs_dir.absolute() else ", not there yet"
    return Check("runs folder", "ok", f"{runs_dir}{said}, {format_bytes(free)} free", data={"free_bytes": free})


def _groups(torch: dict[str, Any], timeout_s: float) -> Iterator[Check]:
    if "error" in torch:
        yield Check("two processes, gloo", "broken", "not tried without torch")
        return
    yield _group("gloo", "cpu", timeout_s)
    gpus = len(torch.get("gpus", []))
    if gpus >= 2 and torch.get("nccl"):
        yield _group("nccl", "cuda", timeout_s)
    elif gpus:
        why = "this torch has no NCCL" if not torch.get("nccl") else "needs 2 GPUs, there is 1"
        yield Check("two processes, nccl", "missing", f"not tried: {why}")


def _group(backend: str, device: str, timeout_s: float) -> Check:
    from lowtide.training.launch import launch

    name = f"two processes, {backend}"
    arguments = ["group", device]
    result = launch(arguments, nproc=2, threads=1, time_limit_s=timeout_s, module="lowtide.cli._doctor_probe")
    if result.exit_code == 0:
        return Check(name, "ok", "started, added up a number, ended")
    advice = "look at firewalls and host names; GLOO_SOCKET_IFNAME=lo (NCCL_SOCKET_IFNAME=lo) stays on this machine"
    return Check(name, "broken", result.verdict.message, advice, {"traceback": result.verdict.traceback})


def _run(argv: list[str], timeout_s: float) -> subprocess.CompletedProcess[str] | str:
    """Run a command to its end; where that fails, say why."""
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return str(error.strerror or error)
