"""How many GPUs torch would see, without importing it (which costs seconds that a launcher does not have).

Asks the driver itself through ctypes: ``cuDeviceGetCount`` and ``hipGetDeviceCount`` honour
CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES. Which driver, or none, is read from the text of torch's
version.py: a CPU-only build uses no GPU. Asked in a child process, since a driver that was initialised here
could not be used after a fork.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["count_gpus"]

_ASK = """
import ctypes, sys
library, start, count = sys.argv[1:]
n = ctypes.c_int(0)
try:
    driver = ctypes.CDLL(library)
    if getattr(driver, start)(0) == 0 and getattr(driver, count)(ctypes.byref(n)) == 0:
        print(n.value)
except (OSError, AttributeError):
    pass
"""
_DRIVERS = {
    "cuda": ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),
    "hip": ("libamdhip64.so", "hipInit", "hipGetDeviceCount"),
}


def count_gpus(*, timeout_s: float = 60.0) -> int:
    """Return the number of GPUs that torch would see; 0 where it has none, or was built without them."""
    platform = _built_for()
    if platform is None:
        return 0
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-E", "-c", _ASK, *_DRIVERS[platform]],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    answer = done.stdout.strip()
    return int(answer) if answer.isdigit() else 0


def _built_for() -> str | None:
    """Return "cuda", "hip" or None, from torch's version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = Path(spec.submodule_search_locations[0], "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for platform in _DRIVERS:
        if re.search(rf"^{platform}(?::[^=\n]*)? = ['\"]", text, re.MULTILINE):
            return platform
    return None
