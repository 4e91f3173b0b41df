"""The decoder against attention written out by hand, and its arithmetic: parameters, FLOPs, names."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.training.model.decoder import Attention, Decoder, rope_tables, rotate
from lowtide.training.model.flops import model_flops_per_token
from lowtide.training.model.forward import forward_logits, vocabulary_size
from lowtide.training.model.kinds import DecoderConfig

SMALL = {"vocab_size": 50, "dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 48}


def _attention_by_hand(attention: Attention, x: torch.Tensor, theta: float) -> torch.Tensor:
    """Loops over heads, complex rotations, an explicit mask: nothing shared with the code under test."""
    length = x.shape[1]
    width, group = attention.width, attention.heads // attention.kv_heads
    frequencies = torch.tensor([theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    turns = torch.polar(
        torch.ones(length, width // 2, dtype=torch.float64), torch.outer(torch.arange(length), frequencies)
    )

    def turned(h: torch.Tensor) -> torch.Tensor:
        z = torch.complex(h[..., : width // 2].double(), h[..., width // 2 :].double()) * turns
        return torch.cat((z.real, z.imag), dim=-1)

    q, k, v = (p(x).double() for p in (attention.query, attention.key, attention.value))
    heads = []
    for h in range(attention.heads):
        mine, shared = slice(h * width, (h + 1) * width), slice(h // group * width, (h // group + 1) * width)
        scores = turned(q[..., mine]) @ turned(k[..., shared]).transpose(1, 2) / math.sqrt(width)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[..., shared])
    return (torch.cat(heads, -1) @ attention.output.weight.double().T).float()


def _logits_by_hand(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + model.config.norm_eps).sqrt() * weight

    x = model.embed.weight[tokens]
    for block in model.layers:
        x = x + _attention_by_hand(block.attention, norm(x, block.attention_norm.weight), model.config.rope_theta)
        y = norm(x, block.mlp_norm.weight)
        gate = y @ block.mlp.gate.weight.T
        x = x + (gate * gate.sigmoid() * (y @ block.mlp.up.weight.T)) @ block.mlp.down.weight.T
    return norm(x, model.norm.weight) @ model.head.weight.T


@pytest.mark.parametrize("kv_heads", [1, 2, 4, None])
@pytest.mark.parametrize("tie_weights", [False, True])
def test_logits_equal_attention_written_out_by_hand(kv_heads, tie_weights):
    model = Decoder(DecoderConfig(**{**SMALL, "kv_heads": kv_heads}, tie_weights=tie_weights, rope_theta=100.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    tokens = torch.randint(0, 50, (2, 19))
    torch.testing.assert_close(forward_logits(model, tokens), _logits_by_hand(model, tokens), rtol=2e-5, atol=2e-5)


def test_rotation_depends_on_distance_only():
    cosines, sines = rope_tables(32, 8, theta=10_000.0, device=torch.device("cpu"), dtype=torch.float32)
    q, k = torch.randn(8), torch.randn(8)
    rotated_q, rotated_k = (rotate(t.expand(1, 1, 32, 8), cosines, sines)[0, 0] for t in (q, k))
    scores = rotated_q @ rotated_k.T
    for distance in range(8):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(32))


def test_later_tokens_never_change_earlier_logits():
    model, tokens = Decoder(DecoderConfig(**SMALL)), torch.randint(0, 50, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("tie_weights", [False, True])
def test_parameters_are_counted_exactly(tie_weights):
    model = Decoder(DecoderConfig(**SMALL, tie_weights=tie_weights))
    per_block = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32
    total = 3 * per_block + 32 + 50 * 32 * (1 if tie_weights else 2)
    assert sum(p.numel() for p in model.parameters()) == total
    assert list(dict(model.named_buffers())) == []


def test_flops_are_those_of_the_matrix_products_and_attention():
    model = Decoder(DecoderConfig(**SMALL, tie_weights=True))
    products = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 50 * 32
    assert model_flops_per_token(model, sequence_length=64) == 6 * products + 12 * 3 * 32 * 64

    from torch.utils.flop_counter import FlopCounterMode

    tokens = torch.randint(0, 50, (2, 64))
    with FlopCounterMode(display=False) as counted:
        model(tokens).sum().backward()
    matrix_ops = sum(n for op, n in counted.get_flop_counts()["Global"].items() if str(op) == "aten.mm")
    assert matrix_ops == 6 * products * tokens.numel()


def test_a_model_made_on_meta_initialises_as_one_made_directly():
    config = DecoderConfig(**SMALL, tie_weights=True)
    direct = Decoder(config)
    torch.manual_seed(3)
    direct.init_weights()
    with torch.device("meta"):
        deferred = Decoder(config)
    deferred.to_empty(device="cpu")
    torch.manual_seed(3)
    deferred.init_weights()
    assert deferred.head.weight is deferred.embed.weight
    for (name, a), (other, b) in zip(direct.named_parameters(), deferred.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b), name


def test_initial_weights_have_the_stated_spread_and_loss_starts_at_chance():
    model = Decoder(DecoderConfig(vocab_size=256, dim=128, layers=8, heads=4))
    assert model.layers[0].attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.layers[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    tokens = torch.randint(0, 256, (4, 64))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_runs_the_fused_kernel(kv_heads):
    model = Decoder(DecoderConfig(**{**SMALL, "kv_heads": kv_heads}))
    with _Operators() as operators:
        model(torch.randint(0, 50, (1, 8)))
    fused = [op for op in operators.seen if "scaled_dot_product_flash_attention_for_cpu" in op]
    assert len(fused) == 3
    assert not any("softmax" in op for op in operators.seen)


def test_dropout_acts_in_training_only_and_follows_the_seed():
    model = Decoder(DecoderConfig(**SMALL, dropout=0.3, attention_dropout=0.2))
    tokens = torch.randint(0, 50, (1, 16))
    torch.manual_seed(1)
    first = model(tokens)
    second = model(tokens)
    torch.manual_seed(1)
    assert torch.equal(first, model(tokens))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_each_kind_of_dropout_acts_alone():
    tokens = torch.randint(0, 50, (1, 16))
    for field in ("dropout", "attention_dropout"):
        model = Decoder(DecoderConfig(**SMALL, **{field: 0.5}))
        assert not torch.equal(model(tokens), model(tokens)), field


def test_a_model_can_be_made_and_run_under_fake_tensors():
    with FakeTensorMode():
        model = Decoder(DecoderConfig(**SMALL))
        logits = model(torch.randint(0, 50, (2, 16)))
        logits.sum().backward()
    assert logits.shape == (2, 16, 50)


def test_a_model_survives_pickling():
    model, tokens = Decoder(DecoderConfig(**SMALL, tie_weights=True)), torch.randint(0, 50, (1, 8))
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy(tokens), model(tokens))
    assert copy.head.weight is copy.embed.weight


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 30, "heads": 4}, "dim 30 is not a multiple of heads 4"),
        ({"dim": 12, "heads": 4}, "even width"),
        ({"heads": 4, "kv_heads": 3}, "legal: 1, 2, 4"),
        ({"dropout": 1.0}, "less than 1"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"layer": 2}, "Extra inputs"),
    ],
)
def test_shapes_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        DecoderConfig(**fields)


def test_defaults_are_filled_in():
    config = DecoderConfig(dim=256, heads=4)
    assert (config.head_dim, config.kv_heads_or_heads, config.ffn_dim_or_default) == (64, 4, 704)


def test_what_is_no_model_output_is_refused():
    class Odd(nn.Module):
        def forward(self, tokens):
            return {"hidden": tokens}

    with pytest.raises(ValueError, match=r"Odd: a model returns logits.*it returned dict"):
        forward_logits(Odd(), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"returned shape \(2, 3\)"):
        forward_logits(nn.Identity(), torch.zeros(2, 3, dtype=torch.int64))


def test_the_vocabulary_is_that_of_the_embedding():
    assert vocabulary_size(Decoder(DecoderConfig(**SMALL))) == 50
    assert vocabulary_size(nn.Linear(2, 2)) is None
