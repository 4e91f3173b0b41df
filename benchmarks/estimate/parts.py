"""Models of the benchmark that a config file alone does not describe: given to the trainer as `kind: custom`."""

from __future__ import annotations

from pydantic import BaseModel
from torch import Tensor, nn


class T5Config(BaseModel):
    """A small T5 whose encoder and decoder read the same tokens."""

    vocab_size: int = 512
    dim: int = 128
    layers: int = 3
    heads: int = 4


class SameTokens(nn.Module):
    """Tokens in, the decoder's logits out."""

    Config = T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        from transformers import T5Config as Original
        from transformers import T5ForConditionalGeneration

        self.t5 = T5ForConditionalGeneration(
            Original(
                vocab_size=config.vocab_size,
                d_model=config.dim,
                d_kv=config.dim // config.heads,
                d_ff=2 * config.dim,
                num_layers=config.layers,
                num_heads=config.heads,
                dropout_rate=0.0,
                use_cache=False,
                tie_word_embeddings=True,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.t5(input_ids=tokens, decoder_input_ids=tokens).logits


class ExpertsConfig(BaseModel):
    """A small Qwen3-MoE: four experts, two for each token."""

    vocab_size: int = 512
    dim: int = 128
    layers: int = 4
    heads: int = 4
    experts: int = 4


class Experts(nn.Module):
    """Tokens in, logits out.

    The experts' products are batched: the grouped kernel takes float32 on a real CPU and not under fake tensors
    (torch 2.13), and a loop over experts depends on the values of the routing.
    """

    Config = ExpertsConfig

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        original = Qwen3MoeConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            moe_intermediate_size=config.dim // 2,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads // 2,
            head_dim=config.dim // config.heads,
            num_experts=config.experts,
            num_experts_per_tok=2,
            use_cache=False,
        )
        original._attn_implementation = "sdpa"
        original._experts_implementation = "batched_mm"
        self.qwen = Qwen3MoeForCausalLM(original)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.qwen(input_ids=tokens).logits
