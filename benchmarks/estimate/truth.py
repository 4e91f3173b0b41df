"""One cell, really run: the trainer's own objects, a first step, then a second one measured.

In one process the truth are the host allocator's events, in several the storage tracker where the events confirm it
(``lowtide.measurement``). Run under torchrun with a file of cells, it appends one line of JSON for each.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.estimate.grid import Cell
from lowtide.measurement import Peak, measure_peak
from lowtide.training.build import build
from lowtide.training.checkpoint import Progress
from lowtide.training.events import Bus
from lowtide.training.loop import Trainer
from lowtide.training.mesh import World, process_group
from lowtide.training.stopping import StopRequest


def measure_cell(cell: Cell, world: World) -> Peak:
    """Return this rank's peak in the second step."""
    gc.collect()
    torch.set_num_threads(1)
    built = build(cell.config(), world)
    built.model.train()
    trainer = Trainer(built, Bus(), Path(), progress=Progress(0, 0, 0), saved=True, stop=StopRequest())
    batches = built.data.batches()
    trainer.optimize(1, batches)
    gc.collect()
    return measure_peak(
        lambda: trainer.optimize(2, batches), static=(built.model, built.optimizer), device=world.device
    )


def measure_here(cell: Cell, device: Literal["cpu", "cuda"] = "cpu") -> Peak:
    """Run a cell of one process in this one."""
    assert cell.processes == 1
    with process_group(device=device) as world:
        return measure_cell(cell, world)


def main(cells_file: str, out_file: str) -> None:
    cells = [Cell(**fields) for fields in json.loads(Path(cells_file).read_text())]
    with process_group(device="cpu") as world:
        for cell in cells:
            peak = measure_cell(cell, world)
            told: list[Any] = [None] * world.world_size
            dist.all_gather_object(told, (peak.bytes, peak.method, peak.note))
            if world.is_main:
                with Path(out_file).open("a") as out:
                    out.write(json.dumps({"cell": cell.as_dict(), "peaks": told}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Python's own end now and then aborts a process that profiled and ran gloo; everything is written by now.
    os._exit(0)
