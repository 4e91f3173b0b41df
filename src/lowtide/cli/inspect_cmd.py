"""``lowtide inspect``: what a config's policy keeps for backward, tensor by tensor, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json, Overrides

if TYPE_CHECKING:
    from rich.console import Console

    from lowtide.inspect_report import BlockKind, InspectReport, TensorRow

__all__ = ["inspect"]


def inspect(
    config: Annotated[Path, Parameter(help="The YAML file.")],
    /,
    *,
    set_: Overrides = (),
    device: Annotated[
        str | None, Parameter(help="What each process computes on: a name such as H100; default: cpu.")
    ] = None,
    html: Annotated[
        Path | None, Parameter(help="Write one HTML page whose rows sort and filter; it loads nothing.")
    ] = None,
    json: Json = False,
) -> Answer:
    """Say of every tensor that backward needs whether it is saved, recomputed or an input, and which rule says so.

    One forward and loss of one rank's batch, under fake tensors: no GPU, no weights.
    """
    from lowtide.training.config import load_config
    from lowtide.training.inspect import inspect_config

    report = inspect_config(load_config(config, set_).config, device=device)
    written = ""
    if html is not None:
        from lowtide.reports import write_inspect_page
        from lowtide.system.files import write_text

        write_text(html, write_inspect_page(report))
        written = f"\npage {html}"
    return Answer(report.model_dump(mode="json"), text=_text(report) + written, json=json)


def _text(report: InspectReport) -> str:
    import io
    import shutil

    from rich.console import Console

    out = io.StringIO()
    width = max(shutil.get_terminal_size((160, 40)).columns, 120)
    console = Console(file=out, width=width, highlight=False, markup=False)
    _head(report, console)
    for kind in report.kinds:
        _kind(kind, console)
    if report.rest:
        console.print()
        _table("outside of blocks, and what several blocks share", report.rest, console)
    if report.assumptions:
        console.print("\ntaken for granted:")
        for text in report.assumptions:
            console.print(f"- {text}")
    return out.getvalue().rstrip()


def _head(report: InspectReport, console: Console) -> None:
    from lowtide.units import format_bytes

    console.print(f"{report.model} on {report.device}, policy {report.policy}")
    console.print(f"{report.checkpointed} of {report.blocks} blocks checkpointed")
    console.print(
        f"held for backward {format_bytes(report.total_bytes)}, of this outside of blocks "
        f"{format_bytes(report.rest_bytes)}; runs again {report.recompute_flops:,} FLOPs, about "
        f"{report.recompute_ms:,.3g} ms"
    )
    for number, text in enumerate(report.rules):
        console.print(f"rule {number}: {text}")


def _kind(kind: BlockKind, console: Console) -> None:
    from lowtide.units import format_bytes

    names = kind.blocks[0] if len(kind.blocks) == 1 else f"{kind.blocks[0]} to {kind.blocks[-1]}"
    console.print(f"\n{len(kind.blocks)} x {kind.block_class} ({names})")
    for region in kind.regions:
        console.print(f"executor {region.executor} ({region.reason}){f' in {region.module}' if region.module else ''}")
    _table("each of them", kind.rows, console)
    console.print(
        f"a block holds {format_bytes(kind.saved_bytes)} (inputs {format_bytes(kind.input_bytes)}), makes "
        f"{format_bytes(kind.recomputed_bytes)} again: {kind.recompute_flops:,} FLOPs, "
        f"about {kind.recompute_ms:,.3g} ms"
    )
    for found in kind.never_needed:
        fate = "held all the same by recompute" if found.held else "not kept"
        console.print(
            f"never needed by backward: {found.op} in {found.module or 'the block'}, {format_bytes(found.nbytes)}, "
            f"{found.why}: {fate}"
        )


def _table(title: str, rows: tuple[TensorRow, ...], console: Console) -> None:
    from rich import box
    from rich.table import Table

    from lowtide.units import format_bytes

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("operator", "module", "shape", "dtype"):
        table.add_column(name, overflow="fold")
    for name in ("bytes", "ms again"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("decision", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in rows:
        why = row.why if row.rule is None else f"rule {row.rule}: {row.why}"
        why += "" if row.needed else "; to recompute others"
        elsewhere = row.decision in ("saved", "input") and not row.counted
        table.add_row(
            row.op or "(given)",
            row.module,
            "x".join(map(str, row.shape)),
            row.dtype,
            format_bytes(row.nbytes),
            "" if row.recompute_ms is None else f"{row.recompute_ms:.3g}",
            row.decision,
            f"{why}; counted elsewhere" if elsewhere else why,
        )
    console.print(table)
