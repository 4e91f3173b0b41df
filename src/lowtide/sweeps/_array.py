"""A sweep as an array job: one job for each cell, submitted through submitit.

    submit ─► array.json (sweep and cells, once) ─► submitit array ─► run_one(folder, key) on some node ─► record.json

Jobs share the sweep's folder, which every node must see, and nothing else: each writes its own cell. A job that the
scheduler kills leaves no record, and ``--resume`` submits it again. A cell is pruned by what has a record when its job
starts. Checked with submitit 1.5.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from lowtide.errors import InputError
from lowtide.run_record import RunRecord
from lowtide.sweeps._config import SweepConfig
from lowtide.sweeps._estimates import estimate_cells
from lowtide.sweeps._plan import Cell
from lowtide.sweeps._run import Finished, SweepRun, finished, predict
from lowtide.sweeps._store import Store
from lowtide.system.files import read_json, write_json

__all__ = ["Submitted", "run_one", "submit"]

_ARRAY = "array.json"
_JOBS = "jobs"


class Submitted:
    """An array job that was handed over; ``wait`` until it ends, or go."""

    def __init__(self, store: Store, cells: Sequence[Cell], jobs: Sequence[Any]) -> None:
        self._store, self._cells, self._jobs = store, cells, jobs

    @property
    def job_ids(self) -> list[str]:
        """The scheduler's names of the jobs, in the order of the cells that run."""
        return [str(job.job_id) for job in self._jobs]

    def wait(self) -> Finished:
        """Wait until every job has ended, however it did, and return the records."""
        for job in self._jobs:
            # What went wrong with a cell stands in its record; without one it is missing.
            job.exception()
        return finished(self._cells, self._store.records(self._cells), None)

    def close(self) -> None:
        """Let go of the folder."""
        self._store.close()


def submit(
    sweep: SweepConfig,
    cells: Sequence[Cell],
    folder: Path,
    *,
    command: Sequence[str],
    cluster: Literal["slurm", "local"] = "slurm",
    options: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Submitted:
    """Submit every cell that is due as one array job.

    Args:
        sweep: the file.
        cells: its cells.
        folder: the sweep's folder, which every node sees under this path.
        command: what trains, as for ``run_sweep``.
        cluster: ``local`` runs the jobs as processes of this machine.
        options: parameters of submitit (``gpus_per_node``, ``slurm_partition``, ...) over those derived here.
        resume: whether to go on with a sweep that is there.

    Raises:
        InputError: submitit is not installed, or the folder is taken.
    """
    try:
        import submitit
    except ImportError:
        raise InputError("array jobs need submitit: pip install 'lowtide[slurm]'") from None
    store = Store(folder.resolve())
    store.open(sweep.name, cells, resume=resume)
    if sweep.estimate:
        predict(store, cells, estimate_cells)
    run = SweepRun(sweep, cells, store, command, watcher=None, predicted={}, records=store.records(cells))
    due = [cell.key for cell in cells if run.is_due(cell)]
    payload = {
        "sweep": sweep.model_dump(mode="json"),
        "cells": [asdict(cell) for cell in cells],
        "command": list(command),
        "cwd": str(Path.cwd()),
    }
    write_json(store.folder / _ARRAY, payload)
    executor = submitit.AutoExecutor(folder=store.folder / _JOBS, cluster=cluster)
    tries = 1 + sum(sweep.retry.values())
    executor.update_parameters(
        **{
            "name": sweep.name,
            "timeout_min": math.ceil((sweep.timeout_s + sweep.grace_s + 60) * tries / 60),
            **({"slurm_array_parallelism": sweep.at_once} if cluster == "slurm" else {}),
            **(options or {}),
        }
    )
    jobs: list[Any] = []
    if due:
        jobs = executor.map_array(run_one, [str(store.folder)] * len(due), due)
    return Submitted(store, cells, jobs)


def run_one(folder: str, key: str) -> str:
    """Run one cell of a submitted sweep to its record, on the node that the scheduler chose; return its status."""
    told = read_json(Path(folder) / _ARRAY)
    sweep = SweepConfig.model_validate(told["sweep"])
    cells = [Cell(**fields) for fields in told["cells"]]
    (cell,) = [each for each in cells if each.key == key]
    os.chdir(told["cwd"])
    store = Store(Path(folder), job=f"{socket.gethostname()} job {os.environ.get('SLURM_JOB_ID', os.getpid())}")
    # All of them are known already: the one that submitted asked.
    predicted = predict(store, [cell], estimate_cells) if sweep.estimate else {}
    run = SweepRun(
        sweep, cells, store, told["command"], watcher=None, predicted=predicted, records=store.records(cells)
    )
    run.go_alone(cell)
    record: RunRecord | None = run.records.get(key)
    return "missing" if record is None else record.status
