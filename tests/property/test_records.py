"""Records survive JSON, and say clearly what is wrong with what they cannot read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lowtide.errors import InputError
from lowtide.records import (
    CATEGORIES,
    AliveRow,
    CategoryBytes,
    Environment,
    Estimate,
    OpRecord,
    OpTrace,
    StepTime,
    StorageRecord,
    TensorRecord,
    TimelinePoint,
)

ENVIRONMENT = Environment(torch="2.13.0", python="3.11", lowtide="0.1.0")
names = st.text(max_size=12)
sizes = st.integers(0, 2**50)
categories = st.builds(CategoryBytes, **dict.fromkeys(CATEGORIES, sizes))
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


times = st.builds(
    StepTime,
    **dict.fromkeys(["step_ms", "forward_ms", "backward_ms", "optimizer_ms"], st.floats(0, 1e9)),
    tokens_per_s=st.none() | st.floats(0, 1e9),
    model_flops=sizes,
    hardware_flops=sizes,
    mfu=st.none() | st.floats(0, 1),
)


def _tensors(count: int) -> st.SearchStrategy[tuple[TensorRecord, ...]]:
    ids = st.none() if count == 0 else st.none() | st.integers(0, count - 1)
    one = st.builds(TensorRecord, storage=ids, shape=shapes, stride=shapes, offset=sizes, dtype=names)
    return st.lists(one, max_size=3).map(tuple)


@st.composite
def traces(draw: st.DrawFn) -> OpTrace:
    count = draw(st.integers(0, 4))
    storages = tuple(
        draw(
            st.builds(
                StorageRecord,
                id=st.just(i),
                nbytes=sizes,
                role=st.sampled_from(["parameter", "buffer", "argument", "constant", "made"]),
                name=st.none() | names,
                made_by=st.none() | st.integers(0, 5),
                last_use=st.none() | st.integers(0, 5),
                saved=st.booleans(),
                returned=st.booleans(),
                backward=st.booleans(),
            )
        )
        for i in range(count)
    )
    ops = tuple(
        draw(
            st.builds(
                OpRecord,
                index=st.just(i),
                op=names,
                phase=st.sampled_from(["forward", "backward"]),
                module=names,
                inputs=_tensors(count),
                outputs=_tensors(count),
                literals=names,
                view=st.booleans(),
                random=st.booleans(),
                flops=st.none() | sizes,
                bytes_moved=sizes,
            )
        )
        for i in range(draw(st.integers(0, 4)))
    )
    return OpTrace(
        block=draw(names),
        device="cpu",
        ops=ops,
        storages=storages,
        saved=draw(_tensors(count)),
        environment=ENVIRONMENT,
    )


points = st.builds(TimelinePoint, event=sizes, phase=st.just("forward"), module=names, op=names, live=categories)
rows = st.builds(
    AliveRow, category=st.sampled_from(CATEGORIES), module=names, op=names, nbytes=sizes, count=st.integers(1, 9)
)


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    at_peak = draw(categories)
    return Estimate(
        peak_bytes=at_peak.total,
        at_peak=at_peak,
        peak_phase=draw(st.sampled_from(["forward", "backward", "optimizer"])),
        peak_module=draw(names),
        peak_op=draw(names),
        category_peaks=draw(categories),
        alive_at_peak=tuple(draw(st.lists(rows, max_size=3))),
        timeline=tuple(draw(st.lists(points, max_size=3))),
        method="fake step",
        device="cpu",
        world_size=8,
        rank=3,
        time=draw(st.none() | times),
        assumptions=tuple(draw(st.lists(names, max_size=2))),
        environment=ENVIRONMENT,
    )


@given(traces())
def test_a_trace_survives_json(trace):
    again = OpTrace.from_json(trace.to_json())
    assert again == trace
    assert again.to_json() == trace.to_json()


@given(estimates())
def test_an_estimate_survives_json_and_adds_up(estimate):
    assert Estimate.from_json(estimate.to_json()) == estimate
    assert sum(estimate.at_peak.as_dict().values()) == estimate.peak_bytes
    assert list(estimate.at_peak.as_dict()) == list(CATEGORIES)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"kind": "Estimate"}, "kind"),
        ({"extra": 1}, "extra"),
        ({"ops": None}, "ops"),
        ({"saved": [{"storage": 0, "shape": [], "stride": [], "dtype": "float32"}]}, "names storage 0"),
        ({"storages": [{"id": 1, "nbytes": 4, "role": "made"}]}, "numbered"),
        ({"storages": [{"id": 0, "nbytes": "4", "role": "made"}]}, "nbytes"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(change, says):
    document = json.loads(OpTrace(block="B", device="cpu", ops=(), storages=(), environment=ENVIRONMENT).to_json())
    with pytest.raises(InputError, match=says):
        OpTrace.from_json(json.dumps(document | change))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"step_ms": NaN}'])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(InputError, match="Estimate"):
        Estimate.from_json(text)


def test_categories_that_do_not_add_up_are_refused():
    with pytest.raises(ValidationError, match="add up to 5"):
        Estimate(
            peak_bytes=6,
            at_peak=CategoryBytes(parameters=2, transient=3),
            peak_phase="forward",
            peak_module="",
            peak_op="",
            category_peaks=CategoryBytes(),
            method="fake step",
            device="cpu",
            world_size=1,
            rank=0,
            environment=ENVIRONMENT,
        )


def test_records_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        ENVIRONMENT.torch = "3"  # type: ignore[misc]


def test_saved_bytes_count_each_storage_once_and_only_what_forward_made():
    def storage(i: int, **fields: object) -> StorageRecord:
        return StorageRecord.model_validate({"id": i, "nbytes": 10**i, "role": "made", **fields})

    trace = OpTrace(
        block="B",
        device="cpu",
        ops=(),
        storages=(
            storage(0, saved=True),
            storage(1),
            storage(2, role="argument", saved=True),
            storage(3, role="parameter", saved=True),
            storage(4, saved=True, backward=True),
        ),
        saved=(TensorRecord(storage=0, shape=(1,), stride=(1,), dtype="int8"),) * 2,
        environment=ENVIRONMENT,
    )
    assert (trace.saved_bytes, trace.input_bytes) == (1, 100)
