"""Put models into tensor, sequence and two-dimensional parallel layouts, on CPU and gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.helpers import families, models

FAMILIES = ("decoder", "llama", "gpt2", "qwen3")
FEED = {"decoder": "feed", "llama": "mlp", "gpt2": "mlp", "qwen3": "mlp"}
"""The module of a block that holds its feed-forward."""

_LLAMA = {
    "norms": ("input_layernorm", "post_attention_layernorm"),
    "attention": "self_attn",
    "q": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": "self_attn.o_proj",
    "feed": "mlp",
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": "mlp.down_proj",
}
_DECODER = {
    "norms": ("attention_norm", "feed_norm"),
    "attention": "attention",
    "q": ("attention.q", "attention.k", "attention.v"),
    "o": "attention.o",
    "feed": "feed",
    "up": ("feed.gate", "feed.up"),
    "down": "feed.down",
}
_PARTS: dict[str, dict[str, Any]] = {"decoder": _DECODER, "llama": _LLAMA, "qwen3": _LLAMA}


def build(family: str, *, dropout: bool = False, layers: int = families.LAYERS) -> nn.Module:
    """Make a model whose products are all ``nn.Linear``, which is what the styles of torch take."""
    model = families.build(family, dropout=dropout, layers=layers)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Conv1D":
                setattr(module, name, _linear(child))
    return model


def _linear(conv: Any) -> nn.Linear:
    """Transformers' Conv1D is a linear layer with its weight transposed."""
    linear = nn.Linear(*conv.weight.shape)
    linear.weight = nn.Parameter(conv.weight.detach().t().contiguous())
    linear.bias = nn.Parameter(conv.bias.detach().clone())
    return linear


def step(model: nn.Module, i: int) -> Tensor:
    """One step on data that all ranks of a tensor-parallel group share."""
    return families.step(model, i)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Split heads and the feed-forward over the ranks; the residual stream is whole on each."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    family = _family(model)
    for block in families.blocks(model):
        if family == "gpt2":
            plan: dict[str, Any] = {"mlp.c_fc": ColwiseParallel(), "mlp.c_proj": RowwiseParallel()}
        else:
            parts = _PARTS[family]
            plan = dict.fromkeys((*parts["q"], *parts["up"]), ColwiseParallel())
            plan |= {parts["o"]: RowwiseParallel(), parts["down"]: RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def sequence_parallel(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """As tensor parallel; between the products each rank holds a part of the sequence, as ``DTensor`` in norms."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    family = _family(model)
    for block in families.blocks(model):
        # GPT-2 calls its blocks with three more arguments, which are no parts of the sequence.
        more = (None,) * (3 if family == "gpt2" else 0)
        whole = PrepareModuleInputOutput(
            input_layouts=(Replicate(), *more),
            desired_input_layouts=(Shard(1), *more),
            use_local_input=True,
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
        )
        parallelize_module(block, mesh, _gpt2_sequence() if family == "gpt2" else _sequence(_PARTS[family], family))
        parallelize_module(block, mesh, whole)
    return model


def _sequence(parts: dict[str, Any], family: str) -> dict[str, Any]:
    """The plan of one block whose input and output are parts of the sequence."""
    if family == "decoder":
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    else:
        name = {"hidden_states": Shard(1)}
        gathered = PrepareModuleInput(
            input_kwarg_layouts=name, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
    plan: dict[str, Any] = {norm: SequenceParallel() for norm in parts["norms"]}
    plan[parts["attention"]] = gathered
    plan[parts["feed"]] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan |= {name: ColwiseParallel() for name in (*parts["q"], *parts["up"])}
    plan |= {parts[name]: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
    return plan


def _gpt2_sequence() -> dict[str, Any]:
    """GPT-2's attention has its three projections in one product: it runs whole on each rank."""
    return {
        "ln_1": SequenceParallel(),
        "attn": PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Replicate(), None),
            desired_output_layouts=(Shard(1), None),
        ),
        "ln_2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


def two_dimensional(model: nn.Module) -> nn.Module:
    """Tensor parallel over pairs of ranks, FSDP2 over the pairs."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    for block in families.blocks(model):
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def nested_units(model: nn.Module, *, prefetch: bool = True) -> nn.Module:
    """Three FSDP2 units in every block, gathered ahead of need: their collectives run inside regions."""
    from torch.distributed.fsdp import fully_shard

    units: list[Any] = []
    for block in families.blocks(model):
        children = [c for c in block.children() if next(c.parameters(), None) is not None]
        # The two largest: attention and feed-forward.
        for child in sorted(children, key=lambda c: -sum(p.numel() for p in c.parameters()))[:2]:
            units.append(fully_shard(child))
        fully_shard(block)
    root = fully_shard(model)
    if prefetch:
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])
    return root


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "tensor": tensor_parallel,
    "sequence": sequence_parallel,
    "two-dimensional": two_dimensional,
    "nested units": nested_units,
}


def policies(family: str, executor: str = "recompute") -> dict[str, dict[str, Any]]:
    """Name the policies that every layout is tried with."""
    half = {"op": "matmul", "keep": "1/2"}
    collective = {"op": "collective", "action": "save"}
    common = {"executor": executor}
    return {
        "full": {"kind": "full", **common},
        "selective": {"kind": "selective_op", "save": [{"op": "sdpa", "optional": True}, half], **common},
        "feed-forward": {
            "kind": "rules",
            "default": "save",
            "rules": [{"modules": FEED[family], "action": "recompute"}],
            **common,
        },
        "collectives": {"kind": "rules", "default": "recompute", "rules": [collective], **common},
    }


def _family(model: nn.Module) -> str:
    return {"Decoder": "decoder", "LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}.get(
        type(model).__name__.removeprefix("FSDP"), "gpt2"
    )


def forward_loss(model: nn.Module) -> Tensor:
    """One forward to a loss."""
    tokens = models.tokens()
    return models.loss_of(families.logits_of(model, tokens), tokens)
