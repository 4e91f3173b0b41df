"""The allocator's events, the true peak, and how closely the tracker matches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowtide.measurement import AllocatorEvents, EventAccount, LiveStorages, Peak, PeakMeter, measure_peak
from lowtide.measurement._events import settle
from lowtide.measurement._peak import judge
from tests.helpers import models


def _account(*static: Any, step: Any) -> EventAccount:
    with AllocatorEvents(*static) as events:
        step()
    assert events.account is not None
    return events.account


def test_events_to_the_byte() -> None:
    def step() -> None:
        x = torch.empty(1000)
        y = torch.empty(500)
        del x
        torch.empty(100)
        del y

    account = _account(step=step)
    assert (account.peak_bytes, account.end_bytes, account.missed_bytes) == (6000, 0, 0)


def test_what_was_alive_before_and_dies_inside_is_seen() -> None:
    held = [torch.zeros(1000), torch.zeros(10)]

    def step() -> None:
        x = torch.empty(300)
        del held[0], x
        held.append(torch.empty(500))

    account = _account(held, step=step)
    assert account.static_bytes == 4040
    assert account.peak_bytes == 4040 + 1200
    assert account.end_bytes == 2000 - 4000


def test_static_storages_that_are_resized() -> None:
    x = torch.zeros(1000)

    def step() -> None:
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(4000)
        x.untyped_storage().resize_(0)
        torch.empty(900)

    account = _account(x, step=step)
    assert (account.peak_bytes, account.end_bytes) == (4000, -4000)


def test_an_earlier_profile_leaves_no_trace_in_a_later_one() -> None:
    """torch keeps the sizes of blocks between profiles, and reports stale ones when addresses come again."""
    held: list[torch.Tensor] = []
    _account(step=lambda: held.extend(torch.empty(1 << 16) for _ in range(8)))
    held.clear()
    held.extend(torch.empty(1 << 12) for _ in range(64))

    account = _account(held, step=held.clear)
    assert account.end_bytes == -64 * 4 * (1 << 12)
    assert account.peak_bytes == account.static_bytes


def _block(address: int, nbytes: int) -> tuple[int, str, int, int]:
    return (0, "block", address, nbytes)


def test_a_block_handed_out_twice_went_back_unseen() -> None:
    account = settle(100, [_block(1, 50), _block(2, 30), _block(1, 40), _block(1, -40), _block(2, -30)])
    assert (account.peak_bytes, account.certain_peak_bytes) == (180, 170)
    assert (account.missed_bytes, account.end_bytes) == (50, 0)


def test_marks_of_a_tracker_stand_for_unseen_releases() -> None:
    made, gone = "lowtide::made", "lowtide::gone"
    steps = [_block(1, 50), (0, made, 7, 1), (0, gone, 7, 0), _block(2, 30), _block(2, -30)]
    account = settle(0, steps)
    assert (account.peak_bytes, account.missed_bytes, account.end_bytes) == (50, 0, 0)
    # A late mark must not take a later block at the same address.
    late = [_block(1, 50), (0, made, 7, 1), _block(1, -50), _block(1, 20), (0, gone, 7, 0), _block(2, 5)]
    assert settle(0, late).end_bytes == 25


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-100, 100).filter(bool)), max_size=30))
def test_the_two_peaks_bound_each_other(moves: list[tuple[int, int]]) -> None:
    account = settle(0, [_block(address, nbytes) for address, nbytes in moves])
    assert 0 <= account.certain_peak_bytes <= account.peak_bytes <= account.certain_peak_bytes + account.missed_bytes
    assert account.end_bytes <= account.peak_bytes


def _training(dtype: torch.dtype, keep_gradients: bool, threads: int = 1) -> tuple[Any, Any]:
    spec = models.Spec(d=128, hidden=256, layers=4, vocab=512, length=128, dtype=dtype)
    model = models.build(spec)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = models.tokens(spec)

    def step() -> None:
        if keep_gradients:
            optimizer.zero_grad()
        models.loss_of(model(tokens), tokens).backward()
        optimizer.step()
        if not keep_gradients:
            optimizer.zero_grad()

    step()
    step()
    return step, (model, optimizer, tokens)


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_tracker_and_events_agree_over_a_training_step(keep_gradients: bool) -> None:
    """Two accounts that share no code: storages seen by operators, blocks seen by the allocator."""
    step, static = _training(torch.float32, keep_gradients)
    with LiveStorages(static, device="cpu") as live:
        step()
        tracked, end = live.peak_bytes, live.live_bytes - live.static_bytes
    account = _account(static, step=step)
    assert account.static_bytes == live.static_bytes
    assert account.end_bytes == end == 0
    assert tracked == pytest.approx(account.peak_bytes, rel=4e-4)
    assert measure_peak(step, static=static, device="cpu", processes=1) == Peak(account.peak_bytes, "allocator events")


def test_scratch_memory_in_bf16_kernels_is_bounded() -> None:
    step, static = _training(torch.bfloat16, keep_gradients=False)
    with LiveStorages(static, device="cpu") as live:
        step()
    account = _account(static, step=step)
    assert live.peak_bytes <= account.peak_bytes <= 1.03 * live.peak_bytes


def test_methods_by_processes_and_compile() -> None:
    step, static = _training(torch.float32, keep_gradients=False)
    one = measure_peak(step, static=static, device="cpu", processes=1)
    several = measure_peak(step, static=static, device="cpu", processes=2)
    compiled = measure_peak(step, static=static, device="cpu", processes=2, compiled=True)
    assert (one.method, several.method) == ("allocator events", "storage tracker")
    assert compiled.method == "allocator events (upper bound)"
    assert "not seen" in compiled.note
    assert one.bytes == compiled.bytes == pytest.approx(several.bytes, rel=4e-4)
    assert "allocator events" in str(one)


def test_a_tracker_is_accepted_between_both_ends_of_the_events() -> None:
    mib = 1 << 20
    account = EventAccount(0, peak_bytes=12 * mib, certain_peak_bytes=10 * mib, end_bytes=0, missed_bytes=2 * mib)
    slack = 64 * 1024
    for tracked in (10 * mib - slack, 10 * mib, 12 * mib):
        assert judge(tracked, account) == Peak(tracked, "storage tracker")
    low = judge(10 * mib - slack - 1, account)
    assert (low.bytes, low.method) == (10 * mib, "allocator events")
    assert "scratch memory in kernels; up to 2.00 MiB more while collectives ran" in low.note
    above = judge(12 * mib + 1, account)
    assert (above.bytes, above.method) == (None, "not available")
    assert "12.00 MiB" in above.note
    assert "not available" in str(above)
    large = EventAccount(0, 10**9, 10**9, 0, 0)
    assert judge(10**9 - 10**6, large).method == "storage tracker"
    assert judge(10**9 - 10**6 - 1, large).method == "allocator events"


def test_memory_that_the_allocator_never_handed_out_is_a_contradiction() -> None:
    numpy = pytest.importorskip("numpy")

    def step() -> None:
        held = torch.as_tensor(numpy.zeros(1 << 20, dtype="float32"))
        held.add_(1)

    measured = measure_peak(step, device="cpu", processes=2)
    assert measured.bytes is None
    assert "not the allocator's memory" in measured.note


def test_a_running_profiler_is_no_crash() -> None:
    with torch.autograd.profiler.profile():
        measured = measure_peak(lambda: torch.zeros(10), device="cpu", processes=1)
    assert measured.bytes is None
    assert "another profiler" in measured.note


def test_an_error_in_the_step_comes_through_and_ends_the_profile() -> None:
    with pytest.raises(ZeroDivisionError), PeakMeter(device="cpu", processes=2):
        _ = 1 // 0
    assert not torch.autograd._profiler_enabled()
    assert measure_peak(lambda: torch.zeros(1000), device="cpu", processes=1).bytes == 4000


@pytest.mark.gpus(1)
def test_cuda_takes_the_allocator_s_own_peak() -> None:
    model = nn.Linear(1024, 1024, device="cuda")

    def step() -> None:
        model(torch.ones(1024, 1024, device="cuda")).sum().backward()
        model.zero_grad()

    step()
    measured = measure_peak(step, static=model)
    assert measured.method == "cuda allocator"
    assert measured.bytes == torch.cuda.max_memory_allocated()
    assert measured.bytes is not None
    assert measured.bytes >= 3 * 4 << 20
