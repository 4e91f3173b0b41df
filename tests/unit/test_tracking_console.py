"""Progress for a person, on a terminal and elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re

import pytest
import torch

from lowtide.training.events import CheckpointSaved, EvaluationDone, Message, RunEnded, RunStarted, StepDone
from lowtide.training.tracking.console import Console, duration_text
from lowtide.training.tracking.kinds import ConsoleConfig

STARTED = RunStarted(
    experiment_id="id-1", name="n", folder="runs/id-1", world_size=2, device="cpu", total_steps=100, policy="full"
)


def step(number: int, **fields: object) -> StepDone:
    loss = fields.pop("loss", 2.0)
    return StepDone(step=number, loss=loss, tokens_per_s=1234.4, peak_bytes=3 << 20, eta_s=65.0, **fields)


def console(stream: io.StringIO, every_s: float = 10.0) -> tuple[Console, list[float]]:
    now = [0.0]
    return Console(ConsoleConfig(every_s=every_s), stream=stream, clock=lambda: now[0]), now


def test_plain_lines_come_first_last_and_now_and_then():
    out = io.StringIO()
    shown, now = console(out)
    shown.handle(STARTED)
    for number in range(1, 101):
        now[0] = number * 1.0
        shown.handle(step(number))
    shown.handle(RunEnded(status="done", steps=100, wall_s=100.0))
    lines = out.getvalue().splitlines()
    assert [int(m[1]) for line in lines if (m := re.match(r"step (\d+)/100", line))] == [
        *range(1, 100, 10),
        100,
    ]
    assert "step 1/100  loss 2.0000  tokens/s 1,234  peak 3.00 MiB  eta 1:05" in lines
    assert lines[0] == "run id-1: 100 steps, 2 processes on cpu, policy full"
    assert lines[-1] == "done after 100 steps in 1:40"
    assert "\x1b" not in out.getvalue()


def test_other_events_have_their_line():
    out = io.StringIO()
    shown, _ = console(out)
    shown.handle(EvaluationDone(step=5, loss=torch.tensor(1.25)))
    shown.handle(CheckpointSaved(step=5, path="c/5"))
    shown.handle(Message(text="a [bold] word", level="warning"))
    shown.handle(RunEnded(status="failed", steps=5, error="it broke"))
    assert out.getvalue().splitlines() == [
        "step 5: held-out loss 1.2500",
        "step 5: checkpoint c/5",
        "warning: a [bold] word",
        "failed after 5 steps: it broke",
    ]


@pytest.mark.parametrize("loss", [float("nan"), torch.tensor(2.0, dtype=torch.bfloat16), "odd", None])
def test_any_loss_can_be_shown(loss):
    out = io.StringIO()
    shown, _ = console(out)
    shown.handle(StepDone(step=1, loss=loss))
    assert re.match(r"step 1  loss (nan|2\.0000|\?)\n", out.getvalue())


def test_a_stream_that_cannot_write_a_letter_writes_the_rest():
    raw = io.BytesIO()
    shown, _ = console(io.TextIOWrapper(raw, encoding="ascii"))
    shown.handle(Message(text="täxt"))
    assert raw.getvalue() == b"t?xt\n"


def test_on_a_terminal_it_is_live_and_messages_stay():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        shown, _ = console(stream)
        shown.handle(STARTED)
        shown.handle(step(1))
        shown.handle(Message(text="a [bold] word"))
        shown.handle(RunEnded(status="done", steps=1))
    text = ""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody holds any more
        while more := os.read(leader, 4096):
            text += more.decode()
    os.close(leader)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "\x1b[?25l" in text  # the cursor was hidden
    assert text.count("\x1b[?25h") == 1  # and is shown again
    assert "1/100" in plain
    assert "3.00 MiB" in plain
    assert "a [bold] word" in plain


def test_durations():
    assert [duration_text(s) for s in (0.04, 9.94, 59.6, 3600.0, 86400.0)] == [
        "0.0s",
        "9.9s",
        "1:00",
        "1:00:00",
        "24:00:00",
    ]
