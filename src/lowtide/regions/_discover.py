"""Finds the blocks of a model: its repeated trainable layers, or what patterns name.

A stack is a container (ModuleList, ModuleDict with numeric keys; Sequential, where it repeats a class) that holds
layers: modules with children of their own and parameters. What else it holds (placeholders, norms) is left alone.
The outermost stacks count; a list of experts inside a layer is part of that layer. Containers of containers
(``groups.0.1``) are entered. Dictionaries with other keys (adapter registries) are no stacks. Torch calls neither
ModuleList nor ModuleDict, so a region on one would never run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lowtide.errors import NothingMatchedError, PolicyError, listing, nearest
from lowtide.policy import Block, match_fqns
from lowtide.regions._names import Slot, innermost, slots


@dataclass(frozen=True)
class Candidate:
    """A block and the module that it names."""

    block: Block
    module: nn.Module


def find_blocks(model: nn.Module, layers: Sequence[str] | None = None) -> list[Block]:
    """Name the blocks of ``model``: all repeated trainable stacks, or what the globs ``layers`` match.

    Raises:
        NothingMatchedError: no stack, or a pattern that matches nothing; the message lists what there is.
        PolicyError: a pattern names a container that is never called, or matches overlap.
    """
    return [c.block for c in find_candidates(model, layers)]


def find_candidates(model: nn.Module, layers: Sequence[str] | None = None) -> list[Candidate]:
    """Like ``find_blocks``, with the modules; a shared module stands once for each of its places."""
    tree = list(slots(model))
    if layers is None:
        return _repeated_stacks(model, tree)
    return _matched(layers, tree)


def _repeated_stacks(model: nn.Module, tree: list[Slot]) -> list[Candidate]:
    found: list[Candidate] = []
    inside: list[str] = []
    for slot in tree:
        if any(slot.fqn.startswith(p) for p in inside):
            continue
        children = _layers_of(slot.module)
        if not children:
            continue
        prefix = f"{slot.fqn}." if slot.fqn else ""
        found += [Candidate(Block(prefix + name, slot.fqn, position), child) for position, name, child in children]
        inside += [f"{prefix}{name}." for _, name, _ in children]
    if not found:
        containers = [s.fqn for s in tree if _is_container(s.module)]
        raise NothingMatchedError(
            f"no repeated trainable stack of layers in {type(model).__name__}; containers seen: "
            f"{listing(containers) or 'none'}. Name the blocks with `layers`, such as model.layers.*"
        )
    return found


def _layers_of(module: nn.Module) -> list[tuple[int, str, nn.Module]]:
    """Return position, key and module of the layers in a stack; empty where ``module`` is no stack."""
    if not _is_container(module):
        return []
    present = [(k, innermost(c)) for k, c in module._modules.items() if c is not None]
    layers = [(i, k, c) for i, (k, c) in enumerate(present) if _is_layer(c)]
    if isinstance(module, nn.Sequential):
        kinds = Counter(_kind(c) for _, _, c in layers)
        layers = [entry for entry in layers if kinds[_kind(entry[2])] >= 2]
    trainable = any(p.requires_grad for _, _, c in layers for p in c.parameters())
    return layers if trainable else []


def _kind(module: nn.Module) -> str:
    """Class name before FSDP2 put its own class in front of it."""
    return type(module).__name__.removeprefix("FSDP")


def _is_container(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):
        return bool(module) and all(key.isdecimal() for key in module)
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    has_children = any(child is not None for child in module._modules.values())
    return has_children and next(module.parameters(), None) is not None


def _matched(layers: Sequence[str], tree: list[Slot]) -> list[Candidate]:
    by_fqn = {s.fqn: s for s in tree if s.fqn}
    chosen: dict[str, Slot] = {}
    for pattern, names in match_fqns(layers, by_fqn).items():
        if not names:
            near = nearest(pattern, [*by_fqn], count=5) or [s.fqn for s in tree if _is_container(s.module)]
            raise NothingMatchedError(
                f"layers: {pattern!r} matches no module; nearest names: {listing(near) or 'none'}. "
                "Patterns match whole names, segment by segment: model.layers.*, model.layers.{0-7}, **.mlp"
            )
        chosen.update((n, by_fqn[n]) for n in names)
    _check_matches([chosen[n] for n in by_fqn if n in chosen])
    return [Candidate(Block(s.fqn, s.parent_fqn, s.position), s.module) for n, s in by_fqn.items() if n in chosen]


def _check_matches(chosen: list[Slot]) -> None:
    names = {s.fqn for s in chosen}
    for slot in chosen:
        if isinstance(slot.module, nn.ModuleList | nn.ModuleDict):
            raise PolicyError(
                f"layers: {slot.fqn!r} is a {type(slot.module).__name__}, which is never called itself: a region on "
                f"it would do nothing. Name its layers: {slot.fqn}.*"
            )
        parts = slot.fqn.split(".")
        outer = next((p for i in range(1, len(parts)) if (p := ".".join(parts[:i])) in names), None)
        if outer is not None:
            raise PolicyError(
                f"layers: {slot.fqn!r} lies inside {outer!r}, and both are matched; regions must not overlap. "
                "Match only one of them"
            )
