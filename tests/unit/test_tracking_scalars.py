"""Any value that people log becomes a plain one."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.training.tracking.scalars import Unread, as_number, plain, strict


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (3, 3),
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array(1.5), 1.5),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(1.5, dtype=torch.float16), 1.5),
        (torch.tensor([2.5], requires_grad=True), 2.5),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (torch.nn.Parameter(torch.tensor(0.5)), 0.5),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        (torch.tensor([]), []),
        ((1, np.float32(2)), [1, 2.0]),
        ({"a": torch.tensor(1), 2: "b"}, {"a": 1, "2": "b"}),
        (Path("a/b"), "a/b"),
        (None, None),
    ],
    ids=repr,
)
def test_values_are_read(value, expected):
    read = plain(value)
    assert read == expected
    assert type(read) is type(expected)
    json.dumps(read, allow_nan=False)


def test_what_is_too_large_or_broken_is_unread_and_says_why():
    class Broken:
        def tolist(self) -> list[int]:
            raise RuntimeError("device is gone")

    assert "5000 elements" in plain(torch.zeros(5000)).reason
    assert "device is gone" in plain(Broken()).reason
    assert strict({"x": Broken()}) == ({"x": None}, {"x": plain(Broken()).reason})


def test_a_meta_tensor_is_unread():
    assert isinstance(plain(torch.zeros((), device="meta")), Unread)


def test_numbers():
    assert as_number(torch.tensor(2, dtype=torch.bfloat16)) == 2.0
    assert as_number("2") is None
    assert as_number(torch.zeros(2)) is None
    assert as_number(float("inf")) == float("inf")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text()
    | st.decimals()
    | st.fractions(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_everything_is_strict_json_and_finite_values_survive(value):
    body, flags = strict({"value": value})
    again = json.loads(json.dumps(body, allow_nan=False))
    assert again == body
    if isinstance(value, int | str) and not isinstance(value, Decimal | Fraction):
        assert (again["value"], flags) == (value, {})


def _dtensors() -> list[object]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = DTensor.from_local(torch.tensor(1.5), mesh, [Replicate()])
    partial = DTensor.from_local(torch.tensor(1.5), mesh, [Partial()])
    sharded = DTensor.from_local(torch.ones(1), mesh, [Shard(0)])
    if dist.get_rank() != 0:
        return []  # only rank 0 logs: reading must need no other rank
    return [plain(each) for each in (whole, partial, sharded)]


def test_a_dtensor_is_read_without_the_other_ranks_or_says_that_it_cannot(run_on):
    whole, partial, sharded = run_on(2, _dtensors)[0]
    assert whole == 1.5
    assert "full_tensor()" in partial.reason
    assert "full_tensor()" in sharded.reason
    assert run_on(1, _dtensors)[0] == [1.5, 1.5, 1.0]
