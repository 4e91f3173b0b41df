"""Where a run ran: versions, commit, devices, for ``environment.json``.

Environment variables are written by an allow-list of names that hold settings; a variable that is not listed
may hold a secret and stays out. The remote's address is left out too, since it may hold a token.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["ALLOWED_VARIABLES", "describe_environment"]

_PACKAGES = (
    "lowtide",
    "torch",
    "numpy",
    "pydantic",
    "transformers",
    "tokenizers",
    "safetensors",
    "tensorboard",
    "wandb",
    "triton",
)
ALLOWED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "GROUP_RANK",
    "HIP_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_RESTART_COUNT",
    "TORCH_LOGS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "WORLD_SIZE",
)


def describe_environment(*, world_size: int, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the environment of this process as JSON."""
    env = os.environ if environ is None else environ
    return {
        "schema_version": 1,
        "hostname": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": _versions(),
        "torch": _torch(),
        "git": _git(),
        "world_size": world_size,
        "cpu_count": os.cpu_count(),
        "variables": {name: env[name] for name in ALLOWED_VARIABLES if name in env},
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _torch() -> dict[str, Any] | None:
    """Describe torch and its devices, where this process has it: it is not imported for this."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    devices: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            seen = torch.cuda.get_device_properties(index)
            devices.append({"name": seen.name, "total_bytes": int(seen.total_memory)})
    return {
        "version": str(torch.__version__),
        "git": str(torch.version.git_version),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "devices": devices or [{"name": f"cpu {platform.machine()}"}],
    }


def _git() -> dict[str, Any] | None:
    """Return the commit of the working directory and whether files differ from it; None outside a repository."""
    commit = _ask_git("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _ask_git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _ask_git(*arguments: str) -> str | None:
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            stdin=subprocess.DEVNULL,
            env=quiet,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
