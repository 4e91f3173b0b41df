"""metrics.jsonl and evaluation.jsonl: strict JSON, one writer, repaired, one record a step."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.errors import InputError
from lowtide.training.events import EvaluationDone, RunStarted, StepDone
from lowtide.training.tracking.jsonl import JsonLines, LineFile


def read(path: Path) -> list[dict]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def started(start_step: int) -> RunStarted:
    return RunStarted(
        experiment_id="x", name="x", folder="x", world_size=1, device="cpu", total_steps=9, start_step=start_step
    )


def write(folder: Path, steps: range, start_step: int = 0, **fields: object) -> None:
    lines = JsonLines(folder)
    lines.handle(started(start_step))
    for step in steps:
        lines.handle(StepDone(step=step, loss=float(step), **fields))
    lines.close()


def test_steps_and_evaluations_go_to_their_own_files(tmp_path):
    lines = JsonLines(tmp_path)
    lines.handle(started(0))
    lines.handle(StepDone(step=1, loss=2.5, tokens_per_s=10.0, peak_bytes=7, extra={"mine": 1}))
    lines.handle(EvaluationDone(step=1, loss=2.0, batches=4))
    lines.close()
    (step,), (evaluation,) = read(tmp_path / "metrics.jsonl"), read(tmp_path / "evaluation.jsonl")
    assert (step["event"], step["step"], step["loss"], step["peak_bytes"], step["extra"]) == (
        "step",
        1,
        2.5,
        7,
        {"mine": 1},
    )
    assert (evaluation["event"], evaluation["loss"], evaluation["batches"]) == ("evaluation", 2.0, 4)
    assert "non_finite" not in step


def test_every_record_is_in_the_file_at_once(tmp_path):
    lines = JsonLines(tmp_path)
    for step in range(1, 4):
        lines.handle(StepDone(step=step, loss=1.0))
        assert len(read(tmp_path / "metrics.jsonl")) == step
    lines.close()


def test_what_is_not_finite_is_null_and_flagged(tmp_path):
    lines = JsonLines(tmp_path)
    extra = {"a": [1.0, math.inf], "b": {"c": -math.inf}}
    lines.handle(StepDone(step=1, loss=math.nan, grad_norm=math.inf, extra=extra))
    lines.close()
    (record,) = read(tmp_path / "metrics.jsonl")
    assert record["loss"] is None
    assert record["extra"] == {"a": [1.0, None], "b": {"c": None}}
    assert record["non_finite"] == {"loss": "nan", "grad_norm": "inf", "extra.a.1": "inf", "extra.b.c": "-inf"}


@pytest.mark.parametrize(
    ("torn", "kept"),
    [
        (b'{"step": 3, "lo', 2),
        (b'{"step": 3', 2),
        (b"\x00" * 40, 2),
        (b'{"step": 3, "t": "\xc3', 2),
        (b'{"step": 3, "loss"\n', 2),
        (b'{"step": 3, "loss": 3.0}', 3),
        (b"", 2),
    ],
)
def test_a_last_line_torn_by_a_kill_is_repaired_before_appending(tmp_path, torn, kept):
    write(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    lines = LineFile(tmp_path / "metrics.jsonl")
    assert lines.repaired_bytes == (0 if kept == 3 else len(torn))
    lines.append({"step": 9})
    lines.close()
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [*range(1, kept + 1), 9]


def test_a_first_line_that_is_torn_is_repaired_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"st')
    write(tmp_path, range(1, 2))
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [1]


def test_a_file_has_one_writer(tmp_path):
    lines = JsonLines(tmp_path)
    with pytest.raises(InputError, match=r"metrics\.jsonl is being written"):
        JsonLines(tmp_path)
    code = (
        "import sys; from pathlib import Path; from lowtide.training.tracking.jsonl import JsonLines\n"
        "from lowtide.errors import InputError\n"
        "try: JsonLines(Path(sys.argv[1]))\n"
        "except InputError: sys.exit(5)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, env=dict(os.environ))
    assert done.returncode == 5
    lines.close()
    JsonLines(tmp_path).close()


def test_going_on_from_a_checkpoint_leaves_one_record_a_step(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 10), start_step=4)
    records = read(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 10))
    assert [r["step"] for r in read(tmp_path / "metrics.superseded.jsonl")] == [5, 6, 7]


def test_beginning_again_from_the_start_supersedes_everything(tmp_path):
    write(tmp_path, range(1, 4))
    write(tmp_path, range(1, 3), start_step=0)
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [r["step"] for r in read(tmp_path / "metrics.superseded.jsonl")] == [1, 2, 3]
