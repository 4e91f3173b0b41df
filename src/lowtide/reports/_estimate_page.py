"""One page for an estimate: live bytes by category over the step, and what is on top at the peak.

SVG text and tables of our own; nothing is loaded, all text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from lowtide.records import CATEGORIES, Estimate, TimelinePoint
from lowtide.units import format_bytes

__all__ = ["estimate_page", "write_estimate_page"]

_WIDTH, _HEIGHT = 1000, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 16, 24, 28
_COLOURS = ("#4c6a92", "#8fb0d3", "#7d9d6a", "#c9a24b", "#c0563b", "#d9a28f", "#8d7aa8", "#6f6f6f")
_STYLE = """
body{font:14px/1.5 sans-serif;color:#222;max-width:1040px;margin:2em auto;padding:0 1em}
svg{width:100%;height:auto} text{font:12px sans-serif;fill:#333} line{stroke:#ddd}
.peak{stroke:#a00;stroke-dasharray:4 3}
table{border-collapse:collapse;margin:1em 0} th,td{padding:.15em .8em;text-align:right;border-bottom:1px solid #ddd}
th:last-child,td:last-child,th.l,td.l{text-align:left} .k{display:inline-block;width:.8em;height:.8em;margin-right:.5em}
"""


def write_estimate_page(estimate: Estimate, path: Path, *, title: str) -> None:
    """Write the page of one estimate; ``title`` names what was estimated."""
    path.write_text(estimate_page(estimate, title=title), encoding="utf-8")


def estimate_page(estimate: Estimate, *, title: str) -> str:
    """Return the page as text."""
    place = " ".join(filter(None, (estimate.peak_module, estimate.peak_op)))
    facts = (
        f"{estimate.device}, rank {estimate.rank} of {estimate.world_size}, policy {estimate.policy}: peak "
        f"{format_bytes(estimate.peak_bytes)} in {estimate.peak_phase}, at {place or 'its start'} ({estimate.method})"
    )
    if estimate.step_ms is not None:
        facts += f"; step {estimate.step_ms:,.1f} ms"
    taken = "".join(f"<li>{escape(text)}</li>" for text in estimate.assumptions)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{escape(facts)}</p>"
        f"{_plot(estimate)}{_categories(estimate)}{_on_top(estimate)}"
        f"<h2>Taken for granted</h2><ul>{taken}</ul></body></html>\n"
    )


def _plot(estimate: Estimate) -> str:
    points = estimate.timeline
    if not points:
        return "<p>No timeline was recorded.</p>"
    width = (_WIDTH - _LEFT - _RIGHT) / len(points)
    scale = (_HEIGHT - _TOP - _BOTTOM) / max(1, estimate.peak_bytes)

    def x(place: float) -> float:
        return round(_LEFT + place * width, 1)

    def y(nbytes: float) -> float:
        return round(_HEIGHT - _BOTTOM - nbytes * scale, 1)

    parts = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(nbytes)}" y2="{y(nbytes)}"/>'
        f'<text x="{_LEFT - 8}" y="{y(nbytes) + 4}" text-anchor="end">{escape(format_bytes(int(nbytes)))}</text>'
        for nbytes in (estimate.peak_bytes * share / 4 for share in range(5))
    ]
    below = [0] * len(points)
    for name, colour in zip(CATEGORIES, _COLOURS, strict=True):
        above = [low + point.live.as_dict()[name] for low, point in zip(below, points, strict=True)]
        if above != below:
            edge = [f"{x(i)},{y(v)} {x(i + 1)},{y(v)}" for i, v in enumerate(above)]
            back = [f"{x(i + 1)},{y(v)} {x(i)},{y(v)}" for i, v in reversed(list(enumerate(below)))]
            parts.append(f'<polygon fill="{colour}" points="{" ".join([*edge, *back])}"/>')
        below = above
    top = max(range(len(points)), key=lambda i: points[i].live.total)
    middle = x(top + 0.5)
    parts.append(f'<line class="peak" x1="{middle}" x2="{middle}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    parts += _phases(points, x)
    parts += [
        f'<rect x="{x(i)}" y="{_TOP}" width="{round(width, 2)}" height="{_HEIGHT - _TOP - _BOTTOM}" fill-opacity="0">'
        f"<title>{escape(_said(point))}</title></rect>"
        for i, point in enumerate(points)
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _phases(points: Sequence[TimelinePoint], x: Callable[[float], float]) -> list[str]:
    found: list[str] = []
    for i, point in enumerate(points):
        if i == 0 or points[i - 1].phase != point.phase:
            found.append(
                f'<line x1="{x(i)}" x2="{x(i)}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
                f'<text x="{x(i)}" y="{_HEIGHT - 8}">{escape(point.phase)}</text>'
            )
    return found


def _said(point: TimelinePoint) -> str:
    largest = sorted(point.live.as_dict().items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(nbytes)}" for name, nbytes in largest if nbytes)
    where = " ".join(filter(None, (point.module, point.op)))
    return f"{point.phase}: {format_bytes(point.live.total)} after {where}\n{parts}"


def _categories(estimate: Estimate) -> str:
    most = estimate.category_peaks.as_dict()
    rows = "".join(
        f'<tr><td class="l"><span class="k" style="background:{colour}"></span>{escape(name.replace("_", " "))}</td>'
        f"<td>{format_bytes(nbytes)}</td><td>{format_bytes(most[name])}</td></tr>"
        for (name, nbytes), colour in zip(estimate.at_peak.as_dict().items(), _COLOURS, strict=True)
    )
    return f'<table><tr><th class="l"></th><th>at the peak</th><th>at most</th></tr>{rows}</table>'


def _on_top(estimate: Estimate) -> str:
    rows = "".join(
        f"<tr><td>{format_bytes(row.nbytes)}</td><td>{row.count}</td><td class='l'>"
        f"{escape(row.category.replace('_', ' '))}</td><td>{escape(row.module)}</td><td>{escape(row.op)}</td></tr>"
        for row in estimate.alive_at_peak
    )
    if not rows:
        return ""
    head = "<tr><th>bytes</th><th>tensors</th><th class='l'>for</th><th>module</th><th>operator</th></tr>"
    return f"<h2>Alive at the peak</h2><table>{head}{rows}</table>"
