"""``lowtide calibrate``: what it measures is complete and goes into a file; its speeds are not tested."""

from __future__ import annotations

import json

import pytest
import torch

from lowtide.cli import run
from lowtide.errors import UserError
from lowtide.measurement import _calibrate, calibrate
from lowtide.prediction import match_device, op_ms, read_profile
from tests.unit.test_prediction_time import op


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The smallest size of each kind, once."""
    monkeypatch.setattr(_calibrate, "_LONGEST_S", 0.0)
    monkeypatch.setattr(_calibrate, "_REPEATS", 1)
    monkeypatch.setattr(_calibrate, "_CHAIN", 5)


def test_every_class_is_measured_in_both_types():
    profile = calibrate("cpu")
    measured = {(p.operators, p.dtype) for p in profile.rates}
    kinds = ("matmul", "attention", "attention_backward", "pointwise", "transcendental", "reduction", "normalisation",
             "copy")  # fmt: skip
    assert measured == {(kind, dtype) for kind in kinds for dtype in ("float32", "bfloat16")}
    assert (profile.device, profile.kernels, profile.threads) == ("cpu", "cpu", torch.get_num_threads())
    assert profile.collectives == ()
    assert op_ms(op(flops=10**9, dtype="float32"), profile) > 0


def test_the_file_is_a_profile_and_json_says_the_same(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assert run(["calibrate", "--device", "cpu", "--out", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("path") == str(path)
    assert read_profile(path).model_dump(mode="json") == told
    assert run(["calibrate", "--device", "cpu", "--out", str(path)]) == 0
    assert f"lowtide estimate --profile {path}" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(UserError, match="torch sees no GPU"):
        calibrate("cuda")


def test_drivers_names_are_found_in_the_table():
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA A100-SXM4-40GB": "A100-40GB",
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA L40S": "L40S",
        "NVIDIA GeForce RTX 4090": "RTX4090",
        "AMD Instinct MI300X": "MI300X",
        "Tesla T4": None,
    }
    assert {name: match_device(name) for name in names} == names
