"""Which models a config can name; no torch here: ``build`` imports what it needs.

``decoder`` is lowtide's own small model (``decoder.py``), ``huggingface`` any causal language model of the
installed transformers (``huggingface.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from lowtide.training.registry import Component, register

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DecoderConfig", "HuggingFaceConfig"]


@register("model", "decoder")
class DecoderConfig(Component):
    """A decoder-only model: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    kind: Literal["decoder"] = "decoder"

    vocab_size: int = Field(default=256, ge=1)
    """How many tokens there are. Bytes need 256; the data must not yield a token at or above it."""

    dim: int = Field(default=256, ge=2)
    """Width of the residual stream. Parameters and time grow with its square; it must be a multiple of
    ``heads``, and a head (``dim / heads``) must be even."""

    layers: int = Field(default=4, ge=1)
    """How many blocks. Activation memory without a policy grows in proportion."""

    heads: int = Field(default=4, ge=1)
    """Query heads of a block."""

    kv_heads: int | None = Field(default=None, ge=1)
    """Heads of keys and values; it must divide ``heads``. Fewer make keys and values smaller (grouped-query
    attention); left out, there are as many as ``heads``."""

    ffn_dim: int | None = Field(default=None, ge=1)
    """Inner width of the feed-forward layer. Left out, 8/3 of ``dim``, rounded up to a multiple of 32."""

    rope_theta: float = Field(default=10_000.0, gt=1.0)
    """Base of the rotary positions. Larger values tell far positions apart in longer sequences."""

    norm_eps: float = Field(default=1e-5, gt=0.0, lt=1.0)
    """Added to the mean square in RMSNorm, against division by zero."""

    tie_weights: bool = False
    """Whether the output projection is the embedding, transposed: fewer parameters, one gradient for both."""

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of each residual branch's outputs that is dropped in training."""

    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of attention weights that is dropped in training. Above 0 the CPU has no fused kernel and keeps
    a matrix of T x T per head."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> DecoderConfig:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"a head is dim / heads = {self.dim} / {self.heads} = {self.head_dim} wide; rotary "
                f"positions need an even width"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            legal = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}; legal: {legal}")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def kv_heads_or_heads(self) -> int:
        """Heads of keys and values, with the default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_dim_or_default(self) -> int:
        """Inner width of the feed-forward layer, with the default filled in."""
        return -(-8 * self.dim // 3 // 32) * 32 if self.ffn_dim is None else self.ffn_dim

    def build(self) -> nn.Module:
        """Make the model with fresh weights from torch's current random state, on the default device."""
        from lowtide.training.model.decoder import Decoder

        return Decoder(self)


@register("model", "huggingface")
class HuggingFaceConfig(Component):
    """A causal language model of the transformers library, made without any network.

    Weights are read from safetensors only, and code that a model folder brings along is never run.
    """

    kind: Literal["huggingface"] = "huggingface"

    config: Path | None = None
    """Path of a ``config.json``: the model is made from it with random weights. Its own dropout values apply.
    Give this or ``directory``, not both."""

    directory: Path | None = None
    """A folder with a ``config.json`` and weights in ``*.safetensors``, which are loaded."""

    @model_validator(mode="after")
    def _one_source(self) -> HuggingFaceConfig:
        if (self.config is None) == (self.directory is None):
            given = "neither" if self.config is None else "both"
            raise ValueError(
                f"give exactly one of `config` (a config.json, random weights) and `directory` (a folder "
                f"with config.json and *.safetensors); {given} is set"
            )
        return self

    def build(self) -> nn.Module:
        """Make the model in float32, with scaled_dot_product_attention and without a key/value cache.

        Under fake tensors or on the meta device the weights of ``directory`` are not read: only shapes are
        wanted there.

        Raises:
            InputError: a file that is missing or damaged, weights that would need unpickling, a model type
                that this transformers does not know, or code of the folder's own.
        """
        from lowtide.training.model.huggingface import build_from_config, build_from_directory

        if self.directory is not None:
            return build_from_directory(self.directory)
        assert self.config is not None
        return build_from_config(self.config)
