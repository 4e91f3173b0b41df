"""Records as a sweep would write them, many and quickly; and a look at a page in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lowtide.run_record import (
    AttemptRecord,
    OpRow,
    PeakOfRank,
    Predicted,
    RunRecord,
    RunResult,
    SavedBytesOf,
)
from lowtide.system.files import write_text

NASTY = '<script>document.title = "owned"</script><img src=x onerror="alert(1)"></script><!-- &amp; \u2028 =1+1'
PHASES = ("forward", "backward", "optimizer")
MATMUL = OpRow(op="aten.mm.default", module="layers.0", phase="forward", calls=7, time_ms=1.5, allocated_bytes=64)


def record(number: int, *, nasty: bool = False) -> RunRecord:
    """Return the n-th record: three of five are ok, and numbers follow from ``number`` alone."""
    status = ("ok", "ok", "out_of_memory", "ok", "error")[number % 5]
    batch, kind = 2 ** (number % 4), ("none", "full", "selective_op")[number % 3]
    label = f"policy={kind} batch_size={batch} n={number}"
    reason = None if status == "ok" else f"because of {number}"
    result = None
    if status == "ok":
        result = RunResult(
            steps=10,
            loss_first=5.5,
            loss_last=None if number == 3 else 3.0 + number / 7,
            tokens_per_s=1000.0 + 37.5 * (number * 7919 % 101),
            policy=f"{kind}: 4 of 4 blocks checkpointed",
            peaks=(
                PeakOfRank(rank=0, peak_bytes=10_000_000 + number * 4099, method="storage tracker"),
                PeakOfRank(rank=1, peak_bytes=10_000_000 + number * 4099 - 8, method="storage tracker"),
            ),
            saved=(
                SavedBytesOf(policy="none", checkpointed=0, total_bytes=9000 + number),
                SavedBytesOf(policy="full", checkpointed=4, total_bytes=1000 + number),
                SavedBytesOf(policy="selective_op", checkpointed=4, total_bytes=5000 + number),
            ),
            wall_s=12.25,
        )
    return RunRecord(
        id=f"cell-{number:05}",
        label=f"{label} {NASTY}" if nasty else label,
        sweep="grid",
        number=number,
        status=status,
        reason=f"{reason} {NASTY}" if nasty and reason else reason,
        settings={"data.batch_size": batch, "policy": {"kind": kind}, **({NASTY: NASTY} if nasty else {})},
        config={
            "data": {"batch_size": batch, "kind": "random", **({NASTY: [NASTY]} if nasty and number % 2 else {})},
            "policy": {"kind": kind},
            "run": {"directory": f"runs/{number}", "seed": 0},
        },
        world_size=2,
        device="cpu x86_64",
        started_at=f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}.000000Z",
        attempts=(
            AttemptRecord(status=status, reason=reason, exit_code=0, started_at="2026-01-01T00:00:00Z", wall_s=13.5),
        ),
        predicted=Predicted(
            peak_bytes=10_000_000 + number * 4000,
            timeline=tuple((PHASES[i // 67], 1_000_000 + 50_000 * (i % 67) + number) for i in range(200)),
        ),
        result=result,
        operators=(MATMUL,),
    )


def write_records(folder: Path, count: int, *, nasty: bool = False) -> list[RunRecord]:
    made = [record(number, nasty=nasty) for number in range(count)]
    for each in made:
        cell = folder / "sweeps" / "grid" / "cells" / each.id
        cell.mkdir(parents=True)
        write_text(cell / "record.json", each.to_json())
        (cell / "attempt-1").mkdir()
        (cell / "attempt-1" / "run.json").write_text("{}")  # an attempt is no run of its own
    return made


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser() -> str:
    """Return a Chromium, or skip with the reason."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs Chromium; none of {', '.join(BROWSERS)} is on the PATH")
    return found


class Dom(HTMLParser):
    """The document as the browser had it in the end: rows, cells, and every kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root: dict[str, str | None] = {}
        self.rows: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.tags: dict[str, int] = {}
        self.title = ""
        self.detail = ""
        self._inside: list[str] = []
        self._detail = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._inside.append(tag)
        if tag == "html":
            self.root = given
        if given.get("id") == "detail":
            self._detail = len(self._inside)
        if tag == "tr" and "data-id" in given:
            self.rows.append((str(given["data-id"]), []))
        if tag == "td" and self.rows and not self._detail:
            self.rows[-1][1].append(("", given.get("data-value")))
        if tag in ("meta", "link", "input", "img", "br"):
            self._inside.pop()

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass
        if len(self._inside) < self._detail:
            self._detail = 0

    def handle_data(self, data):
        if "title" in self._inside[-1:] and "svg" not in self._inside:
            self.title += data
        if self._detail:
            self.detail += data
        elif self._inside[-1:] == ["td"] and self.rows and self.rows[-1][1]:
            text, value = self.rows[-1][1][-1]
            self.rows[-1][1][-1] = (text + data, value)


def look(page: Path, fragment: str = "", *, profile: Path, settle: bool = True) -> tuple[Dom, list[str]]:
    """Open a page from its file in headless Chromium; return the document and what the console said.

    ``settle``: let timers run to their end, in a time that is not the clock's.
    """
    timers = ["--virtual-time-budget=60000"] if settle else []
    argv = [
        browser(), *timers, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
        "--enable-logging=stderr", "--log-level=0", f"--user-data-dir={profile}", "--timeout=60000",
        f"{page.resolve().as_uri()}{'#' + fragment if fragment else ''}",
    ]  # fmt: skip
    env = {**os.environ, "HOME": str(profile)}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=180, env=env)
    return Dom(done.stdout), re.findall(r".*CONSOLE.*", done.stderr)
