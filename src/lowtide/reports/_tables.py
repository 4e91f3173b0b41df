"""Records as rows: the one table that CSV, Parquet, the DataFrame and the page show.

Columns of numbers hold None where there is no number: failed runs have none. The config's fields stand in columns
``config.<path>``, those alone in which the records differ.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import InputError
from lowtide.reports._load import Found, find_records
from lowtide.run_record import RunRecord

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["differing", "load_runs", "rows_of", "to_csv", "to_frame", "to_parquet"]

_OWN = ("run.directory",)
_MISSING = object()


def rows_of(found: Found) -> list[dict[str, Any]]:
    """Return one row per record, all with the same columns, in the order of the records."""
    configs = [flat_config(record.config) for record in found.records]
    shown = differing(configs)
    rows: list[dict[str, Any]] = []
    for record, folder, config in zip(found.records, found.folders, configs, strict=True):
        row = _facts(record, folder)
        row |= {f"config.{name}": _plain(config.get(name)) for name in shown}
        rows.append(row)
    return rows


def _facts(record: RunRecord, folder: str) -> dict[str, Any]:
    result = record.result
    return {
        "id": record.id,
        "label": record.label,
        "sweep": record.sweep,
        "number": record.number,
        "status": record.status,
        "reason": record.reason,
        "error_type": record.error_type,
        "error_rank": record.error_rank,
        "peak_bytes": None if result is None else result.peak_bytes,
        "predicted_peak_bytes": None if record.predicted is None else record.predicted.peak_bytes,
        "tokens_per_s": None if result is None else result.tokens_per_s,
        "model_flops_per_s": None if result is None else result.model_flops_per_s,
        "mfu": None if result is None else result.mfu,
        "hfu": None if result is None else result.hfu,
        "loss_first": None if result is None else result.loss_first,
        "loss_last": None if result is None else result.loss_last,
        "loss_held_out": None if result is None else result.loss_held_out,
        "steps": None if result is None else result.steps,
        "wall_s": None if result is None else result.wall_s,
        "saved_bytes": _saved_bytes(record),
        "policy": None if result is None else result.policy,
        "world_size": record.world_size,
        "device": record.device,
        "attempts": len(record.attempts),
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "folder": folder,
    }


def _saved_bytes(record: RunRecord) -> int | None:
    """Return what the run's own policy saves; none and full are counted beside it."""
    policy = record.config.get("policy")
    kind = policy.get("kind") if isinstance(policy, Mapping) else None
    saved = () if record.result is None else record.result.saved
    own = [each.total_bytes for each in saved if each.policy == kind]
    return own[-1] if own else None


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the fields that are not the same in all configs, in the order in which they first stand."""
    names = list(dict.fromkeys(name for config in configs for name in config))
    values = {name: {_key(config.get(name, _MISSING)) for config in configs} for name in names}
    return [name for name in names if len(values[name]) > 1 and name not in _OWN]


def flat_config(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves of a config by dotted path; lists are leaves."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        here = f"{path}.{key}" if path else str(key)
        found |= flat_config(value, here) if isinstance(value, Mapping) and value else {here: value}
    return found


def _key(value: Any) -> str:
    return "missing" if value is _MISSING else json.dumps(value, sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else json.dumps(value, default=str)


def to_csv(found: Found) -> str:
    """Return the rows as CSV; what is None is empty."""
    rows = rows_of(found)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["id"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_frame(found: Found) -> DataFrame:
    """Return the rows as a DataFrame; whole numbers stay whole where some are missing.

    Raises:
        InputError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise InputError("a DataFrame needs pandas: pip install 'lowtide[reports]'") from None
    rows = rows_of(found)
    # As objects first: pandas else makes floats of whole numbers where some are missing.
    frame = pd.DataFrame({name: pd.Series([row[name] for row in rows], dtype=object) for name in rows[0]})
    for name in frame.columns:
        kept = [value for value in frame[name] if value is not None]
        kinds = {type(value) for value in kept}
        if kinds == {int}:
            frame[name] = frame[name].astype("Int64")
        elif kinds <= {int, float} and kinds:
            frame[name] = frame[name].astype("Float64")
        elif len(kinds) > 1:
            # Parquet has one type for a column.
            frame[name] = [None if value is None else str(value) for value in frame[name]]
    return frame


def to_parquet(found: Found, path: Path) -> None:
    """Write the rows as Parquet.

    Raises:
        InputError: pandas or pyarrow is not installed.
    """
    frame = to_frame(found)
    try:
        frame.to_parquet(path, index=False, engine="pyarrow")
    except ImportError:
        raise InputError("Parquet needs pyarrow: pip install 'lowtide[reports]'") from None


def load_runs(directory: str | Path) -> DataFrame:
    """Return one row for every run and every cell of a sweep below a folder, as a DataFrame.

    Columns: ``id label sweep number status reason``, the numbers of a run that is ok (bytes, tokens a second, losses;
    missing for others), and ``config.<path>`` for every field in which the configs differ.

    Raises:
        InputError: no such folder, no run in it, or pandas is not installed (``pip install 'lowtide[reports]'``).
    """
    return to_frame(find_records(directory))
