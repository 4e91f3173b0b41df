"""Put models into the wrappers of distributed training, on CPU and gloo."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import families


def fsdp2(model: nn.Module, *, bfloat16: bool = False, reshard: bool | None = None) -> nn.Module:
    """Shard every block and the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {} if reshard is None else {"reshard_after_forward": reshard}
    if bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in families.blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def ddp(model: nn.Module, **options: bool) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **options)


def fsdp1(model: nn.Module, *, bfloat16: bool = False) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    kinds = {type(block) for block in families.blocks(model)}
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bfloat16 else None
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(kinds),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        mixed_precision=precision,
    )


WRAPS = {
    "fsdp2": fsdp2,
    "fsdp2-bfloat16": partial(fsdp2, bfloat16=True),
    "fsdp2-kept": partial(fsdp2, reshard=False),
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp1-bfloat16": partial(fsdp1, bfloat16=True),
}


def ranked_seed() -> int:
    """A seed for random operators that differs between ranks, as dropout's does."""
    return 104_729 + 7 * dist.get_rank()


def ranked_step(model: nn.Module, i: int) -> Tensor:
    """One step on data of this rank's own."""
    return families.step(model, i, seed=7919 + dist.get_rank())
