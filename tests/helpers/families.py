"""The five families that the law is shown for, each tiny, and the policies of its matrix."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import models
from tests.helpers.models import Spec

FAMILIES = ("decoder", "llama", "qwen3", "gpt2", "gemma")
LAYERS = 3

# Attention with dropout has no fused kernel on a CPU: the rule for it may then match nothing.
_SDPA = {"op": "sdpa", "optional": True}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "every second layer": {"kind": "every_nth_layer", "n": 2},
    "every third layer": {"kind": "every_nth_layer", "n": 3},
    "two layers in three": {"kind": "some_layers", "checkpoint": "2/3"},
    "layers 0 and 2": {"kind": "some_layers", "checkpoint": [0, 2]},
    "matmul 1/2": {"kind": "selective_op", "save": [{"op": "matmul", "keep": "1/2"}]},
    "matmul 2/3": {"kind": "selective_op", "save": [{"op": "matmul", "keep": "2/3"}]},
    "matmul": {"kind": "selective_op", "save": ["matmul"]},
    "sdpa": {"kind": "selective_op", "save": [_SDPA]},
    "sdpa, matmul 1/2": {"kind": "selective_op", "save": [_SDPA, {"op": "matmul", "keep": "1/2"}]},
    "sdpa, matmul 2/3": {"kind": "selective_op", "save": [_SDPA, {"op": "matmul", "keep": "2/3"}]},
    "sdpa, matmul": {"kind": "selective_op", "save": [_SDPA, "matmul"]},
}


@dataclass(frozen=True)
class Cell:
    family: str
    dtype: str
    dropout: bool
    policy: str

    def __str__(self) -> str:
        return f"{self.family}-{self.dtype}-{'dropout' if self.dropout else 'still'}-{self.policy}"


def build(family: str, *, dtype: torch.dtype = torch.float32, dropout: bool = False, layers: int = LAYERS) -> nn.Module:
    """Make a model in training mode, the same at every call."""
    p = 0.2 if dropout else 0.0
    if family == "decoder":
        return models.build(Spec(layers=layers, dropout=p, dtype=dtype))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(15_485_863)
        model = models.randomized(_hugging_face(family, p, layers))
    return model.to(dtype).train()


def _hugging_face(family: str, p: float, layers: int) -> nn.Module:
    import transformers as hf

    common = {"vocab_size": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt2":
        config = hf.GPT2Config(
            n_embd=32,
            n_layer=layers,
            n_head=4,
            n_positions=32,
            resid_pdrop=p,
            embd_pdrop=p,
            attn_pdrop=p,
            **common,
        )
        return hf.GPT2LMHeadModel(config)
    kinds = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "gemma": (hf.GemmaConfig, hf.GemmaForCausalLM),
    }
    config_class, model_class = kinds[family]
    config = config_class(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        attention_dropout=p,
        **common,
    )
    return model_class(config)


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated layers of any of the families."""
    inner: Any = getattr(model, "model", getattr(model, "transformer", model))
    return list(inner.h if hasattr(inner, "h") else inner.layers)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    bare = getattr(model, "module", model)
    if hasattr(bare, "config"):
        return model(input_ids=tokens, use_cache=False).logits
    return model(tokens)


def step(model: nn.Module, i: int, *, seed: int = 7919) -> Tensor:
    """Forward and backward of step i; the loss."""
    tokens = models.tokens(Spec(), seed=seed, step=i)
    loss = models.loss_of(logits_of(model, tokens), tokens)
    loss.backward()
    return loss


def builder(family: str, dtype: torch.dtype, dropout: bool) -> Callable[[], nn.Module]:
    return partial(build, family, dtype=dtype, dropout=dropout)


def matrix(policies: Iterable[str] = POLICIES, *, seed: int, extra: int = 0) -> list[Any]:
    """All cells as parameters; those outside a seeded slice, in which any two values meet, are `full`."""
    cells = [Cell(*c) for c in product(FAMILIES, ("float32", "bfloat16"), (False, True), policies)]
    chosen = pairwise(cells, seed=seed, extra=extra)
    return [pytest.param(c, id=str(c), marks=() if c in chosen else pytest.mark.full) for c in cells]


def pairwise(cells: Sequence[Cell], *, seed: int, extra: int = 0) -> set[Cell]:
    """Choose cells, at random but always the same, until every two values that can meet have met."""
    shuffled = list(cells)
    random.Random(seed).shuffle(shuffled)
    met: set[Any] = set()
    chosen: set[Cell] = set()
    for cell in shuffled:
        values = list(enumerate((cell.family, cell.dtype, cell.dropout, cell.policy)))
        pairs = {(a, b) for a in values for b in values if a < b}
        if not pairs <= met or extra > 0:
            extra -= pairs <= met
            chosen.add(cell)
            met |= pairs
    return chosen


FULL: dict[str, Any] = {"kind": "full"}
SELECTIVE: dict[str, Any] = {"kind": "selective_op", "save": [{"op": "matmul", "keep": "1/2"}]}
both = pytest.mark.parametrize("policy", [FULL, SELECTIVE], ids=["full", "selective_op"])


def spec_step(model: nn.Module, i: int, *, spec: Spec | None = None) -> Tensor:
    """Forward and backward of step i on tokens of the spec's sizes; the loss."""
    drawn = models.tokens(spec, step=i)
    loss = models.loss_of(model(drawn), drawn)
    loss.backward()
    return loss
