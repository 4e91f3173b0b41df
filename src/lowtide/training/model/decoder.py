"""A decoder-only language model in the shape that most open models share, kept short enough to read at once.

RMSNorm before each branch, rotary positions (RoPE, Su et al. 2021, the half-rotating form that Llama
checkpoints use), grouped-query attention (Ainslie et al. 2023) and SwiGLU (Shazeer 2020), through
``scaled_dot_product_attention``, so that the fused kernel of each device runs.

There are no buffers: the tables of RoPE are computed in every forward on the device of the tokens and are
handed to the blocks as arguments. A table kept as a buffer is lost when the model is made on the meta device,
and one that a block builds at its first use exists in forward and not in recompute, which breaks selective
checkpointing (checked on torch 2.13 and 2.14).

Shapes are named by letters: B batch, T tokens, D ``dim``, H heads, K key/value heads, E width of a head,
V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.training.model.kinds import DecoderConfig

__all__ = ["Attention", "Decoder", "DecoderBlock", "SwiGLU", "rope_tables", "rotate"]

_WEIGHT_STD = 0.02


def rope_tables(
    length: int, width: int, *, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines, each [T, E]; angles are float32 whatever ``dtype`` the tables end in."""
    frequencies = theta ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head [B, H, T, E] by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one head of keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads_or_heads, config.head_dim
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.dim, self.heads * self.width, bias=False)
        self.key = nn.Linear(config.dim, self.kv_heads * self.width, bias=False)
        self.value = nn.Linear(config.dim, self.kv_heads * self.width, bias=False)
        self.output = nn.Linear(self.heads * self.width, config.dim, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.key(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        v = self.value(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cosines, sines),
            rotate(k, cosines, sines),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, self.heads * self.width))


class SwiGLU(nn.Module):
    """A feed-forward layer whose inner activations are gated by SiLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim_or_default, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim_or_default, bias=False)
        self.down = nn.Linear(config.ffn_dim_or_default, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """One repeated layer: attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cosines, sines))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """Tokens in, logits out; the blocks stand in ``layers``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Fill every parameter anew from the current random state; also after ``to_empty`` on a meta model.

        Normal with standard deviation 0.02; the projections that write to the residual stream are scaled by
        1/sqrt(2 * layers), so that its variance does not grow with depth (as in GPT-2).
        """
        if self.config.tie_weights:
            self.head.weight = self.embed.weight
        residual_std = _WEIGHT_STD / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear | nn.Embedding):
                writes_residual = name.endswith((".output", ".down"))
                nn.init.normal_(module.weight, std=residual_std if writes_residual else _WEIGHT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to logits [B, T, V]."""
        x = self.embed(tokens)
        cosines, sines = rope_tables(
            tokens.shape[1],
            self.config.head_dim,
            theta=self.config.rope_theta,
            device=tokens.device,
            dtype=x.dtype,
        )
        for block in self.layers:
            x = block(x, cosines, sines)
        return self.head(self.norm(x))
