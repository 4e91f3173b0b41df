"""The storage tracker, to the byte, on real and on fake tensors."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lowtide.measurement import LiveStorages


@pytest.fixture(params=["real", "fake"])
def mode(request: pytest.FixtureRequest) -> Any:
    with contextlib.nullcontext() if request.param == "real" else FakeTensorMode():
        yield request.param


def test_counts_what_lives_and_the_most_that_did(mode: str) -> None:
    with LiveStorages() as live:
        x = torch.zeros(1000)
        assert (live.live_bytes, live.peak_bytes) == (4000, 4000)
        y = x + 1
        del x
        assert (live.live_bytes, live.peak_bytes) == (4000, 8000)
        del y
        assert (live.live_bytes, live.peak_bytes) == (0, 8000)
        live.reset_peak()
        assert live.peak_bytes == 0


def test_a_storage_counts_once_and_as_long_as_any_view_lives(mode: str) -> None:
    with LiveStorages() as live:
        x = torch.zeros(10, 100)
        view = x[3:5].t()
        same = x.detach()
        x.add_(1)
        assert live.live_bytes == 4000
        del x, same
        assert live.live_bytes == 4000
        del view
        assert live.live_bytes == 0


def test_what_only_autograd_holds_is_alive(mode: str) -> None:
    x = torch.zeros(1000, requires_grad=True)
    with LiveStorages(x) as live:
        y = x.exp()
        z = y * 2
        total = z.sum()
        del y, z
        gc.collect()
        # exp keeps its result, mul by a number keeps nothing.
        assert live.live_bytes == 4000 + 4000 + 4
        total.backward()
        assert live.live_bytes == 4000 + 4000 + 4  # x, its gradient, the sum
        x.grad = None
        assert live.live_bytes == 4000 + 4


def test_resized_storages_count_by_their_present_size(mode: str) -> None:
    before = torch.UntypedStorage.__dict__.get("resize_")
    old = torch.zeros(500)
    with LiveStorages() as live:
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        assert live.live_bytes == 0
        x.untyped_storage().resize_(8000)
        assert (live.live_bytes, live.peak_bytes) == (8000, 8000)
        old.untyped_storage().resize_(0)
        old.untyped_storage().resize_(2000)  # unknown before: counted from here on
        assert live.live_bytes == 10000
        y = torch.zeros(2)
        y.resize_(300)
        assert live.live_bytes == 11200
    assert torch.UntypedStorage.__dict__.get("resize_") is before


def test_what_was_alive_before_counts_only_if_it_is_registered(mode: str) -> None:
    batch, weight = torch.zeros(100), torch.zeros(50)
    with LiveStorages([weight, {"again": weight.view(5, 10)}]) as live:
        assert live.static_bytes == 200
        part = batch[10:]  # a view of what nobody registered
        batch.mul_(2)
        assert live.live_bytes == 200
        out = part + 1
        assert live.live_bytes == 200 + 360
        del weight, out
    assert part.shape == (90,)


def test_static_are_parameters_gradients_buffers_and_optimizer_states() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(4, 10)).sum().backward()
    optimizer.step()
    parameters = 4 * (100 + 20)
    buffers = 4 * 20 + 8
    states = 2 * parameters + 4 * 3  # two moments, a step count for each of three
    assert LiveStorages(model, optimizer).static_bytes == 2 * parameters + buffers + states
    model.zero_grad()
    assert LiveStorages(model).static_bytes == parameters + buffers
    assert LiveStorages(model, device="cuda").static_bytes == 0


def test_a_freed_static_storage_is_noticed() -> None:
    model = nn.Linear(10, 10, bias=False)
    model(torch.zeros(4, 10)).sum().backward()
    with LiveStorages(model) as live:
        assert live.live_bytes == 800
        model.zero_grad()
        assert live.live_bytes == 400


def test_wrapped_numbers_and_constants(mode: str) -> None:
    with LiveStorages() as live:
        x = torch.tensor([1.0, 2.0, 3.0])  # allocated outside of the dispatcher
        assert live.live_bytes == 12
        y = x * 2.0
        assert live.live_bytes == 24
        del x, y
        assert live.live_bytes == 0


def test_the_state_that_checkpoint_keeps_counts_and_names_are_put_back() -> None:
    names = (torch.get_rng_state, torch.random.get_rng_state)
    x = torch.zeros(1000, requires_grad=True)
    with LiveStorages() as counted, LiveStorages(rng_states="ignore") as ignored:
        y = checkpoint(torch.exp, x, use_reentrant=False)
        assert counted.live_bytes == 4000 + torch.get_rng_state().nbytes
        assert ignored.live_bytes == 4000
        assert torch.get_rng_state is not names[0]
    assert (torch.get_rng_state, torch.random.get_rng_state) == names
    del y


def test_names_are_put_back_after_an_error_and_in_any_order() -> None:
    resize, state = torch.UntypedStorage.__dict__.get("resize_"), torch.get_rng_state
    with pytest.raises(RuntimeError, match="shape"), LiveStorages():
        torch.zeros(2) @ torch.zeros(3, 3, 3, 3).view(7)
    assert torch.UntypedStorage.__dict__.get("resize_") is resize
    assert torch.get_rng_state is state


def test_results_are_bitwise_those_without_a_tracker() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    (x @ x).softmax(-1).sum().backward()
    expected, x.grad = x.grad, None
    with LiveStorages():
        (x @ x).softmax(-1).sum().backward()
    assert torch.equal(expected, x.grad)


def test_storages_freed_on_another_thread_are_seen() -> None:
    with LiveStorages() as live:
        held = [torch.zeros(1000)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert live.live_bytes == 0


def test_sparse_tensors_count_indices_and_values() -> None:
    with LiveStorages() as live:
        dense = torch.eye(10)
        sparse = dense.to_sparse()
        del dense
        assert live.live_bytes == 10 * 4 + 2 * 10 * 8
        del sparse
        assert live.live_bytes == 0


def test_many_storages_leave_nothing_behind() -> None:
    with LiveStorages() as live:
        x = torch.zeros(8)
        for _ in range(2000):
            x = x + 1
        assert live.live_bytes == 32
        assert len(live.records()) == 1
        assert live.peak_bytes == 64
