"""Saved bytes: what is alive at the end of forward only because backward needs it, block by block.

The definition is carried out as it reads. After forward the values that it returned are held, and nothing else
of it; the storages that forward made and that are alive are listed; then the autograd graph is dropped while the
returned values stay. What died with the graph was saved, and what did not (results, caches, buffers, parameters
that FSDP2 gathered) was not. No formula is involved, so whatever holds memory for backward is counted: saved
variables, contexts of custom functions, regions with their inputs and their kept outputs, offloaded copies.

Every saved storage counts once, in one row, and the rows with ``rest_bytes`` add up to the total:

    made inside a block, not returned by it             that block
    a block's input, and no other block's               that block (its predecessor or the embedding made it)
    an input of several blocks (rope tables, a mask)    rest
    returned by a block, no block's input               rest (the norm, the head or the loss reads it)
    made outside all blocks                             rest

Limits. States of random generators (5,056 bytes for each region on CPU) are left out. A model that stores a
result with its graph on itself keeps the graph alive, and that part is not seen. Compiled code is refused: torch
runs it eagerly under a dispatch mode, and the number would be another program's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.errors import UserError, listing, nearest
from lowtide.measurement._live import LiveStorages, StorageRecord
from lowtide.measurement._walk import places_in


@dataclass(frozen=True)
class BlockSaved:
    """Saved bytes of one block."""

    fqn: str
    saved_bytes: int


@dataclass(frozen=True)
class SavedMeasurement:
    """Saved bytes of one forward: by block, outside of blocks, and all together."""

    blocks: tuple[BlockSaved, ...]
    rest_bytes: int
    """Embedding, final norm, head and loss, and what several blocks share."""

    @property
    def total_bytes(self) -> int:
        """All that the graph holds."""
        return sum(block.saved_bytes for block in self.blocks) + self.rest_bytes


class _Visits:
    """Which block runs, and which storages go into and out of blocks."""

    def __init__(self, tracker: LiveStorages, blocks: Mapping[str, nn.Module]) -> None:
        self._tracker = tracker
        self._blocks = blocks
        self._running: list[str] = []
        # By serial numbers of records: keys of storages are given out again.
        self._readers: dict[int, set[str]] = {}
        self._returned: set[int] = set()

    @contextmanager
    def watching(self) -> Generator[None]:
        handles: list[Any] = []
        try:
            for fqn, module in self._blocks.items():
                handles.append(module.register_forward_pre_hook(self._enter(fqn), with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for serial in self._serials(args, kwargs):
                self._readers.setdefault(serial, set()).add(fqn)
            self._running.append(fqn)
            self._tracker.tag = fqn

        return hook

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._returned.update(self._serials(output))
        self._running.pop()
        self._tracker.tag = self._running[-1] if self._running else None

    def _serials(self, *things: Any) -> Iterator[int]:
        for storage, _ in places_in(*things):
            record = self._tracker.find(storage)
            if record is not None:
                yield record.serial

    def owner(self, record: StorageRecord) -> object:
        """Return the name of the block that a storage counts for, None for the rest."""
        readers = self._readers.get(record.serial)
        if readers:
            return next(iter(readers)) if len(readers) == 1 else None
        return None if record.serial in self._returned else record.tag


def measure_saved_bytes(
    model: nn.Module, forward: Callable[[], object], blocks: Mapping[str, nn.Module] | Iterable[str]
) -> SavedMeasurement:
    """Run ``forward`` once and return the bytes that its graph holds, by block.

    Args:
        model: the model that ``forward`` runs; nothing of it is changed.
        forward: runs forward with gradients on and returns the loss or the outputs; it keeps neither itself.
        blocks: names of modules, or names and modules (for names of the bare model under wrappers).

    Under fake tensors, call it with the ``FakeTensorMode`` active: the numbers are those of real tensors.

    Raises:
        UserError: a name that the model does not have, or compiled code in the model.
    """
    _refuse_compiled(model)
    found = _by_name(model, blocks)
    tracker = LiveStorages(rng_states="ignore")
    visits = _Visits(tracker, found)
    with tracker:
        with visits.watching():
            outputs = forward()
        # What only a cycle keeps is waiting for the collector, not for backward.
        gc.collect()
        alive = [(record, record.nbytes) for record in tracker.records() if record.nbytes]
        values = [storage for storage, _ in places_in(outputs)]
        del outputs
        gc.collect()
        saved = [(visits.owner(record), nbytes) for record, nbytes in alive if record() is None]
        del values
    rows = dict.fromkeys(found, 0)
    rest_bytes = 0
    for owner, nbytes in saved:
        if isinstance(owner, str):
            rows[owner] += nbytes
        else:
            rest_bytes += nbytes
    return SavedMeasurement(tuple(BlockSaved(fqn, count) for fqn, count in rows.items()), rest_bytes)


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            raise UserError(
                f"{name or type(model).__name__} is compiled: saved bytes are measured in eager code only, because "
                "torch runs compiled code eagerly under a tracker. Measure before compiling"
            )


def _by_name(model: nn.Module, blocks: Mapping[str, nn.Module] | Iterable[str]) -> dict[str, nn.Module]:
    if isinstance(blocks, Mapping):
        return dict(blocks)
    modules = dict(model.named_modules())
    names = list(blocks)
    for name in names:
        if name not in modules:
            near = listing(nearest(name, modules)) or "none"
            raise UserError(f"{name!r} is no module of {type(model).__name__}; nearest names: {near}")
    return {name: modules[name] for name in names}
