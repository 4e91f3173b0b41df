"""Bytes as people write them: ``80GiB`` in, ``79.43 GiB`` out.

Binary units (KiB, MiB, GiB, ...) are powers of 1024, decimal ones (kB, MB, GB, ...) powers of 1000, as in IEC
80000-13. A bare ``80G`` is refused, because half of the tools mean one and half the other, and the difference
at 80 is 6 GB of a device.
"""

from __future__ import annotations

import re
from decimal import Decimal

from lowtide.errors import UserError, nearest

__all__ = ["format_bytes", "parse_bytes"]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_FACTORS = {
    name.lower(): base**i for base, names in ((1000, _DECIMAL), (1024, _BINARY)) for i, name in enumerate(names)
}
_TEXT = re.compile(r"\s*(?P<number>\d{1,30}(?:\.\d{1,30})?)\s*(?P<unit>[A-Za-z]{0,12})\s*", re.ASCII)
_LEGAL = "write a number and a unit, such as 80GiB, 1.5 GiB, 512MiB or 80GB"


def format_bytes(count: int | float) -> str:
    """Write a number of bytes with two decimals and a binary unit; whole bytes below 1 KiB."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    value = float(count)
    for unit in _BINARY[1:]:
        value /= 1024
        # The rounding is part of the test, so that 1048575 reads 1.00 MiB and never 1024.00 KiB.
        if round(abs(value), 2) < 1024 or unit == _BINARY[-1]:
            return f"{value:.2f} {unit}"
    raise AssertionError("the last unit has no upper end")


def parse_bytes(text: str | int) -> int:
    """Read a number of bytes; a fraction of a byte is dropped. A whole number is taken as bytes.

    Raises:
        UserError: no number, no unit that is known, or nothing above zero.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise UserError(f"{text!r} is not a number of bytes: {_LEGAL}")
    if isinstance(text, int):
        return _above_zero(text, str(text))
    found = _TEXT.fullmatch(text)
    if found is None:
        raise UserError(f"{text!r} is not a number of bytes: {_LEGAL}")
    unit = found["unit"]
    if unit.lower() not in _FACTORS and unit:
        raise UserError(_unknown_unit(text, found["number"], unit))
    if not unit and "." in found["number"]:
        raise UserError(f"{text!r} is a fraction without a unit: {_LEGAL}")
    return _above_zero(int(Decimal(found["number"]) * _FACTORS[unit.lower() or "b"]), text)


def _above_zero(count: int, text: str) -> int:
    if count < 1:
        raise UserError(f"{text!r} is not a number of bytes: it must be at least 1 byte")
    return count


def _unknown_unit(text: str, number: str, unit: str) -> str:
    letter = unit[0].upper()
    if len(unit) == 1 and letter in "KMGTP":
        return (
            f"{text!r} can be read in two ways: write {number}{letter}iB (powers of 1024) or {number}{letter}B (1000)"
        )
    units = [*_BINARY, *_DECIMAL[1:]]
    near = nearest(unit, units, count=1)
    hint = f" Did you mean {number}{near[0]}?" if near else ""
    return f"{text!r}: {unit!r} is not a unit of bytes. Units: {', '.join(units)}.{hint}"
