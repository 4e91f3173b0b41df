"""Show the output of the quickstart in the README, as text and as a picture.

    make quickstart | tee /tmp/quickstart.txt
    python docs/make_picture.py /tmp/quickstart.txt

The fonts that rich's pictures fetch from the network are left out: the reader's own monospace font does.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
PICTURE = DOCS / "images" / "quickstart.svg"
_WIDTH = 118
_SHOWN = re.compile(r"(<!-- quickstart output -->\n).*?(<!-- end -->)", re.DOTALL)


def cut(captured: str) -> str:
    """Return what lowtide printed, without what make did before."""
    lines = [line.rstrip() for line in captured.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("run "))
    return "\n".join(lines[first:]).strip()


def draw(command: str, output: str) -> str:
    """Return the SVG of a command and what it printed."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold green"))
    console.print(Text.from_ansi(output))
    picture = console.export_svg(title="lowtide", theme=MONOKAI, unique_id="quickstart")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def main(captured: str) -> int:
    """Read what was captured; write the picture and the README."""
    output = cut(Path(captured).read_text(encoding="utf-8"))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw("make quickstart", output), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    shown = _SHOWN.sub(lambda found: f"{found[1]}```text\n{output}\n```\n{found[2]}", readme)
    README.write_text(shown, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
