"""``RunRecord``: what became of one run, or of one cell of a sweep, in one strict JSON document.

    status    ok              ``result`` holds its numbers
              out_of_memory   an allocation failed on any rank, or the kernel's killer came
              error           anything else went wrong; ``reason`` says what
              timeout         it was not done in time, and was ended
              skipped         it never ran, because one like it ran out of memory
              stopped         a signal came and the run saved; it can go on (never in a sweep)
              running         it had not ended when it was looked at (never in a sweep)

There is a ``result`` where the status is ``ok`` and nowhere else: a failed run has no numbers, never zeros.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lowtide.records import Record, Value

__all__ = [
    "STATUSES",
    "AttemptRecord",
    "OpRow",
    "PeakOfRank",
    "Predicted",
    "RunRecord",
    "RunResult",
    "RunStatus",
    "SavedBytesOf",
]

RunStatus = Literal["ok", "out_of_memory", "error", "timeout", "skipped", "stopped", "running"]
STATUSES: tuple[RunStatus, ...] = ("ok", "out_of_memory", "error", "timeout", "skipped", "stopped", "running")


class PeakOfRank(Value):
    """The true peak of one rank in the measured step."""

    rank: int = Field(ge=0)

    peak_bytes: int | None = Field(default=None, ge=0)
    """The most bytes allocated at once; None where no number can be trusted."""

    method: str
    """What measured it."""

    note: str = ""
    """Why there is no number, or what it leaves out."""


class SavedBytesOf(Value):
    """What one forward keeps for backward under one policy, counted on fake tensors."""

    policy: str
    checkpointed: int = Field(ge=0)
    total_bytes: int = Field(ge=0)


class OpRow(Value):
    """Calls of one operator in a profiled step, inside one module."""

    op: str
    module: str
    phase: str
    calls: int = Field(ge=0)
    time_ms: float = Field(ge=0)
    allocated_bytes: int


class RunResult(Value):
    """The numbers of a run that reached its end. None means "not measured"."""

    steps: int = Field(ge=0)
    loss_first: float | None = None
    loss_last: float | None = None
    loss_held_out: float | None = None

    tokens_per_s: float | None = None
    """Of all ranks together, over the median step without the first two."""

    model_flops_per_s: float | None = None
    """Of all ranks together; what is recomputed is not counted."""

    mfu: float | None = None
    """Model FLOPs as a share of what the devices could do, where that is known."""

    hfu: float | None = None
    """The same with what was recomputed."""

    policy: str = ""
    """What applying the policy did, in words."""

    peaks: tuple[PeakOfRank, ...] = ()
    saved: tuple[SavedBytesOf, ...] = ()
    wall_s: float | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The largest peak over the ranks; None where one of them is not known."""
        known = [each.peak_bytes for each in self.peaks if each.peak_bytes is not None]
        return max(known) if known and len(known) == len(self.peaks) else None


class Predicted(Value):
    """What an estimate said before the run."""

    peak_bytes: int = Field(ge=0)

    timeline: tuple[tuple[str, int], ...] = ()
    """Phase and live bytes, in the order of the step, thinned out."""


class AttemptRecord(Value):
    """One try at a cell."""

    status: RunStatus
    reason: str | None = None
    exit_code: int | None = None
    """None where a signal ended it, or it never ran."""
    folder: str | None = None
    """Its run folder, relative to the record's."""
    started_at: str
    wall_s: float = Field(ge=0)
    pids: tuple[int, ...] = ()
    """Every process of it that was seen; none of them lives any more."""


class RunRecord(Record):
    """What became of one run."""

    kind: Literal["RunRecord"] = "RunRecord"
    schema_version: Literal[1] = 1

    id: str
    """Key of the cell within its sweep, or the experiment id."""

    label: str
    """What sets it apart, for people."""

    sweep: str | None = None
    """Name of the sweep that it is a cell of."""

    number: int | None = Field(default=None, ge=0)
    """Its place in the sweep's grid."""

    status: RunStatus

    reason: str | None = None
    """Why it is not ok, in one message."""

    error_type: str | None = None
    error_rank: int | None = None

    settings: dict[str, Any] = Field(default_factory=dict)
    """What the cell puts over the sweep's base config, by dotted path."""

    config: dict[str, Any] = Field(default_factory=dict)
    """The whole config, every field; what the environment gave stands there by name."""

    world_size: int | None = Field(default=None, ge=1)
    device: str | None = None
    started_at: str | None = None
    ended_at: str | None = None

    attempts: tuple[AttemptRecord, ...] = ()
    """In order; the last one is what the record says."""

    predicted: Predicted | None = None
    result: RunResult | None = None

    operators: tuple[OpRow, ...] = ()
    """The costliest operators of a profiled step, where there was one."""

    versions: dict[str, str] = Field(default_factory=dict)
    """Of torch, Python and lowtide, where the run told them."""

    @model_validator(mode="after")
    def _numbers_only_where_it_ended_well(self) -> Self:
        if (self.status == "ok") != (self.result is not None):
            raise ValueError(f"a run of status {self.status} has {'no ' if self.result is None else 'a '}result")
        if (self.status == "ok") == (self.reason is not None):
            raise ValueError(f"a run of status {self.status} has {'no ' if self.reason is None else 'a '}reason")
        return self
