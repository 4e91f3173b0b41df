"""How a config says that a model is sharded, and in which precision it computes; no torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lowtide.training.section import Section

__all__ = [
    "DdpConfig",
    "Dtype",
    "Fsdp1Config",
    "Fsdp2Config",
    "NoShardingConfig",
    "PrecisionConfig",
    "Sharding",
]

Dtype = Literal["float32", "bfloat16"]


class Fsdp2Config(Section):
    """``fully_shard`` on every block and on the root: parameters, gradients, optimizer states are split."""

    kind: Literal["fsdp2"] = "fsdp2"

    reshard_after_forward: bool = True
    """Whether a block's whole parameters are freed after its forward and gathered again for backward. Off,
    they stay: more memory, a third less communication."""

    cpu_offload: bool = False
    """Whether shards live on the host and travel to the GPU for use. Much slower; no effect on a CPU."""


class Fsdp1Config(Section):
    """The older FullyShardedDataParallel, kept for comparison. Policies: ``none`` and ``full``."""

    kind: Literal["fsdp1"] = "fsdp1"


class DdpConfig(Section):
    """DistributedDataParallel: every rank holds everything, gradients are averaged."""

    kind: Literal["ddp"] = "ddp"


class NoShardingConfig(Section):
    """Nothing: for one process."""

    kind: Literal["none"] = "none"


Sharding = Annotated[
    Fsdp2Config | Fsdp1Config | DdpConfig | NoShardingConfig,
    Field(discriminator="kind"),
]
"""Any way of sharding, told apart by ``kind``."""


class PrecisionConfig(Section):
    """Types of numbers."""

    parameters: Dtype = "float32"
    """What parameters, gradients and optimizer states are kept in."""

    compute: Dtype = "float32"
    """What forward and backward compute in. It may differ from ``parameters`` under fsdp2 and fsdp1, which
    cast as they gather; otherwise both must be the same."""

    reduce: Dtype = "float32"
    """What gradients are summed over ranks in."""
