"""The verb lowtide.saved_bytes: fake tensors, one column a policy, equal to what real tensors keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import NothingMatchedError, PolicyError, UserError
from lowtide.measurement import measure_saved_bytes
from lowtide.regions import find_blocks
from tests.helpers import models

MATMUL_HALF = {"kind": "selective_op", "save": [{"op": "matmul", "keep": "1/2"}]}
SPEC = models.Spec(layers=4)


@functools.cache
def _decoder() -> lowtide.SavedBytes:
    return lowtide.saved_bytes(
        lambda: models.build(SPEC),
        lambda: models.tokens(SPEC),
        policies=[lowtide.SelectiveOp(save=["matmul", "sdpa"]), MATMUL_HALF, lowtide.EveryNthLayer(n=2)],
        forward=lambda model, tokens: models.loss_of(model(tokens), tokens),
    )


def test_decoder_by_arithmetic() -> None:
    saved = _decoder()
    rows = SPEC.batch * SPEC.length
    region_input = 4 * rows * SPEC.d
    q, kv, o = 4 * rows * SPEC.d, 4 * rows * 16, 4 * rows * SPEC.d
    gate = up = 4 * rows * SPEC.hidden
    attention = 4 * rows * SPEC.d + 4 * rows * SPEC.heads  # result and one logsumexp a head

    assert saved.blocks == tuple(f"layers.{i}" for i in range(4))
    assert [c.policy for c in saved.columns] == ["none", "full", "selective_op", "selective_op 2", "every_nth_layer"]
    assert [c.checkpointed for c in saved.columns] == [0, 4, 4, 4, 2]
    none = saved.under("none").block_bytes
    assert saved.under("full").block_bytes == (region_input,) * 4
    # The last projection's result (down) is never needed: a rule that names it keeps nothing.
    matmuls = q + 2 * kv + o + gate + up
    assert saved.under("selective_op").block_bytes == (region_input + matmuls + attention,) * 4
    # Of q, k, v, o, gate, up, down every second is recomputed: kept are q, v, gate (and down, which nobody needs).
    assert saved.under("selective_op 2").block_bytes == (region_input + q + kv + gate,) * 4
    assert saved.under("every_nth_layer").block_bytes == (region_input, none[1], region_input, none[3])
    assert none[0] > saved.under("selective_op").block_bytes[0]
    assert len({c.rest_bytes for c in saved.columns}) == 1
    for column in saved.columns:
        assert column.total_bytes == sum(column.block_bytes) + column.rest_bytes


def test_table() -> None:
    lines = str(_decoder()).splitlines()
    assert lines[0].split() == (
        ["saved", "bytes", "a", "block", "none", "full", "selective_op", "selective_op", "2", "every_nth_layer"]
    )
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "layers.{0,2}",
        "layers.{1,3}",
        "outside of blocks",
        "all together",
    ]
    assert "4.00 KiB" in lines[1]
    assert len({len(line) for line in lines}) == 1


def _real(model: nn.Module, inputs: Any, policy: object, forward: Callable[[nn.Module, Any], object]) -> list[int]:
    """What a second step keeps on real tensors."""
    names = [block.fqn for block in find_blocks(model)]
    applied = lowtide.apply(model, policy)
    try:
        out = forward(model, inputs)
        getattr(out, "logits", out).sum().backward()
        del out
        model.zero_grad()
        measured = measure_saved_bytes(model, lambda: forward(model, inputs), names)
    finally:
        applied.remove()
    return [*(block.saved_bytes for block in measured.blocks), measured.rest_bytes]


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=128, bos_token_id=1, eos_token_id=2)
    config.use_cache = False
    return GPT2LMHeadModel(config)


def _ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(32).view(2, 16)}


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        pytest.param(_llama, torch.float32, id="llama-fp32"),
        pytest.param(_gpt2, torch.bfloat16, id="gpt2-bf16"),
        pytest.param(_llama, torch.bfloat16, id="llama-bf16", marks=pytest.mark.full),
        pytest.param(_gpt2, torch.float32, id="gpt2-fp32", marks=pytest.mark.full),
    ],
)
def test_hugging_face_models_on_fake_equal_real(build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    # GPT-2 drops attention weights in training, and then the CPU has no fused attention.
    save = [{"op": "sdpa", "optional": True}, {"op": "matmul", "keep": "1/2"}]
    policies: list[object] = [{"kind": "selective_op", "save": save}]
    saved = lowtide.saved_bytes(lambda: build().to(dtype), _ids, policies=policies)
    model = build().to(dtype)
    expected = [lowtide.NoPolicy(), lowtide.Full(), *policies]
    for column, policy in zip(saved.columns, expected, strict=True):
        real = _real(model, _ids(), policy, lambda m, inputs: m(**inputs))
        assert [*column.block_bytes, column.rest_bytes] == real, column.policy
    assert saved.under("full").block_bytes == (2 * 16 * 32 * dtype.itemsize,) * 3


def test_nothing_is_allocated_and_no_random_state_is_used() -> None:
    big = models.Spec(d=8192, hidden=28672, heads=64, kv_heads=8, layers=2, vocab=128, length=4096, batch=4)
    state = torch.get_rng_state()
    swap = torch.utils.swap_tensors
    saved = lowtide.saved_bytes(lambda: models.build(big), lambda: models.tokens(big))
    assert saved.under("full").block_bytes == (4 * 4 * 4096 * 8192,) * 2
    assert saved.under("none").total_bytes > 24 << 30
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.utils.swap_tensors is swap


def test_a_model_without_blocks_still_has_a_total() -> None:
    saved = lowtide.saved_bytes(lambda: nn.Linear(4, 4), lambda: torch.zeros(2, 4), policies=[{"kind": "none"}])
    assert (saved.blocks, [c.policy for c in saved.columns]) == ((), ["none"])
    assert "all together" in str(saved)
    with pytest.raises(NothingMatchedError, match="no repeated trainable stack"):
        lowtide.saved_bytes(lambda: nn.Linear(4, 4), lambda: torch.zeros(2, 4), policies=[lowtide.Full()])


def test_errors_say_what_to_do() -> None:
    moe = models.Spec(feed="moe")
    with pytest.raises(UserError, match="depends on the values of tensors"):
        lowtide.saved_bytes(lambda: models.build(moe), lambda: models.tokens(moe))
    with pytest.raises(PolicyError, match="ful"):
        lowtide.saved_bytes(lambda: models.build(SPEC), lambda: models.tokens(SPEC), policies=[{"kind": "ful"}])
    with pytest.raises(UserError, match="there are: none, full"):
        lowtide.saved_bytes(lambda: models.build(SPEC), lambda: models.tokens(SPEC)).under("selective_op")


def test_a_shared_block_has_one_row() -> None:
    spec = models.Spec(layers=2, stack="shared")
    saved = lowtide.saved_bytes(lambda: models.build(spec), lambda: models.tokens(spec))
    assert saved.blocks == ("layers.0", "layers.2")
    region_input = 4 * spec.batch * spec.length * spec.d
    assert saved.under("full").block_bytes == (2 * region_input, region_input)
