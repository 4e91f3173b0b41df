"""Experiment ids."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest

from lowtide.errors import ConfigError
from lowtide.training.ids import agree_on_id, check_experiment_id, new_experiment_id
from lowtide.training.ranks import share_string

MOMENT = datetime(2026, 12, 1, 4, 15, 59, 999_999, tzinfo=UTC)


def test_an_id_is_utc_to_the_second_then_the_hash_then_a_random_part():
    made = new_experiment_id({"a": 1}, now=MOMENT)
    assert re.fullmatch(r"20261201-041559-[0-9a-f]{8}-[0-9a-f]{4}", made)
    elsewhere = MOMENT.astimezone(timezone(timedelta(hours=-9)))
    assert new_experiment_id({"a": 1}, now=elsewhere)[:24] == made[:24]
    assert check_experiment_id(made) == made


def test_ids_made_in_the_same_second_differ():
    assert len({new_experiment_id({}, now=MOMENT) for _ in range(50)}) > 45


def test_the_hash_is_of_content_and_not_of_the_order_of_keys():
    one = {"model": {"kind": "decoder", "layers": 4}, "run": {"seed": 1}}
    other = {"run": {"seed": 1}, "model": {"layers": 4, "kind": "decoder"}}
    assert _hash_in_id(one) == _hash_in_id(other)
    assert _hash_in_id(one) != _hash_in_id({**one, "run": {"seed": 2}})
    assert _hash_in_id({"a": [1, 2]}) != _hash_in_id({"a": [2, 1]})


def _hash_in_id(resolved: dict[str, object]) -> str:
    return new_experiment_id(resolved, now=MOMENT).split("-")[2]


@pytest.mark.parametrize("legal", ["a", "A-1_b.c", "20261201-041500-3fa91c07-9d2e", "_x", "x" * 128])
def test_legal_ids(legal):
    assert check_experiment_id(legal) == legal


@pytest.mark.parametrize(
    "illegal",
    [
        "",
        ".",
        "..",
        ".hidden",
        "-x",
        "a/b",
        "../a",
        "/etc",
        "a\\b",
        "a b",
        "a\n",
        "a\x00",
        "ä",
        "٣",
        "x" * 129,
        None,
        7,
    ],
)
def test_ids_that_would_leave_the_runs_folder_or_hide_in_it_are_refused(illegal):
    with pytest.raises(ConfigError, match="experiment id"):
        check_experiment_id(illegal)


def test_one_process_without_a_group_shares_with_itself():
    assert share_string("täxt \ud800 😀") == "täxt \ud800 😀"
    assert share_string("") == ""
    assert agree_on_id({}, experiment_id="mine") == "mine"
    with pytest.raises(ConfigError):
        agree_on_id({}, experiment_id="../mine")
