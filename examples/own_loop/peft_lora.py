"""LoRA adapters on a frozen model: ``python examples/own_loop/peft_lora.py``.

Embeddings are frozen, so no input of the first block needs a gradient. That is nothing to take care of: regions look
at what their own parameters need, and ``enable_input_require_grads`` is not wanted.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide


def build() -> nn.Module:
    """Make a small Llama with adapters, the same at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=128, use_cache=False, **sizes))
    adapters = LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return get_peft_model(base, adapters)


def train(policy: object, *, steps: int = 3) -> tuple[nn.Module, list[float]]:
    """Train the adapters for some steps; the model and its losses."""
    model = build().train()
    print(lowtide.apply(model, policy))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses: list[float] = []
    for step in range(steps):
        tokens = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    print(train({"kind": "rules", "default": "save", "rules": [{"modules": "mlp", "action": "recompute"}]})[1])
