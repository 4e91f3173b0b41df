"""What ``apply`` refuses, because gradients would be wrong or the policy would do nothing; each with the way out."""

from __future__ import annotations

import sys

import torch
from torch import nn

from lowtide.errors import RefusedError
from lowtide.policy import RegionRecipe


def refuse_impossible(model: nn.Module, recipe: RegionRecipe, module: nn.Module) -> None:
    """Raise where a region on ``module`` could not keep the promise.

    Raises:
        RefusedError: names the block and the way out.
    """
    fqn = recipe.fqn
    if isinstance(module, torch.jit.ScriptModule):
        raise RefusedError(f"{fqn} is a TorchScript module; regions need eager or torch.compile'd modules")
    if any(isinstance(m, nn.DataParallel) for m in model.modules()):
        raise RefusedError(
            f"{fqn}: torch.nn.DataParallel copies modules at every call, and a copy would run the original's region; "
            "use DistributedDataParallel or fully_shard"
        )
    if recipe.budget is not None and not hasattr(torch.autograd.graph, "region_activation_memory_budget"):
        raise RefusedError(
            f"{fqn}: torch {torch.__version__} has no budget for one graph (it came with 2.13), and a process-wide "
            "one would reach other models. Use another kind of policy, or a newer torch"
        )
    _refuse_other_checkpointing(model, fqn, module)
    if recipe.selects:
        _refuse_compiled_inside(fqn, module)


def _refuse_other_checkpointing(model: nn.Module, fqn: str, module: nn.Module) -> None:
    holders = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False) is True]
    if holders and "transformers" in sys.modules:
        raise own_checkpointing(fqn, holders[0])
    if _is_wrapped(model, fqn, module):
        raise RefusedError(
            f"{fqn} is already checkpointed by torch's checkpoint_wrapper or composable checkpoint; two kinds would "
            "nest. Build the model without it"
        )


def own_checkpointing(fqn: str, holder: nn.Module) -> RefusedError:
    """Make the error for a model of transformers whose own checkpointing is on as well."""
    return RefusedError(
        f"{fqn}: the model's own gradient checkpointing is on ({type(holder).__name__}); two kinds would nest. "
        "Call model.gradient_checkpointing_disable(), and leave gradient_checkpointing out of TrainingArguments "
        "(activation_checkpointing in newer versions), which switches it on after lowtide.apply"
    )


def _is_wrapped(model: nn.Module, fqn: str, module: nn.Module) -> bool:
    from torch.distributed._composable import checkpoint as composable
    from torch.distributed._composable.contract import STATE_KEY
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    related = [module, *module.modules()]
    if any(isinstance(m, CheckpointWrapper) for m in related):
        return True
    # Asking for the state of a module that has none would put an attribute on it.
    if any(STATE_KEY in m.__dict__ and composable.state(m) is not None for m in related):
        return True
    return any(
        isinstance(m, CheckpointWrapper) and any(inner is module for inner in m.modules()) for m in model.modules()
    )


def _refuse_compiled_inside(fqn: str, module: nn.Module) -> None:
    """Inside compiled code no operator is seen, so a list of operators to save would do nothing."""
    if _is_compiled_function(module.__dict__.get("forward")):
        raise RefusedError(_order(fqn, f"{fqn}.forward"))
    for name, child in module.named_modules():
        if child is module:
            continue
        optimized = isinstance(child, torch._dynamo.OptimizedModule)
        if optimized or child._compiled_call_impl is not None or _is_compiled_function(child.__dict__.get("forward")):
            raise RefusedError(_order(fqn, f"{fqn}.{name}"))


def _is_compiled_function(value: object) -> bool:
    return value is not None and hasattr(value, "_torchdynamo_orig_callable")


def _order(fqn: str, compiled: str) -> str:
    return (
        f"{compiled} is compiled and lies inside the region {fqn}: operators to save are not seen inside compiled "
        "code, and the policy would do nothing. The order is lowtide.apply first, then block.compile() on the whole "
        "block, then fully_shard"
    )
