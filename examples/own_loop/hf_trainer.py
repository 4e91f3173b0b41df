"""Transformers' Trainer with a policy: ``python examples/own_loop/hf_trainer.py``.

The policy stands in the place of ``gradient_checkpointing`` (``activation_checkpointing`` in newer versions): leave
that out of ``TrainingArguments``. Two kinds of checkpointing would nest, and that is refused.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import lowtide


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(128, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def build() -> LlamaForCausalLM:
    """Make a small Llama, the same at every call."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(policy: object, *, steps: int = 3, **arguments: Any) -> tuple[LlamaForCausalLM, list[float]]:
    """Train for some steps; the model and its losses."""
    model = build()
    print(lowtide.apply(model, policy))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=Tokens())
        trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(train(lowtide.SelectiveOp(save=[{"op": "matmul", "keep": "1/2"}]))[1])
