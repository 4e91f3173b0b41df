"""What runs left behind, as tables, plots and one page. No torch, and no import of trainer or sweeps.

    a folder ─► _load (records) ─► _tables (rows) ─► CSV · Parquet · DataFrame
                      └──► _plots (SVG, PNG) ──► _page (one HTML file that loads nothing)

Every number comes from a ``RunRecord`` and is computed nowhere else; a run that is not ok has none.
"""

from __future__ import annotations

from lowtide.reports._estimate_page import estimate_page, write_estimate_page
from lowtide.reports._inspect_page import write_inspect_page
from lowtide.reports._load import Found, find_records
from lowtide.reports._page import write_page
from lowtide.reports._plots import frontier_of, plot_frontier, plot_prediction, plot_timeline, to_png
from lowtide.reports._tables import load_runs, rows_of, to_csv, to_frame, to_parquet

__all__ = [
    "Found",
    "estimate_page",
    "find_records",
    "frontier_of",
    "load_runs",
    "plot_frontier",
    "plot_prediction",
    "plot_timeline",
    "rows_of",
    "to_csv",
    "to_frame",
    "to_parquet",
    "to_png",
    "write_estimate_page",
    "write_inspect_page",
    "write_page",
]
