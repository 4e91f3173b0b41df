"""Field case 18 (the config's part): ``n`` given as something else fails with what is legal.

That index 0 counts, and that the choice depends on nothing but the index, is tested where policies are resolved.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.configs import MINIMAL, complaint, read


@pytest.mark.parametrize("n", ["0", "-1", "two", "1.5", "true", "null", "[2]", "1/2", ".inf", "''"])
def test_what_is_no_count_is_refused(tmp_path: Path, n: str) -> None:
    said = complaint(tmp_path, MINIMAL + f"policy:\n  kind: every_nth_layer\n  n: {n}\n")
    assert said.startswith("train.yaml:5: policy.n: got ")
    assert "legal: a whole number, at least 1" in said


def test_n_is_required(tmp_path: Path) -> None:
    said = complaint(tmp_path, MINIMAL + "policy: {kind: every_nth_layer}\n")
    assert said == "train.yaml:3: policy.n: is required; legal: a whole number, at least 1"


@pytest.mark.parametrize("n", ["2", "'2'"])
def test_a_count_is_read(tmp_path: Path, n: str) -> None:
    config = read(tmp_path, MINIMAL + f"policy: {{kind: every_nth_layer, n: {n}}}\n").config
    assert config.policy.n == 2
    assert type(config.policy.n) is int
