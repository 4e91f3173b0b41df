"""One block's operators under fake tensors: nothing is computed and nothing is allocated, whatever its size.

    block, args ─► fake copies (shapes only) ─► forward under the recorder ─► backward with fake gradients ─► OpTrace

Parameters, buffers and arguments are replaced by fake CPU tensors of the same form, so that a block on the meta
device, on a GPU or made under fake tensors is traced alike; the module itself is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_map_only

from lowtide.errors import UserError
from lowtide.prediction import Device, find_device
from lowtide.records import OpTrace
from lowtide.tracing._flops import tensors
from lowtide.tracing._libraries import as_with_real_tensors
from lowtide.tracing._session import BlockSession, environment
from lowtide.tracing._translate import AsOnTarget

__all__ = ["environment", "run_forward", "trace_block", "trace_forward"]


def trace_block(
    block: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | Device = "cpu",
    threads: int = 1,
) -> OpTrace:
    """Trace forward and backward of ``block``; see ``lowtide.trace``."""
    target = find_device(device)
    mode = _mode_of(block, args, kwargs)
    with torch.random.fork_rng(devices=[]), mode:
        state = _fake_state(block, mode)
        fake_args, fake_kwargs = tree_map_only(Tensor, _Copies(mode), (tuple(args), dict(kwargs or {})))
        session = BlockSession(block, target, threads)
        session.place(state, fake_args, fake_kwargs)
        try:
            session.run(state, fake_args, fake_kwargs)
            session.find_releases(state, fake_args, fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _depends_on_values(block, error) from error
    return session.finish()


def trace_forward(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | Device = "cpu",
    threads: int = 1,
    tensors_in: Callable[[Any], Iterable[Tensor]] = tensors,
    name: str | None = None,
    inside: str = "",
) -> OpTrace:
    """Trace the forward of a whole model; no argument is taken to need gradients that does not.

    ``freed`` is None for storages that outlive the graph: results, and what the model's Python keeps.

    Args:
        model: any module, without sharding.
        args: its arguments.
        kwargs: its keyword arguments.
        device: what it would run on.
        threads: CPU threads.
        tensors_in: finds the tensors in what the model returns.
        name: what it is called in the trace; by default its class.
        inside: a module in it to which FQNs are relative.

    Raises:
        UserError: a forward that depends on the values of tensors, or tensors that cannot be traced.
    """
    mode = _mode_of(model, args, kwargs)
    with torch.random.fork_rng(devices=[]), mode:
        state = _fake_state(model, mode)
        fake_args, fake_kwargs = tree_map_only(Tensor, _Copies(mode), (tuple(args), dict(kwargs or {})))
        session = BlockSession(model, find_device(device), threads, name=name, inside=inside)
        session.place(state, fake_args, fake_kwargs, mid_model=False)
        try:
            session.run_forward(state, fake_args, fake_kwargs, tensors_in)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _depends_on_values(model, error) from error
    return session.finish()


def run_forward(model: nn.Module, args: Sequence[Any] = (), *, device: str | Device = "cpu") -> None:
    """Run the forward of a model on fake copies of what it holds and is given, and let the results go.

    Raises:
        UserError: a forward that depends on the values of tensors, or tensors that cannot be copied.
    """
    mode = _mode_of(model, args, {})
    target = AsOnTarget(find_device(device))
    with torch.random.fork_rng(devices=[]), mode:
        state = _fake_state(model, mode)
        fake_args = tree_map_only(Tensor, _Copies(mode), tuple(args))
        try:
            with as_with_real_tensors({}), target.translating(), torch.enable_grad():
                torch.func.functional_call(model, dict(state), fake_args)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _depends_on_values(model, error) from error


def _depends_on_values(block: nn.Module, error: Exception) -> UserError:
    return UserError(
        f"{type(block).__name__} cannot be traced: its forward depends on the values of tensors "
        f"({error}), and a trace has only shapes. Trace the parts around that operator, or replace a "
        "router by one of fixed capacity"
    )


def _mode_of(block: nn.Module, args: Any, kwargs: Any) -> FakeTensorMode:
    """Return the mode of a block made under fake tensors: two modes do not mix."""
    found = [*block.parameters(), *block.buffers(), *tensors((args, kwargs))]
    mode = next((t.fake_mode for t in found if isinstance(t, FakeTensor)), None)
    return mode or FakeTensorMode(allow_non_fake_inputs=True)


class _Copies:
    """Makes fake CPU tensors of the same form, the same one for the same tensor."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        known = self._made.get(id(tensor))
        if known is None:
            known = self._made[id(tensor)] = (tensor, self._copy(tensor))
        return known[1]

    def _copy(self, tensor: Tensor) -> Tensor:
        wraps = hasattr(type(tensor), "__tensor_flatten__") and not isinstance(tensor, FakeTensor)
        if tensor.layout is not torch.strided or wraps:
            raise UserError(
                f"a {type(tensor).__name__} of layout {tensor.layout} cannot be traced: give plain, unsharded "
                "tensors (trace a block before fully_shard)"
            )
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad)


def _fake_state(block: nn.Module, mode: FakeTensorMode) -> dict[str, Tensor]:
    copies = _Copies(mode)
    state: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters(remove_duplicate=False):
        state[name] = copies(parameter)
    for name, buffer in block.named_buffers(remove_duplicate=False):
        state[name] = copies(buffer)
    return state
