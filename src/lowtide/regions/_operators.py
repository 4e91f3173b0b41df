"""Operators by name: what a user writes -> the overloads that the installed torch has; facts about an overload.

A dispatch mode sees overloads only, so a packet (``aten.mm``) that is not expanded would never match
(pytorch issue 176065).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from enum import IntFlag
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.functional_tensor import FunctionalTensor

from lowtide.errors import NothingMatchedError, PolicyError, nearest
from lowtide.policy import ALIASES, ROUTING_OPS


class Trait(IntFlag):
    """What matters of an operator to recording and repeating a region."""

    PLAIN = 0
    SKIPPED = 1
    """Runs as it is, in forward and recompute, and is not compared: metadata, profiler marks, FSDP's own."""
    VIEW = 2
    MUTATES = 4
    RANDOM = 8
    CAST = 16
    """``_to_copy``: autocast's cache decides whether it runs, so its presence is not compared."""
    UNINITIALISED = 32
    ROUTING = 64
    WAITS = 128
    """Returns its argument, once a collective has filled it."""


_SKIPPED_NAMESPACES = frozenset({"profiler", "fsdp", "c10d", "prim"})
_METADATA_OPS = frozenset(FunctionalTensor.metadata_fns) | {torch.ops.aten.detach.default}


@functools.cache
def routing_overloads() -> frozenset[OpOverload]:
    """Every overload of the operators whose integer results route tokens."""
    return frozenset(o for name in ROUTING_OPS for o in _functional(_packet(name) or _overload(name) or ()))


_TRAITS: dict[Any, Trait] = {}


def traits(func: Any) -> Trait:
    """Return the traits of an operator, computed once for each."""
    found = _TRAITS.get(func)
    if found is None:
        found = _TRAITS[func] = _compute_traits(func)
    return found


def _compute_traits(func: Any) -> Trait:
    if not isinstance(func, OpOverload):
        return Trait.PLAIN
    if func in _METADATA_OPS or func.namespace in _SKIPPED_NAMESPACES:
        return Trait.SKIPPED
    result = Trait.PLAIN
    if func._schema.is_mutable:
        result |= Trait.MUTATES
    elif func.is_view:
        result |= Trait.VIEW
    if torch.Tag.nondeterministic_seeded in func.tags:
        result |= Trait.RANDOM
    if func is torch.ops.aten._to_copy.default:
        result |= Trait.CAST
    if func._opname.startswith(("empty", "new_empty")):
        result |= Trait.UNINITIALISED
    if func in routing_overloads():
        result |= Trait.ROUTING
    if func.namespace == "_c10d_functional" and func._opname == "wait_tensor":
        result |= Trait.WAITS
    return result


@functools.cache
def _dropout_position(func: OpOverload) -> int | None:
    names = [a.name for a in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def draws(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of a RANDOM operator uses random numbers: attention with dropout 0 does not."""
    position = _dropout_position(func)
    if position is None:
        return True
    value = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(value)


_UNDECLARED_WRITES: dict[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
"""Kernels that write to arguments which their schemas declare read-only (torch 2.11 to 2.14)."""


@functools.cache
def written_positions(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the arguments that an operator writes to, also where its schema does not say so."""
    undeclared = _UNDECLARED_WRITES.get(func._schema.name, ())
    return tuple(
        (i, a.name)
        for i, a in enumerate(func._schema.arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in undeclared
    )


def mutated_arguments(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call of a mutating operator writes to."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        found += [v for v in values if isinstance(v, torch.Tensor)]
    return found


def resolve_operator(name: str, *, where: str) -> list[OpOverload]:
    """Expand an alias, a packet or an overload to overloads that return new values; ``where`` stands in errors.

    Raises:
        NothingMatchedError: this torch has no such operator; the nearest names are listed.
        PolicyError: the operator only writes in place, so it has no output of its own to save.
    """
    if name in ALIASES:
        return [o for packet in ALIASES[name] for o in _functional(_packet(packet) or ())]
    found = _packet(name) or _overload(name)
    if not found:
        raise NothingMatchedError(f"{where}: {_unknown(name)}")
    functional = _functional(found)
    if not functional:
        raise PolicyError(f"{where}: {name!r} writes in place and has no output of its own to save")
    return functional


def _functional(overloads: Sequence[OpOverload]) -> list[OpOverload]:
    return [o for o in overloads if not o._schema.is_mutable]


def _packet(name: str) -> tuple[OpOverload, ...] | None:
    namespace, _, rest = name.partition(".")
    if not rest or "." in rest:
        return None
    packet = getattr(getattr(torch.ops, namespace), rest, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    return tuple(getattr(packet, o) for o in packet.overloads())


def _overload(name: str) -> tuple[OpOverload, ...] | None:
    packet_name, _, overload = name.rpartition(".")
    return tuple(o for o in _packet(packet_name) or () if o._overloadname == overload) or None


def _unknown(name: str) -> str:
    known = {n.split(".")[0].replace("::", ".") for n in torch._C._dispatch_get_all_op_names()}
    packet = ".".join(name.split(".")[:2])
    if _packet(packet):
        overloads = [str(o) for o in _packet(packet) or ()]
        return f"operator {name!r} has no such overload; {packet} has: {', '.join(overloads)}"
    tail = name.rsplit(".", 1)[-1]
    near = nearest(name, [*ALIASES, *sorted(known)], count=3)
    exact = [k for k in sorted(known) if k.rsplit(".", 1)[-1] == tail]
    near = list(dict.fromkeys([*exact[:2], *near]))[:4]
    return (
        f"torch {torch.__version__} has no operator {name!r}; nearest: {', '.join(near) or 'none'}. "
        f"Write an overload (aten.mm.default), a packet (aten.mm) or an alias ({', '.join(ALIASES)})"
    )
