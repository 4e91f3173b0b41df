"""``lowtide doctor``: what is here, what is missing, and whether training can run. The first thing of a bug report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json

if TYPE_CHECKING:
    from lowtide.cli._doctor_checks import Check

__all__ = ["doctor"]

_MARKS = {"ok": "[green]ok[/green]", "missing": "[yellow]missing[/yellow]", "broken": "[red]BROKEN[/red]"}


def doctor(
    *,
    runs_dir: Annotated[Path, Parameter(help="The folder that runs would go into.")] = Path("runs"),
    timeout: Annotated[float, Parameter(help="Seconds for each check that starts processes.")] = 120.0,
    json: Json = False,
) -> Answer:
    """Look at versions, devices and optional parts, and start two processes that talk to each other.

    Exit code 0 where lowtide can train here, 1 where something that it needs is broken.
    """
    from lowtide.cli._doctor_checks import run_checks

    checks = list(run_checks(runs_dir=runs_dir, timeout_s=timeout))
    broken = [check.name for check in checks if check.status == "broken"]
    document = {"usable": not broken, "broken": broken, "checks": [asdict(check) for check in checks]}
    return Answer(document, text=_table(checks, broken), json=json, exit_code=1 if broken else 0)


def _table(checks: Sequence[Check], broken: Sequence[str]) -> str:
    from io import StringIO

    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        advice = f"\n[dim]{escape(check.advice)}[/dim]" if check.advice and check.status != "ok" else ""
        table.add_row(check.name, _MARKS[check.status], escape(check.found) + advice)
    seen = Console()
    text = StringIO()
    console = Console(file=text, width=seen.width, force_terminal=seen.is_terminal, no_color=seen.no_color)
    console.print(table)
    end = f"broken: {', '.join(broken)}" if broken else "lowtide can train here"
    return text.getvalue().rstrip() + "\n\n" + end
