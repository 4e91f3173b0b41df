"""How long the command line takes to say something: ``python benchmarks/cli_start.py [--runs 7]``.

The aim is ``lowtide --help`` under 0.3 s on an idle machine: a command line that imports torch first takes seconds.
Each command runs in a process of its own; the table shows the fastest and the median run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import lowtide": ["-c", "import lowtide"],
    "lowtide --help": ["-m", "lowtide", "--help"],
    "lowtide train --help": ["-m", "lowtide", "train", "--help"],
    "lowtide config check quickstart.yaml": ["-m", "lowtide", "config", "check", str(CONFIG)],
}


def measure(arguments: list[str], runs: int) -> list[float]:
    taken: list[float] = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - began)
    return sorted(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    width = max(map(len, COMMANDS))
    print(f"{'command':<{width}}  fastest s  median s")
    for name, arguments in COMMANDS.items():
        taken = measure(arguments, runs)
        print(f"{name:<{width}}  {taken[0]:9.3f}  {statistics.median(taken):8.3f}")


if __name__ == "__main__":
    main()
