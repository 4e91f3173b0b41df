"""How long the report page takes to open: records on the disk ─► page ─► Chromium, from a file.

    python -m benchmarks.report_page [CELLS ...]

Prints, for each number of cells: milliseconds to find and read the records, to write the page, its size, and what the
browser says from the start of the navigation until plots and the first
rows of the table are drawn (``performance.now()``), the median of five fresh browsers.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.reported import look, write_records

from lowtide.reports import find_records, write_page

OPENINGS = 5


def measure(cells: int, folder: Path) -> str:
    write_records(folder / "runs", cells)
    started = time.perf_counter()
    found = find_records(folder / "runs")
    read = time.perf_counter()
    text = write_page(found, title=f"{cells} cells")
    written = time.perf_counter()
    page = folder / "report.html"
    page.write_text(text, encoding="utf-8")
    ready = [
        int(look(page, profile=folder / f"profile-{turn}", settle=False)[0].root["data-ready-ms"] or 0)
        for turn in range(OPENINGS)
    ]
    return (
        f"{cells:>6} cells  read {1000 * (read - started):7.0f} ms  write {1000 * (written - read):6.0f} ms  "
        f"{len(text) / 2**20:6.2f} MiB  opens in {statistics.median(ready):5.0f} ms (of {sorted(ready)})"
    )


if __name__ == "__main__":
    for count in [int(text) for text in sys.argv[1:]] or [5, 2000]:
        with tempfile.TemporaryDirectory() as home:
            print(measure(count, Path(home)), flush=True)
