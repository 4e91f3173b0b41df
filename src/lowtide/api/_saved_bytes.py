"""``saved_bytes``: what each block keeps for backward under a policy, under ``none`` and under ``full``.

The model is built under fake tensors, so any size costs no memory and no GPU, and one forward for each policy tells.
Nothing is estimated: the storages that a real forward would keep are counted on the fake one, region by region, by
the same code (tests hold them equal to the byte). The first forward of a region records more than later ones, and
what a rule names and backward never needs is known after its first recompute; so one forward and backward run before
the one that is counted, as in every step of a training run but the first.

Limits: models whose forward depends on values of tensors (most routers that gather tokens by expert) cannot run on
fake tensors, which is an error that says so; kernels are those of the CPU; positions of a Hugging Face model are taken
to be one sequence a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from lowtide.api._planned import as_policy
from lowtide.errors import NothingMatchedError, PolicyError, UserError
from lowtide.measurement import measure_saved_bytes, tensors_in
from lowtide.policy import Full, LayerPolicy, NoPolicy
from lowtide.regions import apply, compress_names, find_blocks, slots
from lowtide.tracing import as_with_real_tensors, fake_building
from lowtide.units import format_bytes


@dataclass(frozen=True)
class SavedColumn:
    """Saved bytes under one policy."""

    policy: str
    """Kind of the policy; numbered where several of one kind were given."""

    block_bytes: tuple[int, ...]
    """One number for each block, in the order of ``SavedBytes.blocks``."""

    rest_bytes: int
    """Embedding, final norm, head and loss, and what several blocks share (rope tables, masks)."""

    checkpointed: int
    """How many blocks the policy checkpoints."""

    @property
    def total_bytes(self) -> int:
        """All that the graph of one forward holds."""
        return sum(self.block_bytes) + self.rest_bytes


@dataclass(frozen=True)
class SavedBytes:
    """Bytes alive at the end of forward only because backward needs them, by block and policy."""

    blocks: tuple[str, ...]
    """FQNs of the blocks."""

    columns: tuple[SavedColumn, ...]
    """``none``, ``full`` unless the model refuses it, then the policies asked for, in their order."""

    def under(self, policy: str) -> SavedColumn:
        """Return the column of a policy by its name.

        Raises:
            UserError: no such column; the message lists those there are.
        """
        for column in self.columns:
            if column.policy == policy:
                return column
        raise UserError(f"no saved bytes for {policy!r}; there are: {', '.join(c.policy for c in self.columns)}")

    def __str__(self) -> str:
        return _table(self)


def saved_bytes(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], Any],
    *,
    policies: Sequence[object] = (),
    forward: Callable[[Any, Any], object] | None = None,
) -> SavedBytes:
    """Count what one forward keeps for backward under ``none``, under ``full`` and under each of ``policies``.

    Args:
        build: makes the model, without a policy, in the dtype in which it computes (under bf16 mixed precision, cast
            it: the parameters' own copies are no saved bytes). It runs under fake tensors: nothing is allocated.
        make_inputs: makes one batch, as a tensor, a tuple of positional or a mapping of keyword arguments.
        policies: policies, or mappings as in YAML.
        forward: runs ``forward(model, inputs)`` and returns the loss or the outputs; by default the model is called
            with the inputs, and its output is held.

    Returns:
        One row a block and one column a policy. ``full`` is left out where nobody asked for it and the
        model has no blocks or refuses it.

    Raises:
        UserError: a policy that cannot be applied here, compiled code, or a model that fake tensors cannot run.
    """
    named = _named([as_policy(policy) for policy in policies])
    with torch.random.fork_rng(devices=[]), FakeTensorMode() as mode:
        with fake_building(mode):
            model, inputs = build(), make_inputs()
        blocks = _blocks(model)

        def column(name: str, policy: NoPolicy | LayerPolicy) -> SavedColumn:
            return _column(name, policy, model, lambda: (forward or _call)(model, inputs), blocks)

        # Only now: a library that the model comes from may have been imported by build().
        with as_with_real_tensors({}):
            columns = [column("none", NoPolicy())]
            if not any(name == "full" for name, _ in named):
                # Shown for comparison only: nobody asked for it, so a model that refuses it is no error.
                with suppress(PolicyError):
                    columns.append(column("full", Full()))
            columns += [column(name, policy) for name, policy in named]
    return SavedBytes(tuple(blocks), tuple(columns))


def _named(policies: Sequence[NoPolicy | LayerPolicy]) -> list[tuple[str, NoPolicy | LayerPolicy]]:
    """Name columns by kind; the second of a kind gets a number."""
    counts: Counter[str] = Counter()
    named: list[tuple[str, NoPolicy | LayerPolicy]] = []
    for policy in policies:
        if isinstance(policy, NoPolicy):
            continue
        counts[policy.kind] += 1
        number = counts[policy.kind]
        named.append((policy.kind if number == 1 else f"{policy.kind} {number}", policy))
    return named


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return names and modules of the blocks, a shared one once; none where the model has no stack."""
    try:
        names = [block.fqn for block in find_blocks(model)]
    except NothingMatchedError:
        return {}
    modules = {slot.fqn: slot.module for slot in slots(model)}
    by_module = {id(modules[name]): name for name in reversed(names)}
    return {name: modules[name] for name in names if by_module[id(modules[name])] == name}


def _column(
    name: str,
    policy: NoPolicy | LayerPolicy,
    model: nn.Module,
    run: Callable[[], object],
    blocks: Mapping[str, nn.Module],
) -> SavedColumn:
    applied = apply(model, policy)
    try:
        if applied.regions:
            _backward(run())
            model.zero_grad(set_to_none=True)
        measured = measure_saved_bytes(model, run, blocks)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"saved bytes of {type(model).__name__}: its forward depends on the values of tensors ({error}), and fake "
            "tensors have none. Measure on real tensors with lowtide.measurement.measure_saved_bytes"
        ) from error
    finally:
        applied.remove()
    rows = tuple(block.saved_bytes for block in measured.blocks)
    return SavedColumn(name, rows, measured.rest_bytes, len(applied.regions))


def _backward(outputs: object) -> None:
    differentiable = [t for t in tensors_in(outputs) if t.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(t) for t in differentiable])


def _call(model: nn.Module, inputs: Any) -> object:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _table(saved: SavedBytes) -> str:
    """One line for all blocks with the same numbers, then the rest and the total."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for i, name in enumerate(saved.blocks):
        alike.setdefault(tuple(column.block_bytes[i] for column in saved.columns), []).append(name)
    lines = [["saved bytes a block", *(column.policy for column in saved.columns)]]
    lines += [[compress_names(names), *map(format_bytes, numbers)] for numbers, names in alike.items()]
    lines.append(["outside of blocks", *(format_bytes(column.rest_bytes) for column in saved.columns)])
    lines.append(["all together", *(format_bytes(column.total_bytes) for column in saved.columns)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
