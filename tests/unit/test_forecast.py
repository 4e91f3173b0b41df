"""The estimate beside what was measured: sums by part, a warning past 5%, and never an error of the run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from lowtide.training.config import TrainConfig
from lowtide.training.forecast import Forecast, compare, forecast
from lowtide.training.mesh import Place
from lowtide.training.summary import ForecastRow, Summary, print_summary

MIB = 2**20


@dataclass
class Trained:
    """The two things of a built run that are looked at."""

    model: nn.Module
    optimizer: Any


def trained():
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Trained(model, optimizer)


PARAMETERS, STATES = 256 * 256 * 4, 2 * 256 * 256 * 4 + 4


def expected(peak, **parts):
    categories = {"parameters": PARAMETERS, "optimizer_state": STATES, "transient": 0, **parts}
    return Forecast(peak, categories, "backward", None, 0.5)


def test_parts_are_counted_on_the_real_tensors_and_the_rest_is_the_difference():
    row = compare(expected(10 * MIB), 10 * MIB, trained())
    rest = "activations, gradients and buffers"
    assert row.measured_parts == {
        "parameters": PARAMETERS,
        "optimizer_state": STATES,
        rest: 10 * MIB - PARAMETERS - STATES,
    }
    assert row.predicted_parts == row.measured_parts
    assert (row.error, row.off) == (0.0, "")


@pytest.mark.parametrize(
    ("predicted", "parts", "category"),
    [
        (8 * MIB, {}, "activations, gradients and buffers"),
        (12 * MIB, {"optimizer_state": STATES + 2 * MIB}, "optimizer_state"),
    ],
)
def test_past_five_percent_it_warns_and_says_what_is_off(predicted, parts, category, caplog):
    with caplog.at_level(logging.WARNING):
        row = compare(expected(predicted, **parts), 10 * MIB, trained())
    assert row.off == category
    (record,) = caplog.records
    said = record.getMessage()
    assert f"the estimate said {predicted // MIB}.00 MiB and the peak was 10.00 MiB: 20.0%" in said
    assert f"Most of the difference is in {category.replace('_', ' ')}" in said


def test_within_five_percent_it_is_silent(caplog):
    with caplog.at_level(logging.WARNING):
        assert compare(expected(int(10.4 * MIB)), 10 * MIB, trained()).off == ""
    assert caplog.records == []


def test_nothing_measured_is_no_error():
    row = compare(expected(10 * MIB), None, trained())
    assert (row.error, row.off, row.measured_parts) == (None, "", {})


def config(**changes):
    values = {
        "model": {"kind": "decoder", "vocab_size": 64, "dim": 32, "layers": 2, "heads": 2},
        "data": {"kind": "random", "vocab_size": 64, "sequence_length": 16, "batch_size": 2},
        "launch": {"threads": 1},
    }
    return TrainConfig.model_validate({**values, **changes})


def test_what_cannot_be_estimated_says_why_and_does_not_stop_the_run():
    compiled = forecast(config(compile=True), Place())
    assert (compiled.peak_bytes, compiled.note) == (None, "compiled code is not estimated")
    ddp = forecast(config(sharding={"kind": "ddp"}), Place())
    assert ddp.peak_bytes is None
    assert ddp.note.startswith("sharding ddp is not estimated")
    row = compare(ddp, 10 * MIB, trained())
    assert (row.predicted_bytes, row.note) == (None, ddp.note)


@pytest.mark.skipif(torch.cuda.is_available(), reason="prices the GPU's step there")
def test_on_a_cpu_no_time_is_forecast():
    found = forecast(config(), Place(rank=0, world_size=2))
    assert found.peak_bytes == sum(found.categories.values())
    assert found.step_ms is None


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (ForecastRow(10 * MIB, 10 * MIB, 0.0, "", "backward", {}, {}, 0.5, ""),
         "10.00 MiB in backward (rank 0, made in 0.5 s), +0.00%"),
        (ForecastRow(8 * MIB, 10 * MIB, -0.2, "optimizer_state", "forward", {}, {}, 0.5, ""),
         "-20.00%: off in optimizer state"),
        (ForecastRow(8 * MIB, None, None, "", "forward", {}, {}, 0.5, ""), "nothing was measured"),
        (ForecastRow(None, 10 * MIB, None, "", "", {}, {}, 0.5, "no reason"), "not available: no reason"),
    ],
)  # fmt: skip
def test_the_summary_shows_both(row, says):
    summary = Summary("id", "folder", 3, 1.0, 1.0, 1.0, 1.0, 1.0, "none", (), (), "", (), None, 1.0, row)
    text = StringIO()
    print_summary(summary, Console(file=text, width=200))
    assert says in text.getvalue()
    assert summary.as_json()["forecast"]["predicted_bytes"] == row.predicted_bytes
