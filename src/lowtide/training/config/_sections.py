"""The sections of a training config. The prose under each field is what the reference page is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from lowtide.policy import (
    EveryNthLayer,
    Full,
    MemoryBudget,
    NoPolicy,
    PlanPolicy,
    Rules,
    SelectiveOp,
    SomeLayers,
    named_policy,
)
from lowtide.training.optim_kinds import ScheduleConfig
from lowtide.training.parallelize_kinds import (
    DdpConfig,
    Fsdp1Config,
    Fsdp2Config,
    NoShardingConfig,
    PrecisionConfig,
)
from lowtide.training.registry import Component, Family
from lowtide.training.section import ByKind, Section

__all__ = ["TrainConfig"]

Steps = Annotated[int, Field(ge=1)]


class Run(Section):
    """What the run is called, where its folder goes, and the seed of everything random."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]{1,100}$")
    """The run's name: letters, digits, ``.``, ``_`` and ``-``. ``--resume auto`` continues the newest run of the
    same name."""

    directory: str = Field(default="runs", min_length=1)
    """The folder that holds one folder per run. It is made when missing."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """The seed of weights, data order and dropout. Ranks draw data apart, whatever the seed."""


class Launch(Section):
    """The processes that lowtide starts when it does not already run under ``torchrun``."""

    nproc: int | None = Field(default=None, ge=1)
    """Processes on this machine. Left out: one per GPU, or two where there is no GPU."""

    timeout_s: float = Field(default=600.0, ge=1, le=10**6)
    """Seconds that a collective may wait for the other processes before the run fails."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads per process. Left out: the cores shared evenly by the processes."""


class Training(Section):
    """How long and in which steps the model is trained."""

    steps: Steps = 100
    """Optimizer steps of the run."""

    grad_accumulation: int = Field(default=1, ge=1)
    """Batches whose gradients are summed into one step. Activation memory stays that of one batch."""

    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients whose norm over all parameters is larger are scaled down to it; ``null`` never clips."""

    deterministic: bool = False
    """Whether only deterministic kernels are allowed. A run then repeats bit by bit on the same machine, and an
    operator without such a kernel is an error."""


class Evaluation(Section):
    """When the loss on held-out data is taken; it always is at the end."""

    every: Steps | None = None
    """Steps between evaluations. Left out: only at the end."""

    batches: int = Field(default=8, ge=1)
    """Batches per process in one evaluation."""


class Checkpoint(Section):
    """When the training state is saved; it always is at the end."""

    every: Steps | None = None
    """Steps between checkpoints. Left out: only at the end."""

    keep_last: int = Field(default=2, ge=1)
    """How many checkpoints of the run are kept; older ones are deleted once a newer one is complete."""


class Profile(Section):
    """Which steps of the run are profiled: by operator and module, with a trace for Perfetto or Chrome."""

    wait: int = Field(default=3, ge=2)
    """Steps that pass first; in the second the peak is measured, for which the profiler must be free."""

    warmup: int = Field(default=1, ge=0)
    """Steps that run under the profiler and are not kept."""

    active: int = Field(default=1, ge=1, le=100)
    """Steps that are kept."""

    trace: bool = True
    """Whether each rank writes a Chrome trace beside its log, and on CUDA a memory snapshot."""


class Logging(Section):
    """Where results go, and how often."""

    every: Steps = 10
    """Steps between records of metrics. The first and the last step are always recorded."""

    trackers: tuple[Annotated[Component, Family("tracker")], ...] = Field(
        default_factory=lambda: _mappings("console", "jsonl")
    )
    """What receives the run's events. One that fails is reported once and dropped; training goes on."""


def _mappings(*kinds: str) -> Any:
    return tuple({"kind": kind} for kind in kinds)


def _mapping(kind: str) -> Any:
    return {"kind": kind}


_BY_NAME = BeforeValidator(lambda value: (named_policy(value) or value) if isinstance(value, str) else value)


class TrainConfig(Section):
    """Everything that a training run is made of."""

    run: Run = Run()
    """What the run is called, where its folder goes, and its seed."""

    launch: Launch = Launch()
    """The processes that lowtide starts by itself."""

    model: Annotated[Component, Family("model")]
    """The model to train."""

    data: Annotated[Component, Family("data")]
    """Where batches come from. Batch sizes are per process."""

    policy: Annotated[
        NoPolicy | Full | EveryNthLayer | SomeLayers | SelectiveOp | Rules | MemoryBudget | PlanPolicy,
        ByKind(),
        _BY_NAME,
    ] = NoPolicy()
    """Which activations are kept and which are recomputed in backward. Gradients stay the same, bit by bit. The name
    of a preset (`torchtitan`, `megatron_selective`, `save_attention`, `pointwise_only`) stands for its policy."""

    sharding: Annotated[Fsdp2Config | Fsdp1Config | DdpConfig | NoShardingConfig, ByKind()] = Fsdp2Config()
    """How parameters, gradients and optimizer state are spread over processes."""

    precision: PrecisionConfig = PrecisionConfig()
    """The types of parameters, computation and gradient reduction."""

    compile: bool = False
    """Whether every block is compiled with ``torch.compile``. The first step then takes much longer."""

    estimate: bool = True
    """Whether the peak memory of a step is estimated before the run, and told beside what was measured. Takes seconds,
    more with the number of layers; no memory."""

    optimizer: Annotated[Component, Family("optimizer")] = Field(default_factory=lambda: _mapping("adamw"))
    """What turns gradients into steps."""

    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate changes over the run."""

    training: Training = Training()
    """How long and in which steps the model is trained."""

    evaluation: Evaluation = Evaluation()
    """When the loss on held-out data is taken."""

    checkpoint: Checkpoint = Checkpoint()
    """When the training state is saved."""

    profile: Profile | None = None
    """Steps to profile. Left out: none; ``profile: {}`` takes the defaults."""

    logging: Logging = Field(default_factory=Logging)
    """Where results go, and how often."""

    @model_validator(mode="after")
    def _fields_agree(self) -> TrainConfig:
        wrong = list(_disagreements(self))
        if wrong:
            raise ValidationError.from_exception_data("TrainConfig", wrong)
        return self


def _disagreements(config: TrainConfig) -> list[InitErrorDetails]:
    found: list[InitErrorDetails] = []

    def disagree(message: str, *path: str, value: object) -> None:
        kind = PydanticCustomError("disagreement", "{message}", {"message": message})
        found.append(InitErrorDetails(type=kind, loc=path, input=value))

    steps, warmup = config.training.steps, config.schedule.warmup_steps
    if warmup > steps:
        disagree(f"legal: 0 to training.steps, which is {steps}", "schedule", "warmup_steps", value=warmup)
    kind, nproc = config.sharding.kind, config.launch.nproc
    if kind == "none" and nproc is not None and nproc > 1:
        message = f"legal with launch.nproc {nproc}: fsdp2, fsdp1, ddp (each process would train a model of its own)"
        disagree(message, "sharding", "kind", value=kind)
    parameters, compute = config.precision.parameters, config.precision.compute
    if kind in ("ddp", "none") and parameters != compute:
        message = f"legal with sharding.kind {kind}: {parameters}, as precision.parameters (only fsdp casts)"
        disagree(message, "precision", "compute", value=compute)
    if kind == "fsdp1" and config.policy.kind not in ("none", "full"):
        disagree("legal with sharding.kind fsdp1: none, full", "policy", "kind", value=config.policy.kind)
    return found
