"""Model FLOPs: the work that the model itself asks for, whatever a policy recomputes.

Model FLOPs utilisation (MFU) must not rise because work is done twice, so recompute is never counted here.
The count is that of PaLM (Chowdhery et al. 2022, appendix B): per token 6 FLOPs for every weight that takes
part in a matrix product (2 in forward, 4 in backward) and 12 * layers * heads * head width * sequence length
for attention. Attention is counted over the full square, as most published figures do, although a causal
kernel skips about half of it. Norms, activation functions, embeddings and the loss are left out.

Limits: models with experts are over-counted, since all experts count and only some run; attention that sees
a window is counted as if it saw the whole sequence.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["matmul_weights", "model_flops_per_token"]


def model_flops_per_token(model: nn.Module, *, sequence_length: int) -> int:
    """Return FLOPs of forward and backward for one token of a sequence of this length.

    Call it on the model as built, before sharding. A module that stands in several slots counts once for
    each. For a model without a ``config`` that tells layers and heads the attention term is left out.
    """
    return 6 * matmul_weights(model) + 12 * _attention_width(model) * sequence_length


def matmul_weights(model: nn.Module) -> int:
    """Count the weights that take part in matrix products; embeddings are look-ups and do not."""
    return sum(
        module.weight.numel()
        for _, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if isinstance(module.weight, nn.Parameter)
    )


def _attention_width(model: nn.Module) -> int:
    """Return layers times heads times width of a head; 0 where the model does not tell."""
    config: Any = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    if callable(get_text_config):
        config = get_text_config()
    layers = _first(config, "layers", "num_hidden_layers", "n_layer")
    heads = _first(config, "heads", "num_attention_heads", "n_head")
    width = _first(config, "head_dim")
    if width is None and heads:
        dim = _first(config, "dim", "hidden_size", "n_embd")
        width = dim // heads if dim else None
    return layers * heads * width if layers and heads and width else 0


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
