"""Records for programs: metrics.jsonl and evaluation.jsonl, one strict JSON object a line.

    {"event": "step", "step": 7, "loss": null, "non_finite": {"loss": "nan"}, ...}

NaN and infinities are not JSON: they become null, and ``non_finite`` says which field was what. Every record
is flushed as it is written. One writer per file, by a lock; a last line torn by an earlier kill is cut off
before the first append. When a run goes on from a checkpoint, records of the steps after it, which will be
done again, move to ``<name>.superseded.jsonl``: each step has one record.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.system.files import lock
from lowtide.training.events import EvaluationDone, Event, RunStarted, StepDone
from lowtide.training.tracking.scalars import strict

__all__ = ["EVALUATION", "METRICS", "JsonLines", "LineFile", "to_line"]

METRICS = "metrics.jsonl"
EVALUATION = "evaluation.jsonl"


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of strict JSON, newline included."""
    body, flags = strict(record)
    if flags:
        body["non_finite"] = flags
    return json.dumps(body, allow_nan=False) + "\n"


class LineFile:
    """An append-only file of JSON lines with one writer.

    Raises:
        InputError: another writer has the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Not "a": a torn line must be cut off, and Python's append mode cannot read.
        self._file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
        try:
            lock(self._file, what=str(path))
            self.repaired_bytes = self._repair()
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; it has left this process when this returns."""
        line = memoryview(to_line(record).encode("ascii"))
        while line:
            line = line[self._file.write(line) :]

    def move_after(self, step: int, *, to: Path) -> int:
        """Move the first record beyond ``step`` and all after it to another file; return their number."""
        content = self._read()
        keep = 0
        for line in content.splitlines(keepends=True):
            if _step_of(line) > step:
                break
            keep += len(line)
        moved = content[keep:]
        if moved:
            with to.open("ab") as other:
                other.write(moved)
                other.flush()
                os.fsync(other.fileno())
            self._cut(keep)
        return moved.count(b"\n")

    def close(self) -> None:
        """Close the file and give up its lock."""
        self._file.close()

    def _read(self) -> bytes:
        self._file.seek(0)
        return self._file.readall()

    def _cut(self, size: int) -> None:
        self._file.truncate(size)
        self._file.seek(size)

    def _repair(self) -> int:
        """Drop a last line that is no JSON, end one that only lacks its newline; return the bytes dropped."""
        content = self._read()
        start = content.rstrip(b"\n").rfind(b"\n") + 1
        last = content[start:]
        if not last:
            return 0
        try:
            json.loads(last)
        except ValueError:
            self._cut(start)
            return len(last)
        if not last.endswith(b"\n"):
            self._file.write(b"\n")
        return 0


class JsonLines:
    """The subscriber: steps go to metrics.jsonl, evaluations to evaluation.jsonl."""

    def __init__(self, run_folder: Path) -> None:
        self._metrics = LineFile(run_folder / METRICS)
        try:
            self._evaluation = LineFile(run_folder / EVALUATION)
        except BaseException:
            self._metrics.close()
            raise

    def handle(self, event: Event) -> None:
        """Write steps and evaluations; at a start, move away what is about to be done again."""
        if isinstance(event, StepDone):
            self._metrics.append({"event": "step", **_fields(event)})
        elif isinstance(event, EvaluationDone):
            self._evaluation.append({"event": "evaluation", **_fields(event)})
        elif isinstance(event, RunStarted):
            for lines in (self._metrics, self._evaluation):
                lines.move_after(event.start_step or -1, to=lines.path.with_suffix(".superseded.jsonl"))

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._evaluation.close()


def _fields(event: Event) -> dict[str, Any]:
    # Not dataclasses.asdict: it copies deeply, and a tensor's deepcopy is neither cheap nor always allowed.
    return {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}


def _step_of(line: bytes) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -1
    return step if isinstance(step, int) else -1
