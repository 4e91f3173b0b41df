"""Many FQNs in a few patterns, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["patterns_of"]


def patterns_of(names: Sequence[str]) -> tuple[str, ...]:
    """Write names as patterns of policies: ``model.layers.{0-3,7}`` for five of them. Each matches whole names."""
    groups: dict[tuple[str, str], list[int]] = {}
    plain: list[str] = []
    for name in names:
        parts = name.split(".")
        place = next((i for i in reversed(range(len(parts))) if parts[i].isdecimal()), None)
        if place is None or str(int(parts[place])) != parts[place]:
            plain.append(name)
            continue
        key = (".".join(parts[:place]), ".".join(parts[place + 1 :]))
        groups.setdefault(key, []).append(int(parts[place]))
    found = [".".join(filter(None, (before, _ranges(numbers), after))) for (before, after), numbers in groups.items()]
    return (*found, *plain)


def _ranges(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return str(spans[0][0])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "}"
