"""What a sweep file may hold. The reference of its fields is the prose under them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["Adjustment", "FailedStatus", "SweepConfig"]

FailedStatus = Literal["out_of_memory", "error", "timeout"]
Settings = dict[str, Any]
Values = Annotated[list[Any], Field(min_length=1)]

_GROWS_MEMORY = (
    "data.batch_size",
    "data.sequence_length",
    "model.dim",
    "model.ffn_dim",
    "model.layers",
    "model.vocab_size",
)


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


class Adjustment(_Part):
    """Settings for the cells that meet a condition."""

    when: Annotated[Settings, Field(min_length=1)]
    """The condition, as in ``leave_out``."""

    settings: Annotated[Settings, Field(min_length=1)]
    """What those cells set besides, by dotted path."""


class SweepConfig(_Part):
    """A grid of training runs over one base config."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")
    """Name of the sweep and of its folder."""

    base: str = Field(min_length=1)
    """The training config that every cell starts from: a path, relative to the sweep file."""

    directory: str = Field(default="runs/sweeps", min_length=1)
    """The folder that holds one folder per sweep. It is made when missing."""

    settings: Settings = Field(default_factory=dict)
    """Fields that every cell sets over the base, by dotted path (``training.steps: 20``)."""

    grid: dict[str, Values] = Field(default_factory=dict)
    """Values for each field, by dotted path; the cells are all combinations, the last field changing fastest. Any
    field of a config: ``policy``, ``data.batch_size``, ``compile``, ``launch.nproc`` (the number of processes)."""

    paired: list[Annotated[dict[str, Values], Field(min_length=1)]] = Field(default_factory=list)
    """Fields that change together: in each entry all lists are equally long, and their first values belong together,
    their second ones, and so on. Each entry is one more dimension of the grid."""

    points: list[Annotated[Settings, Field(min_length=1)]] = Field(default_factory=list)
    """Single cells besides the grid, each a mapping of fields to values."""

    leave_out: list[Annotated[Settings, Field(min_length=1)]] = Field(default_factory=list)
    """Cells of the grid that are not wanted. A cell is left out where it has all values of an entry; a list means any
    of these, ``{min: 4}``, ``{max: 8}`` or both a range. An entry that leaves nothing out is an error."""

    adjust: list[Adjustment] = Field(default_factory=list[Adjustment])
    """Settings for the cells that meet a condition, in order, before ``leave_out``."""

    timeout_s: float = Field(default=3600.0, gt=0, le=10**7)
    """Seconds that a cell may take, with starting and saving. One that takes longer is ended: ``timeout``."""

    grace_s: float = Field(default=10.0, ge=0, le=3600)
    """Seconds between asking a cell to end and killing it."""

    at_once: int = Field(default=1, ge=1, le=1024)
    """Cells that run at the same time. Their times then tell less."""

    devices: list[Annotated[str, Field(min_length=1)]] | None = None
    """CUDA devices of each place (``["0,1", "2,3"]``), one entry for each of ``at_once``; no device may stand twice.
    Left out: every cell sees all devices, which is right where one runs at a time."""

    retry: dict[FailedStatus, Annotated[int, Field(ge=0, le=100)]] = Field(default_factory=dict)
    """How often a cell that ended so is run again at once. What the config itself makes wrong never is."""

    skip: list[FailedStatus] = Field(default=["out_of_memory", "error", "timeout"])
    """What stays as it is when the sweep is resumed: cells that ended so. Cells with another failed status run
    again then; cells that are ok never do."""

    prune: bool = True
    """Whether a cell is skipped that is at least as large in every one of ``prune_fields`` as one that ran out of
    memory, and larger in one, and otherwise the same."""

    prune_fields: list[str] = Field(default=list(_GROWS_MEMORY))
    """Fields that need more memory when they grow."""

    estimate: bool = False
    """Whether the peak of every cell is estimated before the first one runs, to be shown beside the measured one."""

    keep_checkpoints: bool = False
    """Whether cells keep what they save. Otherwise it is deleted once the cell has ended."""

    @model_validator(mode="after")
    def _makes_sense(self) -> SweepConfig:
        for entry in self.paired:
            if len({len(values) for values in entry.values()}) > 1:
                sizes = ", ".join(f"{name} has {len(values)}" for name, values in entry.items())
                raise PydanticCustomError(
                    "paired", "{said}", {"said": f"lists in `paired` must be equally long: {sizes}"}
                )
        places = [d.strip() for entry in self.devices or () for d in entry.split(",")]
        if self.devices is not None and len(self.devices) != self.at_once:
            said = f"`devices` has {len(self.devices)} entries, and `at_once` is {self.at_once}: one entry for each"
            raise PydanticCustomError("devices", "{said}", {"said": said})
        if len(set(places)) != len(places):
            raise PydanticCustomError("devices", "{said}", {"said": "a device stands twice in `devices`"})
        return self
