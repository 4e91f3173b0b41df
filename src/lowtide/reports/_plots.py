"""Plots as SVG text of our own: a few kilobytes each, no library, nothing to load. Every text in them is escaped.

frontier    peak against speed; the cells that nothing beats in both are marked
prediction  predicted against measured peak; on the line they are equal
timeline    live bytes over one step, by phase
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lowtide.errors import InputError
from lowtide.run_record import Predicted, RunRecord
from lowtide.units import format_bytes

__all__ = ["frontier_of", "plot_frontier", "plot_prediction", "plot_timeline", "to_png"]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 88, 16, 28, 48
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.t{font-weight:bold}.g{stroke:#ddd}.a{stroke:#888}.p{fill:#4878a8}"
    ".f{fill:#c0392b}.l{stroke:#c0392b;fill:none}.d{stroke:#888;stroke-dasharray:4 3}"
    ".forward{fill:#4878a8}.backward{fill:#d98c3f}.optimizer{fill:#6a9c5b}"
)


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return where a value lies, in pixels."""
        span = (self.high - self.low) or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1)

    def ticks(self, step: float) -> list[float]:
        """Return the multiples of a step that lie on the axis."""
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def frontier_of(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs that no other beats in one of peak and speed without losing in the other, by peak."""
    known = [(p, s, r) for r in records if (p := _peak(r)) is not None and (s := _speed(r)) is not None]
    best: list[RunRecord] = []
    fastest = -math.inf
    for _, speed, record in sorted(known, key=lambda entry: (entry[0], -entry[1])):
        if speed > fastest:
            best.append(record)
            fastest = speed
    return best


def plot_frontier(records: Sequence[RunRecord]) -> str:
    """Plot peak bytes against tokens a second for every run that has both."""
    known = [(p, s, r) for r in records if (p := _peak(r)) is not None and (s := _speed(r)) is not None]
    if not known:
        return _empty("Peak against speed", "no run has both numbers")
    across = _axis([p for p, _, _ in known], _LEFT, _WIDTH - _RIGHT)
    up = _axis([s for _, s, _ in known], _HEIGHT - _BOTTOM, _TOP)
    best = frontier_of(records)
    marked = {id(record) for record in best}
    parts = [*_bytes_across(across), *_numbers_up(up, "tokens/s")]
    line = " ".join(f"{across.at(_peak(r) or 0)},{up.at(_speed(r) or 0)}" for r in best)
    parts.append(f'<polyline class="l" points="{line}"/>')
    # The frontier last, so that it is drawn on top.
    for peak, speed, record in sorted(known, key=lambda entry: id(entry[2]) in marked):
        said = f"{record.label}: {format_bytes(peak)}, {speed:,.1f} tokens/s"
        parts.append(_dot(across.at(peak), up.at(speed), record, said, "f" if id(record) in marked else "p"))
    return _svg("Peak against speed", "peak bytes", parts)


def plot_prediction(records: Sequence[RunRecord]) -> str:
    """Plot the predicted against the measured peak of every run that has both."""
    known = [(r.predicted.peak_bytes, p, r) for r in records if r.predicted and (p := _peak(r)) is not None]
    if not known:
        return _empty("Predicted against measured peak", "no run has both numbers")
    values = [value for guess, peak, _ in known for value in (guess, peak)]
    across, up = _axis(values, _LEFT, _WIDTH - _RIGHT), _axis(values, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_bytes_across(across), *_bytes_up(up)]
    low, high = across.low, across.high
    parts.append(f'<line class="d" x1="{across.at(low)}" y1="{up.at(low)}" x2="{across.at(high)}" y2="{up.at(high)}"/>')
    for guess, peak, record in known:
        said = f"{record.label}: predicted {format_bytes(guess)}, measured {format_bytes(peak)}"
        parts.append(_dot(across.at(guess), up.at(peak), record, said, "p"))
    return _svg("Predicted against measured peak", "predicted peak bytes", parts)


def plot_timeline(predicted: Predicted, *, title: str) -> str:
    """Plot live bytes over one step, as they were predicted."""
    points = predicted.timeline
    if not points:
        return _empty(title, "no timeline was recorded")
    across = _Axis(0, len(points), _LEFT, _WIDTH - _RIGHT)
    up = _axis([0, *(nbytes for _, nbytes in points)], _HEIGHT - _BOTTOM, _TOP)
    parts = _bytes_up(up)
    width = max(0.5, round(across.at(1) - across.at(0), 2))
    floor = up.at(0)
    for index, (phase, nbytes) in enumerate(points):
        kind = phase if phase in ("forward", "backward", "optimizer") else "p"
        y = up.at(nbytes)
        said = escape(f"{phase}: {format_bytes(nbytes)}")
        parts.append(
            f'<rect class="{kind}" x="{across.at(index)}" y="{y}" width="{width}" height="{round(floor - y, 1)}">'
            f"<title>{said}</title></rect>"
        )
    return _svg(title, "forward, backward, optimizer: operator by operator", parts)


def to_png(svg: str) -> bytes:
    """Return a plot as PNG, twice as large.

    Raises:
        InputError: vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise InputError("PNG needs vl-convert-python: pip install 'lowtide[plots]' (SVG needs nothing)") from None
    return bytes(vl_convert.svg_to_png(svg, scale=2))


def _peak(record: RunRecord) -> int | None:
    return None if record.result is None else record.result.peak_bytes


def _speed(record: RunRecord) -> float | None:
    return None if record.result is None else record.result.tokens_per_s


def _axis(values: Sequence[float], start: float, end: float) -> _Axis:
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return _Axis(max(0.0, low - room) if low >= 0 else low - room, high + room, start, end)


def _nice(span: float) -> float:
    raw = span / 5 or 1.0
    unit = 10 ** math.floor(math.log10(raw))
    return next(unit * n for n in (1, 2, 5, 10) if unit * n >= raw)


def _nice_bytes(span: float) -> float:
    raw = max(1.0, span / 5)
    unit = 1024 ** int(math.log(raw, 1024))
    return unit * 2 ** math.ceil(math.log2(raw / unit)) if raw > unit else unit


def _bytes_across(axis: _Axis) -> list[str]:
    parts: list[str] = []
    for value in axis.ticks(_nice_bytes(axis.high - axis.low)):
        x = axis.at(value)
        parts.append(f'<line class="g" x1="{x}" y1="{_TOP}" x2="{x}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(
            f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{format_bytes(int(value))}</text>'
        )
    return parts


def _bytes_up(axis: _Axis) -> list[str]:
    return _up(axis, [(v, format_bytes(int(v))) for v in axis.ticks(_nice_bytes(axis.high - axis.low))])


def _numbers_up(axis: _Axis, unit: str) -> list[str]:
    step = _nice(axis.high - axis.low)
    named = [f'<text x="{_LEFT - 80}" y="{_TOP - 8}">{escape(unit)}</text>']
    return named + _up(axis, [(v, f"{v:,.10g}") for v in axis.ticks(step)])


def _up(axis: _Axis, ticks: Sequence[tuple[float, str]]) -> list[str]:
    parts: list[str] = []
    for value, text in ticks:
        y = axis.at(value)
        parts.append(f'<line class="g" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{escape(text)}</text>')
    return parts


def _dot(x: float, y: float, record: RunRecord, said: str, kind: str) -> str:
    named = f'data-id="{escape(record.id)}"><title>{escape(said)}</title>'
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="4" {named}</circle>'


def _svg(title: str, below: str, parts: Sequence[str]) -> str:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img"><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="t" x="{_LEFT}" y="14">{escape(title)}</text>'
        + "".join(parts)
        + f'<line class="a" x1="{_LEFT}" y1="{_HEIGHT - _BOTTOM}" x2="{_WIDTH - _RIGHT}" y2="{_HEIGHT - _BOTTOM}"/>'
        + f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(below)}</text></svg>'
    )


def _empty(title: str, why: str) -> str:
    return _svg(title, "", [f'<text x="{_LEFT}" y="{_HEIGHT / 2}">{escape(why)}</text>'])
