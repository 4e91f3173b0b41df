"""Bytes in and out of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import UserError
from lowtide.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * 1024**3),
        ("80 GiB", 80 * 1024**3),
        (" 80gib ", 80 * 1024**3),
        ("80GB", 80 * 1000**3),
        ("1.5 KiB", 1536),
        ("0.5kB", 500),
        ("1.0001KiB", 1024),
        ("512", 512),
        ("7 B", 7),
        ("2PiB", 2 * 1024**5),
        (4096, 4096),
    ],
)
def test_parse(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("80G", r"write 80GiB \(powers of 1024\) or 80GB \(1000\)"),
        ("80GiBB", r"Did you mean 80GiB\?"),
        ("80 parsecs", "Units: B, KiB"),
        ("", "write a number and a unit"),
        ("-1GiB", "write a number and a unit"),
        ("nan", "write a number and a unit"),
        ("1e9", "write a number and a unit"),
        ("0 GiB", "at least 1 byte"),
        ("0.4 B", "at least 1 byte"),
        ("1.5", "a fraction without a unit"),
        ("٣GiB", "write a number and a unit"),
        (0, "at least 1 byte"),
        (True, "not a number of bytes"),
        (1.5, "not a number of bytes"),
    ],
)
def test_parse_refuses(text: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (1536, "1.50 KiB"),
        (-1536, "-1.50 KiB"),
        (80 * 1024**3, "80.00 GiB"),
        (3000 * 1024**5, "3000.00 PiB"),
    ],
)
def test_format(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1, 2**60))
def test_what_is_formatted_parses_back_within_its_rounding(count: int) -> None:
    back = parse_bytes(format_bytes(count))
    assert back == count if count < 1024 else abs(back - count) <= 0.005 * count


@given(st.integers(1, 2**40), st.sampled_from(["B", "KiB", "MiB", "GiB", "kB", "MB", "GB"]), st.sampled_from(["", " "]))
def test_whole_numbers_are_exact(number: int, unit: str, space: str) -> None:
    factor = (1024 if "i" in unit else 1000) ** " KMG".index(unit[0].upper()) if unit != "B" else 1
    assert parse_bytes(f"{number}{space}{unit}") == number * factor


@given(st.integers(1, 2**60), st.integers(1, 2**60))
def test_more_bytes_never_read_as_less(first: int, second: int) -> None:
    low, high = sorted((first, second))
    assert parse_bytes(format_bytes(low)) <= parse_bytes(format_bytes(high))
