"""Architectures of transformers, tiny, with random weights, in training mode with their own dropout."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_DECODER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
_VISION = {**{k: _DECODER[k] for k in list(_DECODER)[:4]}, "image_size": 16, "patch_size": 4}
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 99, "n_positions": 64}
_TWO_STACKS = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 99,
}
_NORMS = "*norm*"
"""For blocks whose feed-forward is no module of its own."""
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Architecture:
    """How to build one, and what it is fed with."""

    model: str
    """Class of transformers."""
    config: str
    """Class of its config."""
    feed: str = "tokens"
    options: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: _DECODER)
    part: tuple[str, ...] = ("mlp",)
    """Patterns on modules of a block: what ``rules`` recompute, the feed-forward where it is a module of its own."""

    def build(self) -> nn.Module:
        """Make the model, the same at every call."""
        import transformers

        transformers.logging.set_verbosity_error()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20_260)
            config = getattr(transformers, self.config)(**{**self.base, **self.options})
            model = getattr(transformers, self.model)(config)
        return model.train()


def _decoder(name: str, *, part: str = "mlp", **options: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", options=options, part=(part,))


def _masked(name: str, *, part: str = "intermediate", **options: Any) -> Architecture:
    return Architecture(f"{name}ForMaskedLM", f"{name}Config", options=options, part=(part,))


def _other(model: str, config: str, feed: str = "tokens", *, part: str = "mlp", **options: Any) -> Architecture:
    return Architecture(model, config, feed, options, {}, (part,))


def _image(name: str, size: int = 16, *, part: str = "mlp", **options: Any) -> Architecture:
    return _other(f"{name}ForImageClassification", f"{name}Config", f"image {size}", part=part, num_labels=4, **options)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _decoder("Llama", **_GROUPED),
    "mistral": _decoder("Mistral", **_GROUPED),
    "qwen2": _decoder("Qwen2", **_GROUPED),
    "qwen3": _decoder("Qwen3", head_dim=8, **_GROUPED),
    "gemma": _decoder("Gemma", head_dim=8, **_GROUPED),
    "gemma2": _decoder("Gemma2", head_dim=8, **_GROUPED),
    "gemma3_text": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", options={"head_dim": 8, **_GROUPED}),
    "phi": _decoder("Phi", **_GROUPED),
    "phi3": _decoder("Phi3", pad_token_id=0, **_GROUPED),
    "olmo2": _decoder("Olmo2", **_GROUPED),
    "cohere": _decoder("Cohere", **_GROUPED),
    "stablelm": _decoder("StableLm", **_GROUPED),
    "starcoder2": _decoder("Starcoder2", **_GROUPED),
    "glm": _decoder("Glm", head_dim=8, pad_token_id=0, **_GROUPED),
    "granite": _decoder("Granite", **_GROUPED),
    "smollm3": _decoder("SmolLM3", pad_token_id=0, **_GROUPED),
    "gpt_neox": _decoder("GPTNeoX"),
    "gpt2": _other("GPT2LMHeadModel", "GPT2Config", **_GPT),
    "gptj": _other("GPTJForCausalLM", "GPTJConfig", rotary_dim=4, **_GPT),
    "gpt_neo": _other(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        vocab_size=99,
        max_position_embeddings=64,
    ),
    "opt": _decoder("OPT", part=_NORMS, ffn_dim=48, word_embed_proj_dim=32),
    "bloom": _other("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=3, n_head=4, vocab_size=99),
    "falcon": _decoder("Falcon"),
    "mpt": _other(
        "MptForCausalLM", "MptConfig", part="ffn", d_model=32, n_heads=4, n_layers=3, vocab_size=99, max_seq_len=64
    ),
    "mixtral": _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2, **_GROUPED),
    "qwen2_moe": _decoder("Qwen2Moe", moe_intermediate_size=16, shared_expert_intermediate_size=16, **_EXPERTS),
    "qwen3_moe": _decoder("Qwen3Moe", head_dim=8, moe_intermediate_size=16, **_EXPERTS),
    "olmoe": _decoder("Olmoe", **_EXPERTS),
    "gpt_oss": _decoder("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, **_GROUPED),
    "deepseek_v3": _decoder(
        "DeepseekV3",
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    "mamba": _other(
        "MambaForCausalLM",
        "MambaConfig",
        part="mixer",
        hidden_size=32,
        num_hidden_layers=3,
        vocab_size=99,
        state_size=4,
    ),
    "mamba2": _other(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        part="mixer",
        hidden_size=32,
        num_hidden_layers=3,
        vocab_size=99,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=8,
    ),
    "jamba": _decoder(
        "Jamba",
        part="feed_forward",
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
        **_GROUPED,
    ),
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta"),
    "electra": _masked("Electra", embedding_size=32),
    "albert": _masked("Albert", part="**.activation", embedding_size=16, num_hidden_groups=1),
    "modernbert": _masked(
        "ModernBert",
        part="mlp",
        global_attn_every_n_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "deberta_v2": _masked("DebertaV2", relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"]),
    "distilbert": _other(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        part="ffn",
        dim=32,
        n_layers=3,
        n_heads=4,
        hidden_dim=48,
        vocab_size=99,
    ),
    "t5": _other(
        "T5ForConditionalGeneration",
        "T5Config",
        part="**.DenseReluDense",
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        vocab_size=99,
        decoder_start_token_id=0,
    ),
    "bart": _other(
        "BartForConditionalGeneration",
        "BartConfig",
        part=_NORMS,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **_TWO_STACKS,
    ),
    "pegasus": _other(
        "PegasusForConditionalGeneration", "PegasusConfig", part=_NORMS, max_position_embeddings=64, **_TWO_STACKS
    ),
    "vit": _image("ViT", **_VISION),
    "deit": _image("DeiT", **_VISION),
    "dinov2": _image("Dinov2", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=4),
    "swin": _image(
        "Swin",
        32,
        part="**.mlp",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": _image("ConvNext", 32, part="**.layernorm", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2),
    "resnet": _image(
        "ResNet", 32, part="layers.*.layer", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"
    ),
    "clip": _other(
        "CLIPModel",
        "CLIPConfig",
        "text and image",
        text_config={**_DECODER, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=_VISION,
        projection_dim=16,
    ),
    "siglip": _other(
        "SiglipModel",
        "SiglipConfig",
        "text and image",
        text_config={**_DECODER, "projection_size": 32},
        vision_config=_VISION,
    ),
    "wav2vec2": _other(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        "audio",
        part="feed_forward",
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=[16, 16],
        conv_stride=[4, 4],
        conv_kernel=[4, 4],
        num_feat_extract_layers=2,
        vocab_size=20,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
    ),
    "whisper": _other(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "spectrum",
        part=_NORMS,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **_TWO_STACKS,
    ),
}


def loss_of(model: nn.Module, feed: str) -> Tensor:
    """Run one batch that is the same at every call, and return the loss."""
    chance = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 90, (2, 16), generator=chance)
    # Encoder-decoders read use_cache from a config of their decoder's own.
    plain = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    if feed == "tokens":
        return model(input_ids=tokens, labels=tokens, **plain).loss
    if feed.startswith("image"):
        size = int(feed.split()[1])
        pixels = torch.randn(2, 3, size, size, generator=chance)
        return model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
    if feed == "text and image":
        pixels = torch.randn(2, 3, 16, 16, generator=chance)
        return model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
    if feed == "audio":
        sound = torch.randn(2, 640, generator=chance)
        return model(sound, labels=torch.randint(1, 19, (2, 6), generator=chance)).loss
    assert feed == "spectrum", feed
    return model(input_features=torch.randn(2, 8, 32, generator=chance), labels=tokens, **plain).loss
