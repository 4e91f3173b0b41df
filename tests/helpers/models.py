"""Small plain models with one switch for each thing that has tripped activation checkpointing before.

``Spec`` says what to build, ``Decoder`` is a pre-norm block stack (RMSNorm, causal grouped-query attention,
SwiGLU); ``EncoderDecoder`` has two stacks of different call signatures. Sizes are tiny: d 32, 16 tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Spec:
    d: int = 32
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    layers: int = 3
    vocab: int = 64
    length: int = 16
    batch: int = 2
    dropout: float = 0.0
    bias: bool = False
    attention: Literal["sdpa", "plain"] = "sdpa"
    feed: Literal["swiglu", "moe"] = "swiglu"
    batch_norm: bool = False
    arguments: Literal["tensor", "dict", "kwargs"] = "tensor"
    outputs: Literal["tensor", "tuple", "dataclass", "named"] = "tensor"
    stack: Literal["list", "gaps", "shared", "nested"] = "list"
    table: Literal["none", "buffer", "lazy"] = "none"
    counter: bool = False
    dtype: torch.dtype = torch.float32

    def but(self, **changes: Any) -> Spec:
        return dataclasses.replace(self, **changes)


@dataclass
class BlockOutput:
    hidden: Tensor
    extra: Tensor | None = None


class NamedOutput(NamedTuple):
    hidden: Tensor
    extra: Tensor | None


class Attention(nn.Module):
    """Causal grouped-query attention; four matrix products around the attention itself."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.head = spec.d // spec.heads
        self.q = nn.Linear(spec.d, spec.d, bias=spec.bias)
        self.k = nn.Linear(spec.d, spec.kv_heads * self.head, bias=spec.bias)
        self.v = nn.Linear(spec.d, spec.kv_heads * self.head, bias=spec.bias)
        self.o = nn.Linear(spec.d, spec.d, bias=spec.bias)
        self.register_buffer("table", _rope(spec.length, self.head) if spec.table == "buffer" else None)
        self.lazy_table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, -1, self.head).transpose(1, 2)
        k = self.k(x).view(batch, length, -1, self.head).transpose(1, 2)
        v = self.v(x).view(batch, length, -1, self.head).transpose(1, 2)
        if self.spec.table != "none":
            q, k = q * self._table().to(q.dtype), k * self._table().to(k.dtype)
        groups = self.spec.heads // self.spec.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        p = self.spec.dropout if self.training else 0.0
        if self.spec.attention == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1) * self.head**-0.5).masked_fill(~mask, float("-inf"))
            y = F.dropout(scores.softmax(-1), p, training=p > 0) @ v
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))

    def _table(self) -> Tensor:
        if self.table is not None:
            return self.table
        if self.lazy_table is None:
            self.lazy_table = _rope(self.spec.length, self.head)
        return self.lazy_table


def _rope(length: int, head: int) -> Tensor:
    return torch.outer(torch.arange(length) + 1.0, torch.linspace(0.1, 1.0, head)).cos()


class SwiGLU(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.d, spec.hidden, bias=spec.bias)
        self.up = nn.Linear(spec.d, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, spec.d, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    """Top-2 of 4 experts; shapes inside depend on the routing, as in real ones."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.router = nn.Linear(spec.d, 4, bias=False)
        self.experts = nn.ModuleList(SwiGLU(spec.but(hidden=16)) for _ in range(4))

    def scores(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.scores(flat).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.attention_norm = nn.RMSNorm(spec.d, eps=1e-5)
        self.attention = Attention(spec)
        self.feed_norm = nn.RMSNorm(spec.d, eps=1e-5)
        self.feed = MoE(spec) if spec.feed == "moe" else SwiGLU(spec)
        self.drop = nn.Dropout(spec.dropout)
        self.batch_norm = nn.BatchNorm1d(spec.d) if spec.batch_norm else None
        if spec.counter:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def body(self, x: Tensor) -> Tensor:
        if self.spec.counter:
            self.calls += 1
        x = x + self.drop(self.attention(self.attention_norm(x)))
        x = x + self.drop(self.feed(self.feed_norm(x)))
        if self.batch_norm is not None:
            x = x + self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return x

    def wrap(self, hidden: Tensor) -> Any:
        match self.spec.outputs:
            case "tuple":
                return hidden, None
            case "dataclass":
                return BlockOutput(hidden)
            case "named":
                return NamedOutput(hidden, None)
            case _:
                return hidden

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.body(x))


class DictBlock(Block):
    """Takes a dict and overwrites its entry."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        state["hidden"] = self.body(state["hidden"])
        state["depth"] += 1
        return state


class KwargsBlock(Block):
    """Takes keywords only, among them what is no tensor."""

    def forward(self, *, hidden: Tensor, scale: float, flags: dict[str, Any]) -> Any:  # type: ignore[override]
        return self.wrap(self.body(hidden * scale + flags["shift"] * flags["on"]))


def _block(spec: Spec) -> Block:
    return {"tensor": Block, "dict": DictBlock, "kwargs": KwargsBlock}[spec.arguments](spec)


def _stack(spec: Spec) -> nn.Module:
    blocks = [_block(spec) for _ in range(spec.layers)]
    match spec.stack:
        case "gaps":
            # A pipeline stage that holds layers 4, 5 and 7.
            return nn.ModuleDict({str(i): b for i, b in zip([4, 5, 7, 8, 9], blocks, strict=False)})
        case "shared":
            return nn.ModuleList([blocks[0], blocks[0], *blocks[1:]])
        case "nested":
            return nn.ModuleList(nn.ModuleList(blocks[i : i + 2]) for i in range(0, len(blocks), 2))
        case _:
            return nn.ModuleList(blocks)


class Decoder(nn.Module):
    """Tokens [B, T] to logits [B, T, V]."""

    def __init__(self, spec: Spec | None = None) -> None:
        super().__init__()
        self.spec = spec or Spec()
        self.embed = nn.Embedding(self.spec.vocab, self.spec.d)
        self.layers = _stack(self.spec)
        self.norm = nn.RMSNorm(self.spec.d, eps=1e-5)
        self.head = nn.Linear(self.spec.d, self.spec.vocab, bias=False)

    def blocks(self) -> list[Block]:
        """The blocks in the order in which they run; a shared one stands twice."""
        values = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        if self.spec.stack == "nested":
            return [block for group in values for block in group]
        return list(values)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        match self.spec.arguments:
            case "dict":
                state: dict[str, Any] = {"hidden": x, "depth": 0}
                for block in self.blocks():
                    state = block(state)
                x = state["hidden"]
            case "kwargs":
                shift = torch.full((), 0.01, dtype=x.dtype)
                for block in self.blocks():
                    x = hidden_of(block(hidden=x, scale=0.9, flags={"shift": shift, "on": True}))
            case _:
                for block in self.blocks():
                    x = hidden_of(block(x))
        return self.head(self.norm(x))


def hidden_of(value: Any) -> Tensor:
    if isinstance(value, BlockOutput | NamedOutput):
        return value.hidden
    return value[0] if isinstance(value, tuple) else value


class CrossBlock(Block):
    """A decoder block that also reads what the encoder made."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.read = nn.Linear(spec.d, spec.d)

    def forward(self, x: Tensor, memory: Tensor, *, gate: float = 1.0) -> Tensor:  # type: ignore[override]
        return self.body(x + gate * self.read(memory).mean(1, keepdim=True))


class EncoderDecoder(nn.Module):
    """Two stacks; the second takes a positional tensor of the first."""

    def __init__(self, spec: Spec | None = None) -> None:
        super().__init__()
        self.spec = spec or Spec(layers=2)
        self.embed = nn.Embedding(self.spec.vocab, self.spec.d)
        self.encoder = nn.ModuleList(Block(self.spec) for _ in range(self.spec.layers))
        self.decoder = nn.ModuleList(CrossBlock(self.spec) for _ in range(self.spec.layers))
        self.head = nn.Linear(self.spec.d, self.spec.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.embed(tokens.flip(-1))
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(tokens)
        for block in self.decoder:
            x = block(x, memory, gate=0.5)
        return self.head(x)


def build(spec: Spec | None = None, *, seed: int = 20260717) -> Decoder:
    """Make a decoder whose every parameter is drawn, biases and norms too, so that all gradients matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Decoder(spec)
        return randomized(model).to((spec or Spec()).dtype)


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.1, 0.1)
            elif "norm" in name:
                parameter.uniform_(0.8, 1.2)
    return model


def tokens(spec: Spec | None = None, *, seed: int = 7919, step: int = 0) -> Tensor:
    """Token ids [B, T], the same for the same seed and step."""
    spec = spec or Spec()
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(spec.vocab, (spec.batch, spec.length), generator=generator)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
