"""``lowtide.measure``: bytes by the allocator, passes told apart by what runs, whatever the step is written like."""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide.api import _measure
from lowtide.errors import UserError
from lowtide.measurement import measure_peak
from lowtide.records import Measurement
from tests.helpers import models
from tests.helpers.models import Spec

SPEC = Spec(d=64, hidden=96, layers=2, length=32, batch=2)


def assembled(accumulation=1):
    model = models.Decoder(SPEC).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    calls = []

    def step():
        calls.append(None)
        for _ in range(accumulation):
            tokens = torch.zeros(SPEC.batch, SPEC.length, dtype=torch.int64)
            models.loss_of(model(tokens), tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, calls


def test_the_peak_is_the_allocators_and_each_pass_has_one():
    model, optimizer, step, calls = assembled()
    found = lowtide.measure(step, static=(model, optimizer), warm_up=2, repeats=3, device="cpu")
    assert len(calls) == 2 + 3 + 1
    expected = measure_peak(step, static=(model, optimizer), device="cpu", processes=1).bytes
    assert abs(found.peak_bytes - expected) <= 16 * 1024
    parameters = sum(p.nbytes for p in model.parameters())
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert found.start_bytes == parameters + states
    assert found.rebased_bytes == found.peak_bytes - found.start_bytes
    peaks = found.phase_peaks
    assert max(peaks.forward, peaks.backward, peaks.optimizer) == found.peak_bytes
    assert found.start_bytes < peaks.forward <= peaks.backward
    assert peaks.optimizer >= found.start_bytes + parameters
    assert (found.method, found.world_size, found.repeats, found.warm_up) == ("allocator events", 1, 3, 2)


def test_passes_add_up_to_the_step():
    found = lowtide.measure(assembled(accumulation=3)[2], warm_up=1, repeats=1, device="cpu")
    parts = (found.forward_ms, found.backward_ms, found.optimizer_ms, found.other_ms)
    assert all(ms > 0 for ms in parts)
    assert sum(parts) == pytest.approx(found.step_ms)
    assert found.step_times_ms == (found.step_ms,)
    assert Measurement.from_json(found.to_json()) == found


def test_what_follows_backward_is_forward_only_where_another_backward_comes():
    phases = _measure._Phases(torch.device("cpu"))
    with phases.watching():
        assembled(accumulation=2)[2]()
    assert phases._names == ["forward", "backward", "forward", "backward", "between", "optimizer", "after"]


def test_nothing_of_torch_stays_changed():
    before = torch.autograd._engine_run_backward
    with pytest.raises(ZeroDivisionError):
        lowtide.measure(lambda: 1 / 0, device="cpu")
    assert torch.autograd._engine_run_backward is before


def test_the_first_step_never_counts():
    with pytest.raises(UserError, match="at least one warm-up"):
        lowtide.measure(lambda: None, warm_up=0)
