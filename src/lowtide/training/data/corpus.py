"""Text that every Python installation carries, as bytes, split into training and held-out documents.

The language reference lives in ``pydoc_data.topics`` (0.46 million characters in Python 3.11), which
``help()`` reads. Its layout is not a promise: every mapping or module in ``pydoc_data`` that holds text is
taken, in the order of names. Docstrings are read from the source files of the standard library by parsing
them, never by importing.

Documents are held out by a hash of their names, so the split needs no random state and does not move when
other documents come or go. The reference repeats itself (a note stands under several topics): paragraphs of
the held-out documents that also stand in others are removed from training, so that held-out text is unseen.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import pkgutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lowtide.errors import InputError

__all__ = ["Corpus", "load_corpus", "split_documents"]

_SEPARATOR = "\n\n"
_SHORTEST_PARAGRAPH = 40
_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Tokens are bytes, uint8."""

    training: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]


@cache
def load_corpus(*, docstrings: bool, held_out: float) -> Corpus:
    """Read the text of this Python and split it.

    Raises:
        InputError: this Python has no ``pydoc_data`` (some distributions cut it out).
    """
    documents = dict(_reference())
    if docstrings:
        documents.update(_docstrings())
    if not documents:
        raise InputError(
            "data.embedded_text: this Python carries no pydoc_data.topics, from which the text comes; use a "
            "Python that has it, `docstrings: true`, or data of kind random"
        )
    training, kept = split_documents(documents, share=held_out)
    return Corpus(_as_bytes(training), _as_bytes(kept))


def split_documents(documents: Mapping[str, str], *, share: float) -> tuple[list[str], list[str]]:
    """Split documents by a hash of their names; about ``share`` of the characters are held out.

    Documents are taken in the order of their hashes until the share is reached, at least one of several; one
    that would take the held-out part past twice the share is left to training.
    """
    by_hash = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    wanted = share * sum(map(len, documents.values()))
    chosen: set[str] = set()
    size = 0
    for name in by_hash:
        if size >= wanted:
            break
        if not chosen or size + len(documents[name]) <= 2 * wanted:
            chosen.add(name)
            size += len(documents[name])
    held_out = [documents[name] for name in sorted(chosen)]
    seen = {p for text in held_out for p in _paragraphs(text) if len(p) >= _SHORTEST_PARAGRAPH}
    training = [_without(documents[name], seen) for name in sorted(documents) if name not in chosen]
    return training, held_out


def _paragraphs(text: str) -> list[str]:
    return [p.strip() for p in text.split(_SEPARATOR)]


def _without(text: str, seen: set[str]) -> str:
    return _SEPARATOR.join(p for p in text.split(_SEPARATOR) if p.strip() not in seen)


def _as_bytes(texts: list[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(_SEPARATOR.join(texts).encode(), dtype=np.uint8)


def _reference() -> Iterator[tuple[str, str]]:
    try:
        package = importlib.import_module("pydoc_data")
    except ImportError:
        return
    for found in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"pydoc_data.{found.name}")
        for name, value in sorted(vars(module).items()):
            if isinstance(value, dict) and not name.startswith("_"):
                texts = ((str(k), v) for k, v in sorted(value.items()) if isinstance(v, str))
                yield from ((f"{found.name}/{k}", v.strip()) for k, v in texts)


def _docstrings() -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if _NOT_LIBRARY.isdisjoint(relative.parts):
            text = _SEPARATOR.join(_docstrings_of(path))
            if text:
                yield f"docstrings/{relative.as_posix()}", text


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
