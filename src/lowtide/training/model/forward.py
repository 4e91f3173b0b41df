"""What the trainer asks of any model: plain functions, so that no wrapper renames parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowtide.errors import UserError

__all__ = ["forward_logits", "vocabulary_size"]


def forward_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Run a model on tokens [B, T] and return logits [B, T, V].

    A model takes the tokens as its first argument and returns the logits, or an object that holds them as
    ``logits`` (as transformers' models do), or a tuple or mapping in which they come first or by that name.

    Raises:
        UserError: the model returned none of these.
    """
    output = model(tokens)
    logits = _find_logits(output)
    if logits is None or logits.ndim != 3 or logits.shape[:2] != tokens.shape[:2]:
        got = type(output).__name__ if logits is None else f"shape {tuple(logits.shape)}"
        raise UserError(
            f"{type(model).__name__}: a model returns logits of shape [batch, tokens, vocabulary], or an "
            f"object with `logits`; for tokens {tuple(tokens.shape)} it returned {got}"
        )
    return logits


def _find_logits(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    return found if isinstance(found, Tensor) else None


def vocabulary_size(model: nn.Module) -> int | None:
    """Return how many tokens a model can embed: rows of its one or its largest embedding; None without any.

    A token at or above it is an index error on a CPU and an assertion on a GPU that ends the process.
    """
    get_embeddings = getattr(model, "get_input_embeddings", None)
    if callable(get_embeddings):
        table = get_embeddings()
        if isinstance(table, nn.Embedding):
            return table.num_embeddings
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return max(tables, default=None)
