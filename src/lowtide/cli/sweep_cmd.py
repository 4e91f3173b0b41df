"""``lowtide sweep``: a grid of training runs that survives what kills one of them."""

from __future__ import annotations

import contextlib
import json as json_text
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json

if TYPE_CHECKING:
    from lowtide.sweeps import Cell, Finished, Resolved, Submitted, SweepConfig

__all__ = ["sweep"]

_TRAIN = (sys.executable, "-m", "lowtide", "train")


def sweep(
    file: Annotated[Path, Parameter(help="The YAML file of the sweep.")],
    /,
    *,
    resume: Annotated[
        bool, Parameter(negative=(), help="Go on with the cells that have no record, or start where there is none.")
    ] = False,
    estimate: Annotated[
        bool, Parameter(negative=(), help="Only say what peak every cell will have; nothing is trained.")
    ] = False,
    slurm: Annotated[
        bool, Parameter(negative=(), help="Submit an array job, one job for each cell, and return (lowtide[slurm]).")
    ] = False,
    cluster: Annotated[
        Literal["slurm", "local"], Parameter(help="For --slurm: 'local' runs the jobs on this machine, to try it out.")
    ] = "slurm",
    option: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(), help="For --slurm: NAME=VALUE for submitit, such as gpus_per_node=8, slurm_partition=a."
        ),
    ] = (),
    wait: Annotated[bool, Parameter(negative=(), help="For --slurm: wait until every job has ended.")] = False,
    json: Json = False,
) -> Answer:
    """Run every cell of a grid in processes of its own, and record what became of it.

    Exit code 0 where every cell is ok (with --estimate: has a price), 1 where one is not, 75 where a signal ended the
    sweep: go on with --resume.
    """
    settings, cells, folder = read_sweep(file)
    if estimate:
        return _priced(settings, cells, json=json)
    if slurm:
        submitted = _submit(settings, cells, folder, cluster, option, resume=resume)
        if not wait:
            submitted.close()
            return _handed_over(settings, submitted.job_ids, folder, json=json)
        done = submitted.wait()
        submitted.close()
    else:
        done = _run(settings, cells, folder, resume=resume, json=json)
    return _finished(settings, cells, folder, done, json=json)


def _finished(settings: SweepConfig, cells: Sequence[Cell], folder: Path, done: Finished, *, json: bool) -> Answer:
    rows = [_row(cell, done) for cell in cells]
    document = {
        "sweep": settings.name,
        "folder": str(folder),
        "exit_code": done.exit_code,
        "interrupted": done.interrupted,
        "counts": _counts(rows),
        "cells": rows,
    }
    return Answer(document, text=_text(rows, done, folder), json=json, exit_code=done.exit_code)


def read_sweep(file: Path) -> tuple[SweepConfig, list[Cell], Path]:
    """Read a sweep file; return it, its cells, and the sweep's folder.

    Raises:
        ConfigError: the file, or the config of a cell, is not legal.
    """
    from lowtide.errors import ConfigError
    from lowtide.sweeps import SweepConfig, plan_cells
    from lowtide.training.config import load, load_config

    loaded = load(SweepConfig, file)
    # From what is written down: there, what the environment gives stands by name, and cells read it themselves.
    settings = SweepConfig.model_validate(loaded.resolved)
    if "prune_fields" not in loaded.config.model_fields_set:
        settings = settings.model_copy(update={"prune_fields": loaded.config.prune_fields})
        settings.model_fields_set.discard("prune_fields")
    base = file.parent / settings.base
    below: Mapping[str, Any] = {}
    # A base may be legal only with what the cells set; conditions then see no more than that.
    with contextlib.suppress(ConfigError):
        below = load_config(base, _overrides(settings.settings)).resolved
    cells = plan_cells(settings, below, lambda own: _resolve(base, own))
    return settings, cells, Path(settings.directory) / settings.name


def _submit(
    settings: SweepConfig,
    cells: Sequence[Cell],
    folder: Path,
    cluster: Literal["slurm", "local"],
    options: Sequence[str],
    *,
    resume: bool,
) -> Submitted:
    from lowtide.errors import UserError
    from lowtide.sweeps import submit

    told: dict[str, Any] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--option {text}: write NAME=VALUE")
        told[name] = int(value) if value.isdecimal() else value
    return submit(settings, cells, folder, command=_TRAIN, cluster=cluster, options=told, resume=resume)


def _handed_over(settings: SweepConfig, jobs: list[str], folder: Path, *, json: bool) -> Answer:
    text = f"{len(jobs)} jobs were submitted" + (f": {jobs[0]} to {jobs[-1]}" if jobs else ", nothing is missing")
    lines = [text, f"records: {folder}   what is there: lowtide report {folder}"]
    document = {"sweep": settings.name, "folder": str(folder), "jobs": jobs}
    return Answer(document, text="\n".join(lines), json=json)


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{path}={json_text.dumps(value)}" for path, value in settings.items()]


def _resolve(base: Path, own: Mapping[str, Any]) -> Resolved:
    from lowtide.sweeps import Resolved
    from lowtide.training.config import config_hash, load_config, to_yaml

    config = load_config(base, _overrides(own)).resolved
    content = {**config, "run": {k: v for k, v in config["run"].items() if k not in ("name", "directory")}}
    return Resolved(config, to_yaml(config), config_hash(content))


def _run(settings: SweepConfig, cells: Sequence[Cell], folder: Path, *, resume: bool, json: bool) -> Finished:
    from rich.console import Console

    from lowtide.sweeps import LiveProgress, PlainProgress, Store, Tally, run_sweep

    stream = sys.stderr if json else sys.stdout
    tally = Tally(len(cells), Store(folder).records(cells) if resume else {}, settings.at_once)
    price = None
    if settings.estimate:
        from lowtide.sweeps import estimate_cells

        price = estimate_cells
        stream.write(f"estimating the peaks of {len(cells)} cells first\n")
        stream.flush()
    with contextlib.ExitStack() as exits:
        watcher = (
            exits.enter_context(LiveProgress(tally, Console(file=stream)))
            if stream.isatty()
            else PlainProgress(tally, stream)
        )
        return run_sweep(settings, cells, folder, command=_TRAIN, watcher=watcher, resume=resume, estimate=price)


def _row(cell: Cell, done: Finished) -> dict[str, Any]:
    record = done.records.get(cell.key)
    if record is None:
        return {"id": cell.key, "label": cell.label, "status": "missing", "reason": "it did not run"}
    result = record.result
    return {
        "id": cell.key,
        "label": cell.label,
        "status": record.status,
        "reason": record.reason,
        "attempts": len(record.attempts),
        "peak_bytes": None if result is None else result.peak_bytes,
        "predicted_peak_bytes": None if record.predicted is None else record.predicted.peak_bytes,
        "tokens_per_s": None if result is None else result.tokens_per_s,
    }


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    return counts


def _text(rows: Sequence[Mapping[str, Any]], done: Finished, folder: Path) -> str:
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in _counts(rows).items())
    lines = ["", f"{len(rows)} cells: {counts}"]
    for row in rows:
        if row["status"] not in ("ok", "missing"):
            reason = " ".join(str(row["reason"]).split())
            shown = reason if len(reason) <= 300 else f"{reason[:300]}..."
            lines.append(f"  {row['status'].replace('_', ' '):14} {row['label']}: {shown}")
    if done.interrupted is not None:
        lines.append(f"stopped by {done.interrupted}: go on with --resume")
    return "\n".join([*lines, f"records: {folder}   a page of them: lowtide report {folder}"])


def _priced(settings: SweepConfig, cells: Sequence[Cell], *, json: bool) -> Answer:
    from lowtide.sweeps import estimate_cells
    from lowtide.units import format_bytes

    found = estimate_cells(cells, {})
    rows: list[dict[str, Any]] = [
        {"id": cell.key, "label": cell.label, **_price(found.get(cell.key, {}))} for cell in cells
    ]
    lines = [f"{settings.name}: {len(cells)} cells, nothing is trained"]
    for row in rows:
        peak = row["predicted_peak_bytes"]
        lines.append(f"{format_bytes(peak) if peak is not None else 'not known':>14}  {row['label']}")
        if row["error"]:
            lines.append(f"{'':16}{row['error']}")
    failed = any(row["error"] for row in rows)
    return Answer({"sweep": settings.name, "cells": rows}, text="\n".join(lines), json=json, exit_code=int(failed))


def _price(told: Mapping[str, Any]) -> dict[str, Any]:
    return {"predicted_peak_bytes": told.get("peak_bytes"), "error": told.get("error")}
