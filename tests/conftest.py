"""Fixtures and marks for all tests; torch is imported only where a collected test needs it.

``run_on(n, fn, *args)`` runs a module-level function on n ranks (tests/helpers/gang.py). ``full`` tests
are left out without ``--run-full``; ``gpus(n)`` and ``compiler`` skip, with the reason, where it is missing.
"""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Before torch is imported: tiny models are fastest on one thread, and ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

_GANG = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-full", action="store_true", help="also run the long matrices (tests marked `full`)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the pool's nursery while this process has not run a tensor operation."""
    needed = any("run_on" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        # Forked workers find imported what is imported here.
        importlib.import_module("torch.distributed.fsdp")
        from tests.helpers.gang import Gang

        session.config.stash[_GANG] = Gang()


def pytest_unconfigure(config: pytest.Config) -> None:
    gang = config.stash.get(_GANG, None)
    if gang is not None:
        gang.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("gpus")
    if mark is not None:
        import torch

        wanted, present = int(mark.args[0]), torch.cuda.device_count()
        if present < wanted:
            pytest.skip(f"needs {wanted} GPUs, this machine has {present}")
    if item.get_closest_marker("compiler") is not None:
        reason = _no_compiler()
        if reason:
            pytest.skip(f"needs a working C++ compiler for torch.compile: {reason}")


@cache
def _no_compiler() -> str:
    """Say why the default backend of torch.compile cannot work here; empty where it can."""
    compiler = os.environ.get("CXX", "g++")
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <Python.h>\n#include <omp.h>\nint probe() { return omp_get_max_threads(); }\n")
        argv = [
            compiler,
            "-fopenmp",
            "-shared",
            "-fPIC",
            f"-I{include}",
            str(source),
            "-o",
            f"{folder}/probe.so",
        ]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        except OSError as error:
            return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[0]


@pytest.fixture
def run_on(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``run_on(n, fn, *args)``: the results of a module-level function, by rank; see Gang.run_on."""
    gang = request.config.stash.get(_GANG, None)
    assert gang is not None, "name `run_on` among the test's arguments: the pool is forked before tests run"
    return gang.run_on


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Give every test the same random state, alone or after others."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    return
