"""The trainer's own models and one plain training step, for tests of its parts on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.training.model.forward import forward_logits
from lowtide.training.model.kinds import DecoderConfig, HuggingFaceConfig
from lowtide.training.parallelize import Parallelized, parallelize
from lowtide.training.parallelize_kinds import (
    DdpConfig,
    Fsdp1Config,
    Fsdp2Config,
    NoShardingConfig,
    PrecisionConfig,
)

HF = Path(__file__).parents[1] / "data" / "hf"
CPU = torch.device("cpu")
SHARDINGS: dict[str, Any] = {
    "fsdp2": Fsdp2Config(),
    "fsdp2-kept": Fsdp2Config(reshard_after_forward=False),
    "fsdp1": Fsdp1Config(),
    "ddp": DdpConfig(),
    "none": NoShardingConfig(),
}
SELECTIVE = {"kind": "selective_op", "save": ["sdpa", {"op": "matmul", "keep": "1/2"}]}
POLICIES: dict[str, Any] = {"none": {"kind": "none"}, "full": {"kind": "full"}, "selective_op": SELECTIVE}


def build(kind: str = "decoder", *, seed: int = 3, **fields: Any) -> nn.Module:
    """Make a model with the same weights at every call and on every rank."""
    torch.manual_seed(seed)
    if kind == "decoder":
        small = {"vocab_size": 64, "dim": 32, "layers": 3, "heads": 4, "kv_heads": 2}
        return DecoderConfig(**{**small, **fields}).build()
    return HuggingFaceConfig(config=HF / kind / "config.json").build()


def batch(rank: int, step: int = 0, *, vocab: int = 64) -> Tensor:
    """Tokens [2, 17] that differ by rank and step."""
    chance = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocab, (2, 17), generator=chance)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = forward_logits(model, tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def prepare(
    model: nn.Module, *, sharding: str, policy: str = "none", compute: str = "float32", **options: Any
) -> Parallelized:
    return parallelize(
        model,
        policy=POLICIES[policy],
        sharding=SHARDINGS[sharding],
        precision=PrecisionConfig(compute=compute),
        device=CPU,
        **options,
    )


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by bare name; collective where they are sharded."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

    from lowtide.training.optim import named_bare_parameters

    if isinstance(model, Fsdp1):
        with Fsdp1.summon_full_params(model, with_grads=True):
            return {n: _whole(p.grad) for n, p in named_bare_parameters(model)}
    return {n: _whole(p.grad) for n, p in named_bare_parameters(model)}


def _whole(value: Tensor | None) -> Tensor:
    assert value is not None
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def mean_gradients(*models: nn.Module) -> dict[str, Tensor]:
    """The mean over single-process models, summed in float32 as the reduction does."""
    totals: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            totals[name] = totals.get(name, torch.zeros(())) + parameter.grad.float() / len(models)
    return totals
