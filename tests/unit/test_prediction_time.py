"""Times from records alone: rooflines, views, causal attention, profiles, collectives, and what has no formula."""

from __future__ import annotations

import math

import pytest

from lowtide.errors import InputError, UserError
from lowtide.prediction import (
    DEVICES,
    CollectivePoint,
    Device,
    DeviceProfile,
    RatePoint,
    collective_ms,
    op_ms,
    peak_flops,
    read_profile,
    speeds_of,
    trace_ms,
    unpriced,
)
from lowtide.prediction._classes import SHARES, class_of, collective_of
from lowtide.records import Environment, OpRecord, OpTrace, TensorRecord

ENVIRONMENT = Environment(torch="2.13.0", python="3.11", lowtide="0.1.0")
H100 = DEVICES["H100"]


def tensor(*shape, dtype="bfloat16"):
    return TensorRecord(storage=None, shape=shape, stride=(), dtype=dtype)


def op(name="aten.mm.default", *, flops=0, nbytes=0, dtype="bfloat16", index=0, phase="forward", **fields):
    inputs = (tensor(4, 4, dtype=dtype),)
    return OpRecord(
        index=index, op=name, phase=phase, module="", inputs=inputs, flops=flops, bytes_moved=nbytes, **fields
    )


def profile(**fields):
    values = {
        "device": "cpu",
        "kernels": "cpu",
        "rates": (
            RatePoint(operators="matmul", dtype="float32", size=1e6, per_s=1e10),
            RatePoint(operators="matmul", dtype="float32", size=1e8, per_s=3e10),
            RatePoint(operators="pointwise", dtype="float32", size=1e6, per_s=2e10),
        ),
        "operator_us": 10.0,
        "view_us": 1.0,
        "environment": ENVIRONMENT,
    }
    return DeviceProfile(**{**values, **fields})


def test_a_large_product_takes_its_operations_and_a_thin_one_its_bytes():
    large = op(flops=10**13, nbytes=10**6)
    assert op_ms(large, "H100") == pytest.approx(10**13 / (989e12 * SHARES["matmul"]) * 1000)
    thin = op(flops=10**6, nbytes=10**9)
    assert op_ms(thin, "H100") == pytest.approx(10**9 / (3350e9 * SHARES["copy"]) * 1000)


def test_float32_products_are_those_without_tf32():
    assert op_ms(op(flops=10**13, dtype="float32"), H100) == pytest.approx(989 / 67 * op_ms(op(flops=10**13), H100))


def test_an_operator_element_by_element_takes_its_bytes_whatever_its_flops():
    add = op("aten.add.Tensor", flops=10**12, nbytes=10**9)
    assert op_ms(add, "H100") == pytest.approx(10**9 / (3350e9 * 0.85) * 1000)


def test_a_causal_kernel_skips_half():
    name = "aten._scaled_dot_product_flash_attention.default"
    whole, causal = (op(name, flops=10**13, literals=f"is_causal={causal}") for causal in (False, True))
    assert op_ms(whole, "H100") == 2 * op_ms(causal, "H100")


def test_small_operators_take_their_launch_and_views_nothing_on_a_gpu():
    assert op_ms(op("aten.add.Tensor", nbytes=16), "H100") == 5e-3
    assert op_ms(op("aten.view.default", view=True), "H100") == 0
    assert op_ms(op("aten.view.default", view=True), "cpu") > 0


def test_on_a_cpu_launch_and_kernel_take_turns_and_the_nominal_core_counts_once_for_each_thread():
    one, four = (op_ms(op("aten.add.Tensor", nbytes=10**9), "cpu", threads=n) for n in (1, 4))
    launch = speeds_of("cpu").operator_ms
    assert (one - launch) == pytest.approx(4 * (four - launch))


def test_no_formula_means_its_bytes_and_a_name_never_nothing():
    mystery = op("lab.mystery.default", flops=None, nbytes=10**9)
    assert op_ms(mystery, "H100") == pytest.approx(10**9 / (3350e9 * 0.85) * 1000)
    assert op_ms(op("lab.mystery.default", flops=None), "H100") > 0
    trace = OpTrace(block="B", device="H100", ops=(mystery,), storages=(), environment=ENVIRONMENT)
    assert unpriced(trace) == ("the time of lab.mystery.default is that of its bytes alone: it has no FLOP formula",)


def test_a_trace_is_the_sum_of_its_operators_by_phase():
    ops = (
        op(flops=10**12, index=0),
        op("aten.add.Tensor", nbytes=10**8, index=1),
        op(flops=2 * 10**12, index=2, phase="backward"),
    )
    trace = OpTrace(block="B", device="H100", ops=ops, storages=(), environment=ENVIRONMENT)
    assert trace_ms(trace, "forward") == op_ms(ops[0], "H100") + op_ms(ops[1], "H100")
    assert trace_ms(trace, "backward") == op_ms(ops[2], "H100")
    assert trace_ms(trace, "forward", "A100") > trace_ms(trace, "forward")


def test_a_profile_is_interpolated_between_sizes_and_stands_beyond_them():
    found = profile()
    assert found.per_s("matmul", "float32", 1e7) == pytest.approx(2e10)
    assert found.per_s("matmul", "float32", 1) == 1e10
    assert found.per_s("matmul", "float32", 1e12) == 3e10
    assert found.per_s("attention", "float32", 1e7) is None


def test_a_profile_prices_operators_and_stands_in_for_classes_that_it_lacks():
    measured = profile()
    assert op_ms(op(flops=10**8, dtype="float32"), measured) == pytest.approx(10**8 / 3e10 * 1000 + 0.01)
    assert op_ms(op("aten.sum.default", nbytes=10**6, dtype="float32"), measured) == pytest.approx(0.05 + 0.01)
    # bfloat16 was not measured: float32 stands for it.
    assert op_ms(op(flops=10**8), measured) == op_ms(op(flops=10**8, dtype="float32"), measured)
    assert op_ms(op("aten.view.default", view=True), measured) == 0.001


def test_a_profile_survives_its_file_and_says_what_is_wrong_with_another(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json(indent=1))
    assert read_profile(path) == profile()
    with pytest.raises(InputError, match="lowtide calibrate"):
        read_profile(tmp_path / "missing.json")
    path.write_text('{"kind": "OpTrace"}')
    with pytest.raises(InputError, match="no DeviceProfile"):
        read_profile(path)


def test_a_profile_of_a_device_that_no_table_knows_has_speeds_of_its_own():
    own = profile(device="Somebody's card", kernels="cuda")
    assert peak_flops(own, "bfloat16") == 3e10
    assert op_ms(op(flops=10**9, dtype="float32"), own) == pytest.approx(10**9 / 3e10 * 1000)


def test_utilisation_is_a_share_of_the_makers_peak_and_on_a_cpu_of_the_best_product():
    assert peak_flops("H100", "bfloat16") == 989e12
    assert peak_flops("H100", "float32") == 67e12
    assert peak_flops("cpu", "float32", threads=2) == 128e9
    assert peak_flops(profile(), "float32") == 3e10
    assert peak_flops(profile(), "bfloat16") == 3e10


def test_collectives_send_what_a_ring_sends():
    gather = collective_ms("all_gather", 8 * 10**9, ranks=8, device="H100")
    assert gather == pytest.approx(7 * 10**9 / (450e9 * 0.75) * 1000 + 3 * 0.005)
    reduce = collective_ms("all_reduce", 8 * 10**9, ranks=8, device="H100")
    assert reduce == pytest.approx(2 * gather)
    assert collective_ms("all_gather", 10**9, ranks=1, device="H100") == 0


def test_beyond_a_node_the_network_is_the_link():
    near = collective_ms("all_gather", 10**9, ranks=8, device="H100")
    assert collective_ms("all_gather", 10**9, ranks=8, device="H100", stride=8) > 5 * near
    assert collective_ms("all_gather", 10**9, ranks=16, device="H100") > 5 * near


def test_measured_collectives_are_taken_where_there_are_any():
    points = (
        CollectivePoint(collective="all_gather", ranks=2, nbytes=1000, ms=1.0),
        CollectivePoint(collective="all_gather", ranks=2, nbytes=1_000_000, ms=2.0),
    )
    measured = profile(collectives=points)
    assert collective_ms("all_gather", 1_000_000, ranks=2, device=measured) == pytest.approx(2.0)
    # Below the smallest that was measured only latency is left.
    assert collective_ms("all_gather", 10, ranks=2, device=measured) == pytest.approx(1.0)
    assert collective_ms("all_gather", 4_000_000, ranks=2, device=measured) == pytest.approx(8.0)
    assert collective_ms("all_gather", 1000, ranks=4, device=measured) != pytest.approx(1.0)


def test_operators_are_told_apart_by_name():
    assert [class_of(f"aten.{name}.default") for name in ("addmm", "_softmax", "sum", "copy_", "silu", "add")] == [
        "matmul", "normalisation", "reduction", "copy", "transcendental", "pointwise",
    ]  # fmt: skip
    assert class_of("aten._scaled_dot_product_flash_attention_backward.default") == "attention_backward"
    assert collective_of("_c10d_functional.all_gather_into_tensor.default") == "all_gather"
    assert collective_of("c10d._reduce_scatter_base_.default") == "reduce_scatter"
    assert collective_of("_c10d_functional.wait_tensor.default") is None
    assert collective_of("aten.all.default") is None


def test_a_device_without_speeds_is_an_error_that_says_what_to_do():
    with pytest.raises(UserError, match="give a device profile"):
        op_ms(op(), Device("mine", "cuda"))
    with pytest.raises(UserError, match="there are"):
        op_ms(op(), "H1000000")
    assert all(math.isfinite(op_ms(op(flops=1, nbytes=1), device)) for device in DEVICES.values())
