"""Architectures at full size: configs of transformers, under fake tensors, and what their blocks are called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.regions import find_blocks
from lowtide.tracing import as_with_real_tensors, fake_building


@dataclass(frozen=True)
class Architecture:
    name: str
    config: Callable[[], Any]
    batch: int = 1
    tokens: int = 8192
    inputs: str = "tokens"
    attention: str = "sdpa"


def _llama(d: int, hidden: int, heads: int, kv: int, **more: Any) -> Any:
    return hf.LlamaConfig(
        hidden_size=d, intermediate_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, vocab_size=128256,
        num_hidden_layers=2, **more,
    )  # fmt: skip


# Two layers each: blocks of one kind cost alike. Llama-3 405B stands here as one of 8 tensor-parallel ranks computes
# it (heads and hidden size divided by 8), without the collectives.
ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("Llama-3 8B", lambda: _llama(4096, 14336, 32, 8)),
    Architecture("Llama-3 70B", lambda: _llama(8192, 28672, 64, 8)),
    Architecture("Llama-3 405B", lambda: _llama(16384, 53248, 128, 8)),
    Architecture("Llama-3 405B, 1 of TP 8", lambda: _llama(16384, 6656, 16, 1, head_dim=128)),
    Architecture("Llama-2 7B", lambda: _llama(4096, 11008, 32, 32)),
    Architecture(
        "Qwen3 8B",
        lambda: hf.Qwen3Config(
            hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            num_hidden_layers=2,
        ),
    ),
    Architecture(
        "Qwen3 30B-A3B (MoE)",
        lambda: hf.Qwen3MoeConfig(
            hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, num_hidden_layers=2,
            norm_topk_prob=True,
        ),
    ),
    Architecture(
        "Mistral 7B",
        lambda: hf.MistralConfig(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
            num_hidden_layers=2, sliding_window=None,
        ),
    ),
    Architecture(
        "Gemma 2 9B",
        lambda: hf.Gemma2Config(
            hidden_size=3584, intermediate_size=14336, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
            num_hidden_layers=2,
        ),
        tokens=4096,
        # Its scores are capped: transformers has no fused attention for it.
        attention="eager",
    ),
    Architecture(
        "Mixtral 8x7B",
        lambda: hf.MixtralConfig(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
            num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=2, sliding_window=None,
        ),
    ),
    Architecture(
        "GPT-2 XL",
        lambda: hf.GPT2Config(n_embd=1600, n_head=25, n_layer=2, n_positions=1024),
        batch=8,
        tokens=1024,
    ),
    Architecture(
        "T5 XL",
        lambda: hf.T5Config(
            d_model=2048, d_kv=64, d_ff=5120, num_heads=32, num_layers=2, num_decoder_layers=2,
            feed_forward_proj="gated-gelu",
        ),
        batch=8,
        tokens=512,
        inputs="both",
    ),
    Architecture(
        "ViT-H/14",
        lambda: hf.ViTConfig(
            hidden_size=1280, intermediate_size=5120, num_attention_heads=16, num_hidden_layers=2, patch_size=14,
            image_size=224,
        ),
        batch=64,
        tokens=257,
        inputs="pixels",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One kind of block, and what it is called with."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _build(architecture: Architecture, mode: FakeTensorMode) -> nn.Module:
    config = architecture.config()
    config.use_cache = False
    config._attn_implementation = architecture.attention
    if hasattr(config, "num_experts_per_tok"):
        config._experts_implementation = "grouped_mm"
    kinds = {"tokens": hf.AutoModel, "both": hf.AutoModel, "pixels": hf.AutoModel}
    # On meta first: some initialisations read what they wrote, which fake tensors do not have.
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("meta"):
        model = kinds[architecture.inputs].from_config(config, dtype=torch.bfloat16).train()
    with fake_building(mode):
        return model.to_empty(device="cpu")


def _inputs(architecture: Architecture) -> dict[str, Any]:
    shape = (architecture.batch, architecture.tokens)
    ids = torch.zeros(shape, dtype=torch.long)
    if architecture.inputs == "pixels":
        return {"pixel_values": torch.zeros(architecture.batch, 3, 224, 224, dtype=torch.bfloat16)}
    if architecture.inputs == "both":
        return {"input_ids": ids, "decoder_input_ids": ids}
    return {"input_ids": ids}


def calls_of(architecture: Architecture) -> dict[str, Call]:
    """Return every kind of block by its class (and a number where one class has several), with its arguments."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return _calls(architecture, _build(architecture, mode))


def _calls(architecture: Architecture, model: nn.Module) -> dict[str, Call]:
    names = [block.fqn for block in find_blocks(model)]
    found: dict[str, Call] = {}
    handles = []
    for name in names:
        module = model.get_submodule(name)

        def note(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            # The last one of a stack stands for it: T5's first block alone has the table of positions.
            found[f"{name.rsplit('.', 1)[0]}: {type(module).__name__}"] = Call(module, args, kwargs)

        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad(), as_with_real_tensors({}):
        model(**_inputs(architecture))
    for handle in handles:
        handle.remove()
    return found
