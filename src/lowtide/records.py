"""What the parts hand to each other: frozen values that know nothing of torch, JSON in and out.

    OpTrace     the operators of one block, forward and backward, and the storages under their tensors
    Estimate    the memory and time of one training step, and what was alive at its peak
    Measurement the same of a step that really ran

JSON is strict: unknown keys, wrong types, NaN and infinities are refused, and a record of a later
``schema_version`` says so. Sizes are bytes, times milliseconds; ``None`` means "not known", never zero.

Over 400 lines: records that refer to each other, almost all of it fields and their prose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lowtide.errors import InputError

__all__ = [
    "CATEGORIES",
    "AliveRow",
    "CallRecord",
    "Category",
    "CategoryBytes",
    "Environment",
    "Estimate",
    "NameRecord",
    "OpRecord",
    "OpTrace",
    "Phase",
    "PhaseBytes",
    "Record",
    "StepTime",
    "StorageRecord",
    "TensorRecord",
    "TimelinePoint",
    "Value",
]

Phase = Literal["forward", "backward", "optimizer"]

Category = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "communication",
    "saved_activations",
    "transient",
    "inputs",
    "logits_and_loss",
]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer_state",
    "communication",
    "saved_activations",
    "transient",
    "inputs",
    "logits_and_loss",
)
"""What memory is for; every live byte counts in exactly one."""


class Value(BaseModel):
    """A frozen part of a record: unknown keys, wrong types and numbers that are not finite are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Environment(Value):
    """Where a record was made; it has no part in what the record says."""

    torch: str
    python: str
    lowtide: str


class Record(Value):
    """A record that stands alone in a file."""

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the record as strict JSON."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            InputError: no JSON, another kind or version of record, or a field that is missing or wrong.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc'])) or 'record'}: {e['msg']}" for e in error.errors()[:5]]
            raise InputError(f"this is no {cls.__name__} of this version of lowtide: {'; '.join(faults)}") from None


class StorageRecord(Value):
    """One place in memory; all its views share it."""

    id: int = Field(ge=0)
    nbytes: int = Field(ge=0)

    role: Literal["parameter", "buffer", "argument", "constant", "made"]
    """Where it comes from; ``made`` by an operator of the trace, all others are there before."""

    name: str | None = None
    """FQN of a parameter or buffer, or the place among the arguments."""

    made_by: int | None = None
    """Index of the operator that made it."""

    last_use: int | None = None
    """Index of the last operator of the same pass that reads or writes it."""

    saved: bool = False
    """Whether autograd kept a tensor on it for backward."""

    returned: bool = False
    """Whether the block's results lie on it."""

    backward: bool = False
    """Whether it was made in backward."""

    freed: int | None = None
    """How many operators had run when it died in this trace; None where it outlived the trace."""

    released: int | None = None
    """How many operators of forward had run when Python let go of it, what autograd keeps aside; None where it outlived
    forward, or where that was not found out."""


class TensorRecord(Value):
    """A tensor as an operator saw it."""

    storage: int | None
    """``id`` of its storage; None for a layout without one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    dtype: str

    @property
    def elements(self) -> int:
        """How many numbers it shows."""
        total = 1
        for size in self.shape:
            total *= size
        return total


class OpRecord(Value):
    """One call of an operator."""

    index: int = Field(ge=0)

    op: str
    """The overload, as in ``aten.mm.default``."""

    phase: Literal["forward", "backward"]

    module: str
    """FQN of the module inside of which it ran, relative to the block; empty for the block itself."""

    forward_op: int | None = None
    """In backward: index of the forward operator whose gradient this is part of, where that is known."""

    inputs: tuple[TensorRecord, ...] = ()
    outputs: tuple[TensorRecord, ...] = ()

    literals: str = ""
    """The arguments that are no tensors, for people."""

    view: bool = False
    """Whether the outputs only look at the storage of an input."""

    writes: tuple[int, ...] = ()
    """``id`` of every storage that it writes in place."""

    random: bool = False
    """Whether it draws random numbers."""

    flops: int | None = None
    """Floating-point operations; None where no formula is known, and the trace's ``assumptions`` say so."""

    bytes_moved: int = 0
    """Bytes of the distinct tensors read and written once; zero for a view."""

    workspace_bytes: int = 0
    """Memory that the kernel allocates and frees inside the call."""

    instead_of: str | None = None
    """What the traced device would have run here, where the target's kernel differs."""

    @property
    def is_blank(self) -> bool:
        """Whether it makes memory and fills nothing in: of the tensors that it is given it reads only the form."""
        return self.op.split(".")[1].startswith(("empty", "new_empty"))


class CallRecord(Value):
    """One call of a module in forward. Places are numbers of operators, or of packed tensors, that came before."""

    module: str
    """FQN, as in ``OpRecord.module``."""

    ops: tuple[int, int]
    """Where it begins and ends among the operators."""

    saved: tuple[int, int]
    """Where it begins and ends among the packed tensors."""

    arguments: tuple[tuple[str, TensorRecord], ...] = ()
    """Name or position, and tensor, of all that it was given; several of one name lie in one container."""

    results: tuple[TensorRecord, ...] = ()


class NameRecord(Value):
    """A value that the model's code gave a name with ``lowtide.checkpoint_name``."""

    name: str
    storage: int
    at: int
    """How many operators had run."""
    module: str = ""
    """FQN of the module that ran."""


class OpTrace(Record):
    """Every operator of one block for one form of inputs, as the target device would run it."""

    kind: Literal["OpTrace"] = "OpTrace"
    schema_version: Literal[1] = 1

    block: str
    """Class of the block."""

    device: str
    """The target."""

    ops: tuple[OpRecord, ...]
    storages: tuple[StorageRecord, ...]

    saved: tuple[TensorRecord, ...] = ()
    """The tensors that autograd packed for backward, in order."""

    saved_at: tuple[int, ...] = ()
    """For each of them, how many operators had run when it was packed; empty where that was not noted."""

    saved_in: tuple[str, ...] = ()
    """For each of them, the module that ran, as in ``OpRecord.module``."""

    asked_at: tuple[int | None, ...] = ()
    """For each of them, how many operators had run when backward first asked for it; None where it never did."""

    calls: tuple[CallRecord, ...] = ()
    """Calls of modules in forward, in the order in which they began; empty where they were not noted."""

    names: tuple[NameRecord, ...] = ()

    assumptions: tuple[str, ...] = ()
    """What was taken for granted, each in a sentence."""

    environment: Environment

    @model_validator(mode="after")
    def _numbered(self) -> Self:
        if any(op.index != i for i, op in enumerate(self.ops)):
            raise ValueError("operators are numbered from 0 in order")
        if any(s.id != i for i, s in enumerate(self.storages)):
            raise ValueError("storages are numbered from 0 in order")
        count = len(self.storages)
        for tensor in self._tensors():
            if tensor.storage is not None and not 0 <= tensor.storage < count:
                raise ValueError(f"a tensor names storage {tensor.storage}, and there are {count}")
        return self

    def _tensors(self) -> Iterator[TensorRecord]:
        yield from self.saved
        for op in self.ops:
            yield from op.inputs
            yield from op.outputs
        for call in self.calls:
            yield from (tensor for _, tensor in call.arguments)
            yield from call.results

    @property
    def forward(self) -> tuple[OpRecord, ...]:
        """The operators of forward."""
        return tuple(op for op in self.ops if op.phase == "forward")

    @property
    def backward(self) -> tuple[OpRecord, ...]:
        """The operators of backward."""
        return tuple(op for op in self.ops if op.phase == "backward")

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward made and that backward needs, each storage once."""
        return sum(s.nbytes for s in self.storages if s.saved and s.role == "made" and not s.backward)

    @property
    def input_bytes(self) -> int:
        """Bytes of the arguments that backward needs."""
        return sum(s.nbytes for s in self.storages if s.saved and s.role == "argument")

    def flops(self, phase: Literal["forward", "backward"]) -> int:
        """Floating-point operations of one pass, over the operators whose formula is known."""
        return sum(op.flops or 0 for op in self.ops if op.phase == phase)


class CategoryBytes(Value):
    """Bytes by what they are for."""

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    communication: int = 0
    saved_activations: int = 0
    transient: int = 0
    inputs: int = 0
    logits_and_loss: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, int]:
        """Return them by name, in the order of ``CATEGORIES``."""
        values: dict[str, Any] = self.model_dump()
        return {name: int(values[name]) for name in CATEGORIES}


class TimelinePoint(Value):
    """Live bytes right after one operator of the step."""

    event: int = Field(ge=0)
    """Number of the change since the step began."""

    phase: Phase
    module: str
    op: str
    live: CategoryBytes


class AliveRow(Value):
    """Storages of one origin that were alive at the peak."""

    category: Category
    module: str
    op: str
    nbytes: int = Field(ge=0)
    count: int = Field(ge=1)


class StepTime(Value):
    """How long one training step takes, and how much of the device it uses."""

    step_ms: float = Field(ge=0)
    forward_ms: float = Field(ge=0)
    """With the loss."""
    backward_ms: float = Field(ge=0)
    """With recompute."""
    optimizer_ms: float = Field(ge=0)

    communication_ms: float = Field(ge=0, default=0)
    """Of all collectives, hidden behind computation or not."""

    tokens_per_s: float | None = None
    """Of all ranks together."""

    model_flops: int = Field(ge=0, default=0)
    """Of the products that the model asks for, forward and backward, on this rank; recompute is none of them."""

    hardware_flops: int = Field(ge=0, default=0)
    """Of all products that run, recompute too."""

    mfu: float | None = None
    """Model FLOPs of the step, as a share of what the device could do in its time."""

    hfu: float | None = None
    """The same of hardware FLOPs."""


class Estimate(Record):
    """Memory, and where it is known time, of one training step on one rank."""

    kind: Literal["Estimate"] = "Estimate"
    schema_version: Literal[1] = 1

    peak_bytes: int = Field(ge=0)
    """The most bytes allocated at once."""

    at_peak: CategoryBytes
    """What those bytes were for; they add up to ``peak_bytes``."""

    peak_phase: Phase
    peak_module: str
    peak_op: str

    category_peaks: CategoryBytes
    """The most that each category reached, each at its own time."""

    alive_at_peak: tuple[AliveRow, ...] = ()
    """Module and operator of what was alive at the peak, the largest first."""

    timeline: tuple[TimelinePoint, ...] = ()
    """The step in order; long ones are thinned out, and keep the peak and every change of phase."""

    method: Literal["fake step", "model of traces"]
    device: str
    world_size: int = Field(ge=1)
    rank: int = Field(ge=0)
    policy: str = "none"

    time: StepTime | None = None
    """Time of the step; None where no speeds of the device are known."""

    assumptions: tuple[str, ...] = ()
    environment: Environment

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.at_peak.total != self.peak_bytes:
            raise ValueError(
                f"the categories at the peak add up to {self.at_peak.total}, and peak_bytes is {self.peak_bytes}"
            )
        return self

    @property
    def step_ms(self) -> float | None:
        """Time of the step in milliseconds, where it is known."""
        return None if self.time is None else self.time.step_ms

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks a second, where they are known."""
        return None if self.time is None else self.time.tokens_per_s

    def fits(self, limit_bytes: int) -> bool:
        """Whether the peak stays within a limit."""
        return self.peak_bytes <= limit_bytes


class PhaseBytes(Value):
    """The most bytes alive in each pass of a step; None where it was not seen."""

    forward: int | None = None
    backward: int | None = None
    optimizer: int | None = None


class Measurement(Record):
    """One training step as it really ran; the largest figures over all ranks."""

    kind: Literal["Measurement"] = "Measurement"
    schema_version: Literal[1] = 1

    peak_bytes: int | None
    """The most bytes allocated at once in one step; None where that cannot be told, and ``note`` says why."""

    start_bytes: int | None = None
    """Of these, what was alive when the step began: parameters and optimizer states, say."""

    phase_peaks: PhaseBytes = PhaseBytes()
    """The most in each pass. Over several processes on a CPU they are upper bounds."""

    method: str
    """How the peak was found."""
    note: str = ""

    step_ms: float = Field(ge=0)
    """Median of the repeats, as all times here; of the slowest rank."""
    forward_ms: float = Field(ge=0)
    """From the start of the step to the first backward, and between backwards under accumulation."""
    backward_ms: float = Field(ge=0)
    optimizer_ms: float = Field(ge=0)
    """Of ``optimizer.step`` alone."""
    other_ms: float = Field(ge=0)
    """What is none of these: clipping, ``zero_grad``, the loop itself."""
    step_times_ms: tuple[float, ...]
    """Of this rank, repeat by repeat."""

    warm_up: int = Field(ge=0)
    repeats: int = Field(ge=1)
    device: str
    world_size: int = Field(ge=1)
    environment: Environment

    @property
    def rebased_bytes(self) -> int | None:
        """The peak on top of what was alive when the step began."""
        if self.peak_bytes is None or self.start_bytes is None:
            return None
        return self.peak_bytes - self.start_bytes
