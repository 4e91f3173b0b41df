"""A key-value cache that a block appends to grows a second time in recompute: exact, or an error that says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import RefusedError
from tests.helpers import families, law, models
from tests.helpers.families import FULL, both


class CachedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        if cache is not None:
            k, v = cache.update(k, v) if hasattr(cache, "update_keys") else _append(cache, k, v)
        return x + self.o(torch.softmax(self.q(x) @ k.transpose(-2, -1), -1) @ v)


def _append(cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(cache, list):
        cache.append((k, v))
        entries = cache
    elif isinstance(cache, dict):
        cache.setdefault("entries", []).append((k, v))
        entries = cache["entries"]
    else:
        cache.entries = [*cache.entries, (k, v)]
        entries = cache.entries
    return torch.cat([e[0] for e in entries], 1), torch.cat([e[1] for e in entries], 1)


class Store:
    """An object that no container protocol takes apart."""

    def __init__(self) -> None:
        self.entries: list[tuple[Tensor, Tensor]] = []


class Caching(nn.Module):
    """Every layer appends its keys and reads those of the layers before it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(CachedAttention() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x, cache = self.embed(tokens), self.make()
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x @ self.embed.weight.t()


@pytest.mark.parametrize("make", [list, dict, Store, lambda: None], ids=["list", "dict", "object", "none"])
@both
def test_a_cache_of_ones_own_that_is_appended_to_is_exact(policy, make):
    def build() -> nn.Module:
        torch.manual_seed(6)
        return Caching(make)

    policy = policy if policy is FULL else {"kind": "selective_op", "save": ["aten.addmm"]}
    law.assert_law(build, families.spec_step, policy)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma"])
@both
def test_hugging_face_models_that_pass_a_cache_are_told_the_setting(family, policy):
    model = families.build(family)
    lowtide.apply(model, policy)
    tokens = models.tokens()
    with pytest.raises(RefusedError, match="use_cache"):
        model(input_ids=tokens)
    model.config.use_cache = False
    models.loss_of(model(input_ids=tokens).logits, tokens).backward()


def test_generation_with_a_cache_still_works_under_a_policy():
    bare, model = families.build("llama").eval(), families.build("llama").eval()
    lowtide.apply(model, FULL)
    prompt = models.tokens()[:, :4]
    a = bare.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
    b = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
    assert torch.equal(a, b)


def _t5(layers: int = 2) -> nn.Module:
    import transformers as hf

    torch.manual_seed(12)
    config = hf.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=layers, num_heads=4, dropout_rate=0.1,
        decoder_start_token_id=0,
    )  # fmt: skip
    return models.randomized(hf.T5ForConditionalGeneration(config)).train()


def _t5_step(model: Any, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    loss = model(input_ids=tokens.flip(-1), labels=tokens, use_cache=False).loss
    loss.backward()
    return loss


@both
def test_an_encoder_decoder_model_with_cross_attention(policy):
    found = law.assert_law(_t5, _t5_step, policy)
    assert len(found.applied.regions) == 4
    model = _t5()
    lowtide.apply(model, policy)
    tokens = models.tokens()
    with pytest.raises(RefusedError, match="use_cache"):
        model(input_ids=tokens, labels=tokens)


class SharedKeys(nn.Module):
    """Later layers read the keys of the first one: they are an argument, not a cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(SharingLayer(first=i == 0) for i in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x, keys = self.embed(tokens), None
        for layer in self.layers:
            x, keys = layer(x, keys)
        return x @ self.embed.weight.t()


class SharingLayer(nn.Module):
    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)
        self.kv = nn.Linear(32, 64) if first else None

    def forward(self, x: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        keys = self.kv(x) if self.kv is not None else keys
        k, v = keys.chunk(2, -1)
        return x + self.o(torch.softmax(self.q(x) @ k.transpose(-2, -1), -1) @ v), keys


@both
def test_keys_shared_across_layers_keep_working(policy):
    policy = policy if policy is FULL else {"kind": "selective_op", "save": ["aten.addmm"]}
    law.assert_law(SharedKeys, families.spec_step, policy)
