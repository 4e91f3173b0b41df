"""An ``InspectReport`` as one HTML page: every row of every kind of block, to sort and to filter.

Everything is in the file. All text is escaped, rows are there without the script too, and the page's content policy
allows no script but the one whose hash it names, and nothing to be loaded.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from importlib import resources

from lowtide.inspect_report import BlockKind, InspectReport, TensorRow
from lowtide.units import format_bytes

__all__ = ["write_inspect_page"]

_HEADS = (
    ("blocks", "text"),
    ("operator", "text"),
    ("module", "text"),
    ("shape", "text"),
    ("dtype", "text"),
    ("bytes", "number"),
    ("decision", "text"),
    ("why", "text"),
    ("counted", "text"),
    ("needed by", "text"),
    ("recompute FLOPs", "number"),
    ("recompute ms", "number"),
)


def write_inspect_page(report: InspectReport) -> str:
    """Return the page as HTML."""
    script = _read("_inspect_page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = f"{report.model}, policy {report.policy}, {report.device}"
    rows = "\n".join(_rows(report))
    heads = "".join(
        f'<th data-kind="{kind}"><button type="button">{escape(name)}</button></th>' for name, kind in _HEADS
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<title>{escape(title)}</title>
<style>
{_read("_inspect_page.css")}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>Held for backward: <b>{escape(format_bytes(report.total_bytes))}</b>, of this outside of blocks
{escape(format_bytes(report.rest_bytes))}. Runs again: {report.recompute_flops:,} FLOPs,
about {report.recompute_ms:,.3g} ms.
{report.checkpointed} of {report.blocks} blocks are checkpointed.</p>
{_list("Rules", [f"{i}: {text}" for i, text in enumerate(report.rules)])}
<table class="kinds">
<thead><tr><th>blocks</th><th>class</th><th>held a block</th><th>inputs</th><th>recomputed</th><th>FLOPs again</th>
<th>ms again</th><th>executor</th></tr></thead>
<tbody>
{"".join(map(_kind, report.kinds))}
</tbody>
</table>
{_list("Saved by the rules, and never needed by backward", _never(report))}
<p><label>Filter <input id="filter" type="search" placeholder="words that a row must hold"></label>
<span id="count" aria-live="polite"></span></p>
<table id="rows">
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
{_list("Taken for granted", list(report.assumptions))}
<footer>lowtide {escape(report.environment.lowtide)}, torch {escape(report.environment.torch)}</footer>
<script>{script}</script>
</body>
</html>
"""


def _read(name: str) -> str:
    return (resources.files("lowtide.reports") / name).read_text(encoding="utf-8")


def _list(title: str, items: list[str]) -> str:
    if not items:
        return ""
    return f"<h2>{escape(title)}</h2>\n<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _kind(kind: BlockKind) -> str:
    executors = "; ".join(f"{r.module or 'block'}: {r.executor} ({r.reason})" for r in kind.regions) or "no region"
    cells = [
        f"{len(kind.blocks)}: {', '.join(kind.blocks)}",
        kind.block_class,
        format_bytes(kind.saved_bytes),
        format_bytes(kind.input_bytes),
        format_bytes(kind.recomputed_bytes),
        f"{kind.recompute_flops:,}",
        f"{kind.recompute_ms:,.3g}",
        executors,
    ]
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"


def _never(report: InspectReport) -> list[str]:
    return [
        f"{_some(kind)}: {n.op} in {n.module or 'the block'}, "
        f"{format_bytes(n.nbytes)}, {n.why}: {'held all the same by recompute' if n.held else 'not kept'}"
        for kind in report.kinds
        for n in kind.never_needed
    ]


def _some(kind: BlockKind) -> str:
    first, *others = kind.blocks
    return f"{first} and {len(others)} more" if others else first


def _rows(report: InspectReport) -> Iterator[str]:
    for kind in report.kinds:
        yield from (_row(_some(kind), row) for row in kind.rows)
    yield from (_row("outside of blocks", row) for row in report.rest)


def _row(blocks: str, row: TensorRow) -> str:
    rule = "" if row.rule is None else f"rule {row.rule}: "
    cells: list[tuple[str, int | float | None]] = [
        (blocks, None),
        (row.op or "(given)", None),
        (row.module, None),
        ("x".join(map(str, row.shape)), None),
        (row.dtype, None),
        (format_bytes(row.nbytes), row.nbytes),
        (row.decision, None),
        (f"{rule}{row.why}", None),
        ("yes" if row.counted else "no", None),
        ("backward" if row.needed else "recompute", None),
        ("" if row.recompute_flops is None else f"{row.recompute_flops:,}", row.recompute_flops or 0),
        ("" if row.recompute_ms is None else f"{row.recompute_ms:.3g}", row.recompute_ms or 0.0),
    ]
    written = (
        f"<td>{escape(text)}</td>" if value is None else f'<td class="number" data-value="{value}">{escape(text)}</td>'
        for text, value in cells
    )
    return f'<tr class="{escape(row.decision)}">{"".join(written)}</tr>'
