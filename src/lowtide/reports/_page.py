"""One page that shows a folder of runs, from one file, without a network.

Everything is in the file: data as JSON, plots as SVG, a script and a style of our own. What comes from runs is a
stranger's input. It gets into the page in two ways, escaped into SVG and JSON, and the script puts it into the document
as text alone; and the page's content policy allows nothing to be loaded and no script but the one whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from lowtide.reports._load import Found
from lowtide.reports._plots import plot_frontier, plot_prediction
from lowtide.reports._tables import rows_of
from lowtide.run_record import RunRecord

__all__ = ["write_page"]

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("label", "cell", "text"),
    ("status", "status", "text"),
    ("peak_bytes", "peak", "bytes"),
    ("predicted_peak_bytes", "predicted", "bytes"),
    ("tokens_per_s", "tokens/s", "number"),
    ("mfu", "MFU", "number"),
    ("hfu", "HFU", "number"),
    ("loss_last", "last loss", "number"),
    ("loss_held_out", "held-out loss", "number"),
    ("saved_bytes", "saved", "bytes"),
    ("world_size", "ranks", "number"),
    ("wall_s", "seconds", "number"),
    ("sweep", "sweep", "text"),
    ("reason", "reason", "text"),
)
_ALWAYS = ("label", "status", "peak_bytes", "tokens_per_s")
_MANY = 200
_POINTS, _POINTS_OF_MANY = 150, 40
_MOST_TEXT = 2000


def write_page(found: Found, *, title: str) -> str:
    """Return the page as HTML."""
    rows = rows_of(found)
    columns = [c for c in _COLUMNS if c[0] in _ALWAYS or any(row[c[0]] is not None for row in rows)]
    columns += (
        [(n, n.removeprefix("config."), _kind(rows, n)) for n in rows[0] if n.startswith("config.")] if rows else []
    )
    points = _POINTS_OF_MANY if len(rows) > _MANY else _POINTS
    data = {
        "columns": [{"name": name, "title": head, "kind": kind} for name, head, kind in columns],
        "rows": [[_shorter(row[name]) for name, _, _ in columns] for row in rows],
        "cells": [_cell(record, points, i) for i, record in enumerate(found.records)],
    }
    script = _resource("_page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    )
    return _PAGE.format(
        policy=escape(policy, quote=True),
        title=escape(title),
        style=_resource("_page.css"),
        summary=escape(_summary(found)),
        notes="".join(f"<p>{escape(note)}</p>" for note in _notes(found)),
        plots=plot_frontier(_named(found.records)) + plot_prediction(_named(found.records)),
        data=_json(data),
        script=script,
    )


def _named(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Give every record an id of its own: those of several sweeps may be the same."""
    return [record.model_copy(update={"id": _id(record, index)}) for index, record in enumerate(records)]


def _id(record: RunRecord, index: int) -> str:
    return f"{index}:{record.id}"


def _cell(record: RunRecord, points: int, index: int) -> dict[str, Any]:
    result = record.result
    timeline = () if record.predicted is None else record.predicted.timeline
    return {
        "id": _id(record, index),
        "label": record.label,
        "status": record.status,
        "reason": _shorter(record.reason),
        "settings": [[name, json.dumps(value, default=str)] for name, value in record.settings.items()],
        "peaks": [] if result is None else [[p.rank, p.peak_bytes, p.method, p.note] for p in result.peaks],
        "timeline": _thin(timeline, points),
        "operators": [
            [op.op, op.module, op.phase, op.calls, op.time_ms, op.allocated_bytes] for op in record.operators[:50]
        ],
        "attempts": [[a.status, a.wall_s, a.exit_code, _shorter(a.reason)] for a in record.attempts],
    }


def _thin(points: Sequence[tuple[str, int]], most: int) -> list[tuple[str, int]]:
    """Keep the highest point of each stretch, so that the peak stays."""
    size = max(1, -(-len(points) // most))
    return [max(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size)]


def _kind(rows: Sequence[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    return (
        "number" if values and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values) else "text"
    )


def _shorter(value: Any) -> Any:
    return f"{value[:_MOST_TEXT]}..." if isinstance(value, str) and len(value) > _MOST_TEXT else value


def _summary(found: Found) -> str:
    counts = Counter(record.status for record in found.records)
    return f"{len(found.records)} runs: " + ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in counts.items())


def _notes(found: Found) -> list[str]:
    notes = [f"not read: {text}" for text in found.unread]
    if found.unfinished:
        notes.append(f"{found.unfinished} cells of sweeps have no record: they did not end")
    return notes


def _json(data: Any) -> str:
    """Write JSON that ends no script element and opens no comment, whatever it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return resources.files("lowtide.reports").joinpath(name).read_text(encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
{notes}
<div id="plots">{plots}</div>
<p>The red line is the frontier: nothing there is both smaller and faster. A click on a point or a row shows a run.</p>
<div id="detail" hidden></div>
<div id="tools"><input id="filter" type="search" placeholder="filter: words that a row must hold" aria-label="filter">
<select id="status" aria-label="status"><option value="">every status</option></select> <span id="count"></span></div>
<div id="cells"><table><thead><tr></tr></thead><tbody></tbody></table></div>
<p>made by lowtide report</p>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""
