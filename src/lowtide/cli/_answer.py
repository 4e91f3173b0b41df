"""What a verb gives back: one document for programs, one text for people.

A verb is a function in a file of its own that returns an ``Answer`` and imports what it needs inside; ``main``
prints it. Under ``--json`` the document is the only thing on stdout.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

__all__ = ["AllowCode", "Answer", "Json", "Overrides", "strict_json"]

Json = Annotated[
    bool,
    Parameter(name="--json", negative=(), show_default=False, help="One JSON document on stdout, the rest on stderr."),
]
Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        negative=(),
        show_default=False,
        help="SECTION.FIELD=VALUE, the value written as YAML. Later ones win.",
    ),
]
AllowCode = Annotated[
    bool,
    Parameter(
        name="--allow-code",
        negative=(),
        show_default=False,
        help="Import the classes of `kind: custom` and check their configs.",
    ),
]


@dataclass(frozen=True)
class Answer:
    """What a verb found."""

    document: Any
    """What ``--json`` prints: plain data."""

    text: str
    """What a person reads; empty prints nothing."""

    json: bool = False
    """Whether the document was asked for."""

    exit_code: int = 0
    """0 where the verb did what it was asked."""

    def printed(self) -> str:
        """Return what belongs on stdout."""
        return strict_json(self.document) if self.json else self.text


def strict_json(value: Any) -> str:
    """Write JSON that every parser reads: what JSON has no number for becomes null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
