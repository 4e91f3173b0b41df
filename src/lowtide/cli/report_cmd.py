"""``lowtide report``: what runs and sweeps left behind, as one page, and as tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json

if TYPE_CHECKING:
    from lowtide.reports import Found

__all__ = ["report"]


def report(
    runs_dir: Annotated[Path, Parameter(help="A folder with runs or sweeps anywhere below it.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="The page: one file, which needs no network.")] = Path("report.html"),
    csv: Annotated[Path | None, Parameter(help="Write the table as CSV too.")] = None,
    parquet: Annotated[Path | None, Parameter(help="Write the table as Parquet too (lowtide[reports]).")] = None,
    plots: Annotated[
        Path | None, Parameter(help="Write every plot into this folder too: SVG, and PNG with lowtide[plots].")
    ] = None,
    json: Json = False,
) -> Answer:
    """Make one page of all runs and cells of sweeps below a folder."""
    from lowtide.reports import find_records, to_csv, to_parquet, write_page

    found = find_records(runs_dir)
    written = [_write(out, write_page(found, title=f"Runs in {runs_dir}"))]
    if csv is not None:
        written.append(_write(csv, to_csv(found)))
    if parquet is not None:
        _folder_of(parquet)
        to_parquet(found, parquet)
        written.append(str(parquet))
    if plots is not None:
        written += _plots(found, plots)
    counts: dict[str, int] = {}
    for record in found.records:
        counts[record.status] = counts.get(record.status, 0) + 1
    document: dict[str, Any] = {
        "runs": len(found.records),
        "counts": counts,
        "unread": list(found.unread),
        "unfinished": found.unfinished,
        "written": written,
    }
    lines = [f"{len(found.records)} runs: " + ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in counts.items())]
    lines += [f"not read: {text}" for text in found.unread]
    return Answer(document, text="\n".join([*lines, *(f"wrote {path}" for path in written)]), json=json)


def _plots(found: Found, folder: Path) -> list[str]:
    import importlib.util

    from lowtide.reports import plot_frontier, plot_prediction, plot_timeline, to_png

    made = {"frontier": plot_frontier(found.records), "prediction": plot_prediction(found.records)}
    for index, record in enumerate(found.records):
        if record.predicted is not None and record.predicted.timeline:
            made[f"timeline-{index:04}"] = plot_timeline(record.predicted, title=record.label)
    written: list[str] = []
    for name, svg in made.items():
        written.append(_write(folder / f"{name}.svg", svg))
        if importlib.util.find_spec("vl_convert") is not None:
            (folder / f"{name}.png").write_bytes(to_png(svg))
            written.append(str(folder / f"{name}.png"))
    return written


def _write(path: Path, text: str) -> str:
    from lowtide.errors import InputError

    _folder_of(path)
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    return str(path)


def _folder_of(path: Path) -> None:
    from lowtide.errors import InputError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {path.parent} cannot be made: {error.strerror}") from error
