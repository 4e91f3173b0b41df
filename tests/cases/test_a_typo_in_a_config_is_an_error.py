"""Field case 32 (the config's part): a key or kind that does not exist is an error with the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.configs import MINIMAL, complaint, read


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("polcy: {kind: full}", "policy"),
        ("policy: {kind: ful}", "full"),
        ("policy: {kind: selective_ops, save: [sdpa]}", "selective_op"),
        ("policy: {kind: full, layer: 'model.layers.*'}", "layers"),
        ("policy: {kind: full, alow_inexact: true}", "allow_inexact"),
        ("policy: {kind: every_nth_layer, n: 2, layrs: x}", "layers"),
        ("policy: {kind: selective_op, sav: [sdpa]}", "save"),
        ("policy: {kind: selective_op, save: [{op: sdpa, kep: 1/2}]}", "keep"),
        ("sharding: {kind: fsdp2, reshard_after_foward: true}", "reshard_after_forward"),
        ("evaluation: {evry: 3}", "every"),
        ("optimizer: {kind: adam}", "adamw"),
    ],
)
def test_it_names_the_line_and_the_nearest(tmp_path: Path, wrong: str, nearest: str) -> None:
    said = complaint(tmp_path, MINIMAL + wrong + "\n")
    assert f"Did you mean {nearest!r}?" in said
    assert "train.yaml:3: " in said


@pytest.mark.parametrize("empty", ["policy: {}", "policy: {n: 2}", "policy: full", "policy: [full]", "policy:"])
def test_no_policy_is_never_guessed(tmp_path: Path, empty: str) -> None:
    said = complaint(tmp_path, MINIMAL + empty + "\n")
    assert "none, full, every_nth_layer, some_layers, selective_op" in said
    assert "train.yaml:3: policy" in said


def test_an_override_is_no_back_door(tmp_path: Path) -> None:
    said = complaint(tmp_path, MINIMAL, "policy.knd=full")
    assert said.startswith("--set policy.knd=full: policy.kind: is required; legal: none, full")
    assert read(tmp_path, MINIMAL, "policy.kind=full").config.policy.kind == "full"
