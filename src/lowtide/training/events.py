"""What happens in a run, as records, and the bus that carries them.

    loop ──publish──► Bus ──► console · jsonl · tensorboard · wandb · a class of one's own

The loop publishes and knows no tracker; a tracker subscribes and knows no loop. A subscriber that raises is
reported once, to the log and to the others, and dropped: watching a run never ends it. Only KeyboardInterrupt
and SystemExit, which are meant for the process, pass. Limit: subscribers run in the loop's thread, one after
the other, so one that blocks holds up training; those that talk to a network must bound their waiting
themselves.

Numbers in events may be Python, NumPy or tensor scalars; ``tracking.scalars`` turns them into plain values.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = [
    "Bus",
    "CheckpointSaved",
    "EvaluationDone",
    "Event",
    "Message",
    "RunEnded",
    "RunStarted",
    "StepDone",
    "Subscriber",
]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run begins, or goes on after ``start_step`` steps done before."""

    experiment_id: str
    name: str
    folder: str
    world_size: int
    device: str
    total_steps: int
    start_step: int = 0
    policy: str = ""
    resolved: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The resolved config, secrets redacted."""


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """An optimizer step is done; ``step`` counts from 1."""

    step: int
    loss: Any
    tokens_per_s: Any = None
    learning_rate: Any = None
    grad_norm: Any = None
    peak_bytes: int | None = None
    step_ms: float | None = None
    eta_s: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Metrics of one's own, by name."""


@dataclass(frozen=True, kw_only=True)
class EvaluationDone(Event):
    """An evaluation on held-out data after ``step`` steps."""

    step: int
    loss: Any
    batches: int | None = None
    tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on the disk."""

    step: int
    path: str
    save_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Message(Event):
    """A line for whoever watches."""

    text: str
    level: Literal["info", "warning"] = "info"


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The run is over; the last event."""

    status: str
    steps: int
    wall_s: float | None = None
    error: str | None = None
    summary: Mapping[str, Any] = field(default_factory=dict[str, Any])


@runtime_checkable
class Subscriber(Protocol):
    """Anything with these two methods can watch a run."""

    def handle(self, event: Event) -> None:
        """Take one event; those of no interest are ignored."""
        ...

    def close(self) -> None:
        """Let go of files and connections; called once, after the last event or when dropped."""
        ...


class Bus:
    """Carries events to subscribers, in the order in which they subscribed; a rank may have none."""

    def __init__(self) -> None:
        self._subscribers: list[tuple[str, Subscriber]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Who is subscribed now."""
        return tuple(name for name, _ in self._subscribers)

    def subscribe(self, subscriber: Subscriber, *, name: str | None = None) -> None:
        """Add a subscriber; ``name`` is for messages."""
        self._subscribers.append((name or type(subscriber).__name__, subscriber))

    def publish(self, event: Event) -> None:
        """Hand an event to every subscriber; returns normally whatever they do."""
        for name, subscriber in list(self._subscribers):
            try:
                subscriber.handle(event)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._drop(name, subscriber, error, on=type(event).__name__)

    def say(self, text: str) -> None:
        """Publish a line for whoever watches, and write it to the log."""
        _LOG.info("%s", text)
        self.publish(Message(text=text))

    def warn(self, text: str) -> None:
        """Publish a warning, and write it to the log; where nobody watches, to stderr."""
        _LOG.warning("%s", text)
        if self._subscribers:
            self.publish(Message(text=text, level="warning"))
        else:
            sys.stderr.write(f"warning: {text}\n")

    def close(self) -> None:
        """Close every subscriber, the last first; one that fails is reported to those still open."""
        while self._subscribers:
            name, subscriber = self._subscribers.pop()
            error = _close(subscriber)
            if error is not None:
                self.warn(f"the tracker {name} failed while closing: {_told(error)}")

    def _drop(self, name: str, subscriber: Subscriber, error: BaseException, *, on: str) -> None:
        before = len(self._subscribers)
        self._subscribers = [pair for pair in self._subscribers if pair[1] is not subscriber]
        if len(self._subscribers) == before:
            return  # it failed again on the report of its own failure, and is gone already
        _LOG.debug("the tracker %s failed", name, exc_info=error)
        _close(subscriber)
        self.warn(
            f"the tracker {name} failed on {on} and gets no more events; training goes on. It said: {_told(error)}"
        )


def _close(subscriber: Subscriber) -> BaseException | None:
    try:
        subscriber.close()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error
    return None


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ fails
        return type(error).__name__
