"""Price many configs in one process, for a sweep: lines of JSON in, lines of JSON out.

    {"key": ..., "text": the config as YAML}  ─►  {"key": ..., "peak_bytes": ..., "timeline": [[phase, bytes], ...]}
                                               or {"key": ..., "error": one message}

Run as ``python -m lowtide.training.estimate_many``. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from lowtide.errors import LowtideError

__all__ = ["main"]

_POINTS = 200


def main(lines: TextIO, answers: TextIO) -> None:
    """Answer every line, in order."""
    for line in lines:
        told = json.loads(line)
        answers.write(json.dumps({"key": told["key"], **_answer(told["text"])}) + "\n")
        answers.flush()


def _answer(text: str) -> dict[str, Any]:
    from lowtide.training.config import load_config
    from lowtide.training.estimate import estimate_config
    from lowtide.training.launch import choose_nproc

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cell.yaml")
        file.write_text(text, encoding="utf-8")
        try:
            config = load_config(file).config
            alone = config.sharding.kind == "none"
            processes = 1 if alone else choose_nproc(config.launch.nproc)
            found = estimate_config(config, world_size=processes, threads=config.launch.threads or _threads(processes))
        except LowtideError as error:
            return {"error": str(error)}
        except Exception as error:
            # One cell that cannot be priced must not cost the others their prices.
            return {"error": f"{type(error).__name__}: {error}"}
    return {"peak_bytes": found.peak_bytes, "timeline": _thin([(p.phase, p.live.total) for p in found.timeline])}


def _threads(processes: int) -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(given) if given.isdecimal() and int(given) else max(1, cores // processes)


def _thin(points: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Keep the highest point of each stretch, so that the peak stays."""
    size = max(1, -(-len(points) // _POINTS))
    return [max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size)]


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr
    main(sys.stdin, out)
