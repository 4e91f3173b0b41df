"""What a region ran in forward, as values, and what of a call is noted so that two runs can be compared.

``_modes`` writes tapes in forward and follows them in recompute; executor replay shares the witness and the
generators' states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from lowtide.errors import RefusedError
from lowtide.regions._operators import Trait


class Witness(Protocol):
    """Learns which rules matched and which operators ran, for the error about rules that matched nothing."""

    def matched(self, number: int) -> None:
        """A rule, by its place in the policy, matched a call."""

    def named(self, name: str) -> None:
        """A value was given a name."""

    def ran(self, func: Any) -> None:
        """An operator ran in a thorough pass."""


class Away:
    """A tensor that is kept elsewhere (``_offload``)."""

    __slots__ = ()

    @property
    def written(self) -> int:
        """How often it was written in place."""
        raise NotImplementedError

    def get(self) -> torch.Tensor:
        """Bring it back."""
        raise NotImplementedError


@dataclass
class Kept:
    """An output that stays from forward to backward."""

    value: Any
    version: int
    generators: list[tuple[str, torch.Tensor]] | None
    """Where the generators stood after it, if the operator drew random numbers."""
    written_later: bool = False
    """Whether the region writes to it in place: recompute gets a copy each time."""


@dataclass
class Tape:
    """What one call of a region ran, in order."""

    thorough: bool
    funcs: list[Any] = field(default_factory=list)
    shapes: list[Any] = field(default_factory=list)
    literals: list[Any] = field(default_factory=list)
    digests: list[Any] = field(default_factory=list)
    kept: dict[int, Kept] = field(default_factory=dict)
    wrote_outside: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """Operators of a thorough pass that wrote to storages made outside the region."""
    saw_routing: bool = False
    unneeded: frozenset[tuple[int | None, int]] = frozenset()
    """(rule, call) of outputs that an earlier recompute of this form never came to: they are not kept."""
    kept_calls: dict[int, tuple[int | None, int]] = field(default_factory=dict)
    """Position -> (rule, call) of what was kept in forward."""
    used: set[int] = field(default_factory=set)
    """Positions of kept outputs that recompute took."""

    def unused(self) -> frozenset[tuple[int | None, int]]:
        """Return (rule, call) of what was kept and not taken by a whole recompute."""
        return frozenset(call for position, call in self.kept_calls.items() if position not in self.used)


_EXCLUDE_INPLACE = torch._C.DispatchKey.ADInplaceOrView


def share(value: torch.Tensor) -> torch.Tensor:
    """Detach, keeping the version counter in common, so that a later write in place can be seen.

    Source: torch.utils.checkpoint does the same below its selective contexts.
    """
    with torch._C._SetExcludeDispatchKeyGuard(_EXCLUDE_INPLACE, False):
        return value.detach()


def shape_of(value: Any) -> Any:
    """Return shape and dtype of a tensor, of each in nested outputs; None for what is no tensor."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, tuple | list):
        return tuple(shape_of(v) for v in value)
    return None


def version_of(value: Any) -> int:
    """Return how often tensors were written in place, summed over nested outputs."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, Away):
        return value.written
    return sum(version_of(v) for v in tree_leaves(value) if isinstance(v, torch.Tensor | Away))


def _literal(value: Any) -> Any:
    """A comparable picture of an argument: a tensor's form, any other value with its type (1 is not True)."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.shape, value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_literal(v) for v in value)
    if isinstance(value, float) and value != value:
        return ("nan",)
    return (type(value), value)


def literals_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a comparable picture of a call's arguments, without its generator."""
    return (
        tuple(map(_literal, args)),
        tuple((k, _literal(v)) for k, v in kwargs.items() if k != "generator"),
    )


def digest_of(value: Any) -> tuple[int, ...]:
    """A fingerprint of every bit of every output tensor, and of the order of its elements."""
    return tuple(_fingerprint(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20


def _fingerprint(tensor: torch.Tensor) -> int:
    """Sum of the elements' bits, each times an odd number of its own, modulo 2**64; in chunks, to need no memory."""
    if tensor.layout is not torch.strided:
        return 0
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().reshape(-1).view(_BITS[plain.element_size()])
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].long()
        weights = torch.arange(start, start + bits.numel(), device=bits.device) * 0x5851F42D4C957F2D | 1
        total += int((bits * weights).sum())
    return total


def has_values(out: Any, trait: Trait) -> bool:
    """Whether an output's bits mean something: not on fake tensors, nor in fresh memory."""
    fake = torch._subclasses.FakeTensor
    return not trait & Trait.UNINITIALISED and not any(isinstance(t, fake) for t in tree_leaves(out))


def generator_states(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Copy the states of the default generators that an operator on ``value`` could draw from, by device."""
    states = [("cpu", torch.get_rng_state())]
    first = next((t for t in tree_leaves(value) if isinstance(t, torch.Tensor)), None)
    if first is not None and first.device.type != "cpu":
        module = torch.get_device_module(first.device)
        states.append((str(first.device), module.get_rng_state(first.device)))
    return states


def restore_generators(states: list[tuple[str, torch.Tensor]]) -> None:
    """Put the default generators where ``generator_states`` found them."""
    for device, state in states:
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def describe(func: Any) -> str:
    """An operator as users write it: ``aten.mm.default``."""
    return str(func)


def random_without_state(fqn: str, what: str) -> str:
    """Say why random numbers and preserve_rng: false do not go together."""
    return (
        f"region {fqn}: {what} draws random numbers and preserve_rng is off: backward would draw others, and the "
        "gradients would belong to another sample than the loss. Remove preserve_rng: false, or set "
        "allow_inexact: true"
    )


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage apart while it lives; a number of its own where it has none."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def graph_is_freed() -> bool:
    """Whether the running backward frees its graph (no ``retain_graph``), so that kept values may go."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def refuse_outside_writes(fqn: str, tape: Tape, buffers: Mapping[int, str], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse a region that writes to tensors from outside other than its own buffers.

    Args:
        fqn: the region, for the message.
        tape: a thorough tape.
        buffers: storage -> name of the region's buffers, which are put back around recompute.
        inputs: the region's tensor arguments.

    Raises:
        RefusedError: recompute would write a second time, or start from what forward wrote.
    """
    input_storages = {storage_of(t) for t in inputs}
    for func, target in tape.wrote_outside:
        storage = storage_of(target)
        if storage in buffers:
            continue
        where = "an input of the region" if storage in input_storages else "a tensor made outside the region"
        raise RefusedError(
            f"region {fqn}: {describe(func)} writes into {where} (shape {tuple(target.shape)}); recompute would "
            "start from what forward wrote, or write a second time. Write it out of place, or make the tensor a "
            "buffer of the module; otherwise leave this layer out of the policy"
        )
