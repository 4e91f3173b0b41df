"""Code and commands that stand in Markdown pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_WORD = re.compile(r"(?:\.venv/bin/)?(make|lowtide|torchrun|python3?|pip)\b")


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in _FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def links(page: Path) -> list[str]:
    return [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the commands of a page's shell blocks that are ours to check, as words, without comments."""
    for code in blocks(page, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            if _WORD.match(line.strip()):
                words = shlex.split(line, comments=True)
                yield [Path(words[0]).name, *words[1:]]


def lowtide_arguments(words: list[str]) -> list[str] | None:
    """Return what a command hands to lowtide; None where it runs something else."""
    if words[0] == "lowtide":
        return words[1:]
    if words[0] == "torchrun" and "lowtide" in words:
        return words[words.index("lowtide") + 1 :]
    return None
