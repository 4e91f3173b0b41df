"""Grids of training runs that survive what kills one of them. No torch, and no import of the trainer.

    SWEEP.yaml ─► SweepConfig ─► grid ─► plan (cells, checked) ─► run ──child──► lowtide train, in its own session
                                                       ▲           │                  │ run folder
                                                  store, resume ◄──┴──── outcome ◄────┘
                                                       └─► one RunRecord per cell

    _config    what a sweep file may hold
    _grid      combinations, paired lists, points, conditions
    _plan      cells with their whole config and a key of its content; which cell is larger than which
    _child     one cell as a process that leaves nobody behind
    _outcome   what a child left ─► one status and one reason
    _store     the folder: one record per cell, whole or absent; what a kill leaves is cleared
    _estimates the peaks of all cells before the first one runs, from one child
    _run       the loop: prune, start, retry, record, stop
    _array     the same as an array job of a scheduler, one job for each cell
    _progress  a live table, or lines

The caller says how a config is read and what command trains (``cli/sweep_cmd.py``): the trainer is a program here.
"""

from __future__ import annotations

from lowtide.sweeps._array import Submitted, submit
from lowtide.sweeps._config import SweepConfig
from lowtide.sweeps._estimates import estimate_cells
from lowtide.sweeps._plan import Cell, Resolved, plan_cells
from lowtide.sweeps._progress import LiveProgress, PlainProgress, Tally
from lowtide.sweeps._run import Finished, Watcher, run_sweep
from lowtide.sweeps._store import Store

__all__ = [
    "Cell",
    "Finished",
    "LiveProgress",
    "PlainProgress",
    "Resolved",
    "Store",
    "Submitted",
    "SweepConfig",
    "Tally",
    "Watcher",
    "estimate_cells",
    "plan_cells",
    "run_sweep",
    "submit",
]
