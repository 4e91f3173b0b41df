"""Names of modules as the bare model has them, whatever wrapper the model arrived in.

``torch.compile``, FSDP1, ``checkpoint_wrapper`` and DDP put a segment of their own into FQNs. Names that
lowtide shows, logs and matches never contain them (seen in torch 2.11 to 2.14).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def bare_fqn(name: str) -> str:
    """Return ``name`` without the segments that wrappers add (a leading ``module.`` of DDP stays)."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


@dataclass(frozen=True)
class Slot:
    """One place in the module tree that holds a module; a shared module has several."""

    fqn: str
    module: nn.Module
    parent_fqn: str
    parent: nn.Module | None
    position: int
    """Place among the children of ``parent``, from 0, empty children left out."""


def innermost(module: nn.Module) -> nn.Module:
    """Return the bare module inside any wrappers."""
    while True:
        inner = next((module._modules[s] for s in _inner_names(module) if module._modules.get(s) is not None), None)
        if inner is None:
            return module
        module = inner


def _inner_names(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, DistributedDataParallel):
        return ("module",)
    return tuple(s for s in _WRAPPER_SEGMENTS if s in module._modules)


def slots(model: nn.Module) -> Iterator[Slot]:
    """Yield every place in the tree once, wrappers seen through, parents before children.

    Shared modules are yielded at each of their places; a module that contains itself is not entered twice.
    """
    root = innermost(model)
    yield from _below(root, Slot("", root, "", None, 0), frozenset({id(root)}))


def _below(module: nn.Module, slot: Slot, path: frozenset[int]) -> Iterator[Slot]:
    yield slot
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    for position, (name, child) in enumerate(children):
        bare = innermost(child)
        if id(bare) in path:
            continue
        fqn = f"{slot.fqn}.{name}" if slot.fqn else name
        yield from _below(bare, Slot(fqn, bare, slot.fqn, module, position), path | {id(bare)})


def compress_names(names: Sequence[str]) -> str:
    """Write ``a.0, a.1, a.2, a.5`` as ``a.{0-2,5}``, and ``a.0.mlp, a.1.mlp`` as ``a.{0-1}.mlp``."""
    groups: dict[tuple[str, str], list[int]] = {}
    plain: list[str] = []
    for name in names:
        parts = name.split(".")
        numeric = [i for i, part in enumerate(parts) if part.isdecimal()]
        if numeric:
            at = numeric[-1]
            groups.setdefault((".".join(parts[:at]), ".".join(parts[at + 1 :])), []).append(int(parts[at]))
        else:
            plain.append(name)
    found = [".".join(filter(None, (head, _ranges(sorted(ids)), tail))) for (head, tail), ids in groups.items()]
    return ", ".join([*found, *plain])


def _ranges(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return str(ids[0])
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"
