"""The peaks of all cells, before any of them runs: one child prices the whole grid.

The estimate needs torch, which this package does not import, and starting it takes longer than an estimate. So the
cells go to one child as lines of JSON, and their peaks come back as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.sweeps._plan import Cell
from lowtide.system.guarded import guard

__all__ = ["estimate_cells"]

_COMMAND = (sys.executable, "-m", "lowtide.training.estimate_many")


def estimate_cells(
    cells: Sequence[Cell], known: Mapping[str, Any], *, command: Sequence[str] = _COMMAND
) -> dict[str, Any]:
    """Return ``peak_bytes`` and ``timeline``, or ``error``, for every cell by key; peaks that are known are kept."""
    found = {cell.key: known[cell.key] for cell in cells if known.get(cell.key, {}).get("peak_bytes") is not None}
    missing = [cell for cell in cells if cell.key not in found]
    if not missing:
        return found
    with tempfile.TemporaryFile("w+", encoding="utf-8") as lines, tempfile.TemporaryFile("w+") as said:
        for cell in missing:
            lines.write(json.dumps({"key": cell.key, "text": cell.text}) + "\n")
        lines.seek(0)
        process = subprocess.Popen(
            guard(list(command)), stdin=lines, stdout=subprocess.PIPE, stderr=said, text=True, encoding="utf-8"
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    told = json.loads(line)
                    found[told.pop("key")] = told
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        last = said.read().strip()[-500:]
    for cell in missing:
        # A sweep runs without its prices too.
        found.setdefault(cell.key, {"error": f"it could not be estimated: {last or 'no reason given'}"})
    return found
