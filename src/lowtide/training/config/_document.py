"""YAML text to plain values, each with the line it came from.

Built from parser events in one loop, so depth costs no stack and an alias is the very object it names. Differs
from PyYAML's safe loader on purpose: scalars follow the core schema of YAML 1.2 (``3e-4`` is a number; ``on``,
``off``, ``yes``, ``no`` and dates are text), a key may stand once in a mapping, keys are text, and tags, merge
keys and second documents are refused. Limits stand against files that grow when they are expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from lowtide.errors import ConfigError

__all__ = [
    "FLOAT",
    "INT",
    "MAX_BYTES",
    "MAX_DEPTH",
    "Mark",
    "Problem",
    "Seq",
    "Shown",
    "Table",
    "read_yaml",
    "report",
    "tell",
    "written",
]

MAX_BYTES = 512 * 1024
MAX_DEPTH = 40
MAX_ALIASES = 200
MAX_DIGITS = 400

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_TEXT_TAG = "tag:yaml.org,2002:str"


@dataclass(frozen=True)
class Mark:
    """Where a value stands: a line of a file, or a ``--set`` argument."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config."""

    mark: Mark
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.mark}: {self.path}: {self.message}" if self.path else f"{self.mark}: {self.message}"


class Table(dict[str, Any]):
    """A mapping that knows the line of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[str, Mark] = {}
        self.aliases: set[str] = set()

    def put(self, key: str, value: Any, mark: Mark) -> None:
        """Set a value and where it stands."""
        self[key] = value
        self.marks[key] = mark


class Seq(list[Any]):
    """A list that knows the line of each item."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[int, Mark] = {}
        self.aliases: set[int] = set()

    def put(self, index: int, value: Any, mark: Mark) -> None:
        """Set an item, or append it at the end, and where it stands."""
        if index == len(self):
            self.append(value)
        else:
            self[index] = value
        self.marks[index] = mark


class Shown(str):
    """Text that came from the environment; ``shown`` stands in its place wherever it is printed or written."""

    shown: str

    def __new__(cls, value: str, shown: str) -> Shown:
        """Pair the text with what to show for it."""
        self = super().__new__(cls, value)
        self.shown = shown
        return self


def step(key: str | int) -> str:
    """Write one key for a dotted path; what would be misread there is quoted."""
    text = str(key)
    shown = text if re.fullmatch(r"[\w-]+", text) else repr(text)
    return shown if len(shown) <= 60 else f"{shown[:50]}..."


def tell(value: object) -> str:
    """Show a value in a message: short, on one line, and without what the environment gave."""
    if isinstance(value, Shown):
        return value.shown
    if isinstance(value, Table):
        text = "{" + ", ".join(f"{step(k)}: {tell(v)}" for k, v in list(value.items())[:4]) + "}"
    elif isinstance(value, Seq):
        text = "[" + ", ".join(tell(v) for v in value[:4]) + "]"
    elif isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    else:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def written(value: str) -> str:
    """Write text so that reading it again gives the same: ``${`` escaped, what the environment gave by name."""
    return value.shown if isinstance(value, Shown) else value.replace("${", "$${")


def report(problems: list[Problem], source: str) -> ConfigError:
    """Join all problems of a config into one error, each told once, in the order of the lines."""
    lines = list(dict.fromkeys(str(p) for p in sorted(problems, key=lambda p: p.mark.line or 0)))
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError("\n  ".join([f"{source}: {len(lines)} errors", *lines]))


def read_yaml(text: str, *, source: str, first_line: int | None = 1) -> Any:
    """Parse one YAML document.

    Args:
        text: the document.
        source: what to call it in messages.
        first_line: the number of its first line; None where lines mean nothing, as in ``--set``.

    Raises:
        ConfigError: it is no YAML, or uses what is refused here; all such places are named.
    """
    reader = _Reader(source, first_line)
    value = reader.read(text)
    if reader.problems:
        raise report(reader.problems, source)
    return value


@dataclass
class _Open:
    box: Table | Seq
    anchor: str | None
    key: str | None = None
    mark: Mark | None = None

    def wants_key(self) -> bool:
        return isinstance(self.box, Table) and self.key is None


class _Reader:
    def __init__(self, source: str, first_line: int | None) -> None:
        self.source, self.first_line = source, first_line
        self.problems: list[Problem] = []
        self._stack: list[_Open] = []
        self._anchors: dict[str, Any] = {}
        self._aliases = 0
        self._documents = 0
        self._root: Any = None

    def read(self, text: str) -> Any:
        for event in self._events(text):
            if isinstance(event, yaml.AliasEvent):
                self._alias(event)
            elif isinstance(event, yaml.ScalarEvent):
                self._scalar(event)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                self._start(event)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self._end()
            elif isinstance(event, yaml.DocumentStartEvent):
                self._documents += 1
                if self._documents > 1:
                    raise self._fatal(event, "a second document starts here; a config is one document")
        return self._root

    def _events(self, text: str) -> Iterator[yaml.Event]:
        try:
            yield from yaml.parse(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = None if mark is None else mark.line
            said = " ".join(part for part in (error.problem, error.context) if part)
            raise ConfigError(str(Problem(self._mark(line), "", f"this is not YAML: {said}"))) from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.source}: this is not YAML: {str(error).splitlines()[0]}") from None
        except (ValueError, OverflowError, LookupError, RecursionError) as error:
            # PyYAML lets these out for some escapes and directives.
            raise ConfigError(f"{self.source}: this is not YAML: {error}") from None

    def _mark(self, line: int | None) -> Mark:
        shown = None if line is None or self.first_line is None else line + self.first_line
        return Mark(self.source, shown)

    def _mark_of(self, event: yaml.Event) -> Mark:
        return self._mark(None if event.start_mark is None else event.start_mark.line)

    def _path(self) -> str:
        parts = [len(frame.box) if isinstance(frame.box, Seq) else frame.key for frame in self._stack]
        return ".".join(step(part) for part in parts if part is not None)

    def _problem(self, event: yaml.Event, message: str) -> Problem:
        return Problem(self._mark_of(event), self._path(), message)

    def _fatal(self, event: yaml.Event, message: str) -> ConfigError:
        return report([*self.problems, self._problem(event, message)], self.source)

    def _alias(self, event: yaml.AliasEvent) -> None:
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            raise self._fatal(event, f"more than {MAX_ALIASES} aliases")
        if event.anchor not in self._anchors:
            raise self._fatal(event, f"*{event.anchor} names no anchor above it")
        value = self._anchors[event.anchor]
        if any(value is frame.box for frame in self._stack):
            raise self._fatal(event, f"*{event.anchor} stands inside what it names")
        if self._stack and self._stack[-1].wants_key():
            raise self._fatal(event, f"*{event.anchor} stands as a key; keys are text")
        if self._stack and isinstance(value, Table | Seq):
            frame = self._stack[-1]
            aliases: set[Any] = frame.box.aliases
            aliases.add(len(frame.box) if isinstance(frame.box, Seq) else frame.key)
        self._add(value, event)

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        if _SURROGATE.search(event.value):
            self.problems.append(self._problem(event, "text with half a surrogate pair, which no file can hold"))
            event.value = _SURROGATE.sub("?", event.value)
        if self._stack and self._stack[-1].wants_key():
            self._key(event)
            return
        value = self._value(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        self._add(value, event)

    def _key(self, event: yaml.ScalarEvent) -> None:
        frame, key = self._stack[-1], event.value
        if key == "<<" and event.implicit[0]:
            self.problems.append(self._problem(event, "merge keys (<<) are not used here; refer with ${section}"))
        frame.key, frame.mark = key, self._mark_of(event)
        first = frame.box.marks.get(key) if isinstance(frame.box, Table) else None
        if first is not None:
            self.problems.append(self._problem(event, f"this key stands twice, first at {first}"))

    def _value(self, event: yaml.ScalarEvent) -> Any:
        self._refuse_tag(event)
        if not event.implicit[0] or event.style not in (None, ""):
            return event.value
        try:
            return plain_value(event.value)
        except ValueError as error:
            self.problems.append(self._problem(event, str(error)))
            return 0

    def _refuse_tag(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
        if event.tag is not None and event.tag not in ("!", _TEXT_TAG):
            self.problems.append(self._problem(event, f"the tag {event.tag!r} is refused; a config holds plain values"))

    def _start(self, event: yaml.CollectionStartEvent) -> None:
        self._refuse_tag(event)
        if self._stack and self._stack[-1].wants_key():
            raise self._fatal(event, "a list or mapping stands as a key; keys are text")
        if len(self._stack) >= MAX_DEPTH:
            raise self._fatal(event, f"nested more than {MAX_DEPTH} deep")
        box = Table() if isinstance(event, yaml.MappingStartEvent) else Seq()
        if event.anchor is not None:
            self._anchors[event.anchor] = box
        self._add(box, event)
        self._stack.append(_Open(box, event.anchor))

    def _end(self) -> None:
        self._stack.pop()
        self._close_entry()

    def _add(self, value: Any, event: yaml.Event) -> None:
        if not self._stack:
            self._root = value
            return
        frame = self._stack[-1]
        if isinstance(frame.box, Seq):
            frame.box.put(len(frame.box), value, self._mark_of(event))
        else:
            assert frame.key is not None
            assert frame.mark is not None
            frame.box.put(frame.key, value, frame.mark)
        if not isinstance(event, yaml.CollectionStartEvent):
            self._close_entry()

    def _close_entry(self) -> None:
        if self._stack:
            self._stack[-1].key = None


def plain_value(text: str) -> Any:
    """Read a plain scalar by the core schema of YAML 1.2.

    Raises:
        ValueError: a number with more digits than any use has.
    """
    if text in _NULL:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    if INT.fullmatch(text) or FLOAT.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits; at most {MAX_DIGITS} are read")
        if INT.fullmatch(text):
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    return text
