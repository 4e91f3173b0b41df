"""Run the zoo and write ``docs/reference/zoo.md``: ``python -m benchmarks.zoo [architecture ...]``."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.check import EXECUTORS, POLICIES, Report, check

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "zoo.md"


def main(names: list[str]) -> int:
    """Check each architecture, print a line for it, write the page when all were asked for; 1 if one fails."""
    torch.set_num_threads(1)
    rows: list[str] = []
    failed = 0
    for name in names or list(ARCHITECTURES):
        report = check(ARCHITECTURES[name])
        row = _row(name, report)
        failed += any(cell.differing for cell in report.cells)
        rows.append(row)
        print(row, flush=True)
    if not names:
        _PAGE.write_text(_page(rows, failed), encoding="utf-8")
    return 1 if failed else 0


def _row(name: str, report: Report) -> str:
    cells = [f"`{name}`", f"{len(report.blocks)}, from `{report.blocks[0]}`"]
    for policy in POLICIES:
        mine = [c for c in report.cells if c.policy == policy]
        marks = ["bitwise" if not c.differing else f"**differs**: {', '.join(c.differing[:2])}" for c in mine]
        share = mine[0].saved_bytes / report.saved_bytes if report.saved_bytes else 0.0
        part = f" (`{', '.join(ARCHITECTURES[name].part)}`)" if policy == "rules" else ""
        cells.append(f"{' / '.join(dict.fromkeys(marks))}, {share:.0%}{part}")
    regions = sum(c.regions for c in report.cells if c.executor == "replay")
    native = sum(c.native for c in report.cells if c.executor == "replay")
    notes = "; ".join(dict.fromkeys(c.reason for c in report.cells if c.reason))
    return f"| {' | '.join([*cells, f'{native} of {regions}', notes])} |"


def _page(rows: list[str], failed: int) -> str:
    heads = ["architecture", "blocks found", *POLICIES, "regions replayed", "notes"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return "\n".join(
        [
            "# The zoo",
            "",
            "Tiny models of transformers with random weights, in training mode with their own dropout, two steps in "
            "one process on a CPU. *bitwise*: losses, gradients and buffers equal those without a policy in every "
            f"bit, with both executors ({', '.join(EXECUTORS)}); the share is what blocks keep for backward, of what "
            "they keep without a policy. *regions replayed*: how many regions of all policies the replay executor "
            "carried out itself. *rules*: `default: save`, recompute in the modules that stand there (the "
            "feed-forward where it is a module of its own, else the norms); *pointwise_only*: the preset of that name.",
            "",
            f"{len(rows) - failed} of {len(rows)} architectures pass. Made by `python -m benchmarks.zoo` at commit "
            f"{commit.stdout.strip() or 'unknown'}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, {datetime.now(UTC):%Y-%m-%d}.",
            "",
            f"| {' | '.join(heads)} |",
            f"|{'---|' * len(heads)}",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
