"""The host allocator's own account of a window: every block it hands out and takes back.

torch's profiler records each allocation and release of host memory as a ``[memory]`` event. Sorted by time,
their running sum is what was allocated since the window began, and its maximum, on top of what was alive
before, is the true peak: it holds what no operator shows (scratch memory in kernels, tensors made in C++).

The allocator reports the release only of blocks that some profile saw being allocated. What was alive before the window
and dies inside it (last step's gradients, at ``zero_grad``) would count until the end, so those storages are
watched by weak references that write a mark of their own into the same profile.

Releases on other threads (gloo's) are missed as well, and the sum drifts up with every collective. Given to a
``LiveStorages`` as its listener, the account also gets a mark for each storage's death, at the latest with the next
operator. What remains are the copies that gloo makes inside a collective (``_reduce_scatter_base_`` clones its
input): nobody says when they went. They are known by their address being handed out again, or by being left at
the end without a storage; the truth lies between the peaks with and without them.

Limits. One profiler runs per process. Memory outside torch's allocator is not seen. torch prints
one warning for the first release that it cannot account for. Checked with torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.autograd.profiler import profile

from lowtide.measurement._live import StorageRecord
from lowtide.measurement._observe import observing
from lowtide.measurement._walk import places_in

# Names of marks: what was alive before the window and went; a tracked storage that came, and that went.
_FREED, _MADE, _GONE = "lowtide::freed", "lowtide::made", "lowtide::gone"
_PHASE = "lowtide::phase"
_Step = tuple[int, str, int, int]
"""Time in ns, kind (``block`` or the name of a mark), address or serial number, bytes or address."""


@dataclass(frozen=True)
class EventAccount:
    """What the allocator says about a window."""

    static_bytes: int
    """Bytes of the registered tensors when the window began."""

    peak_bytes: int
    """Static bytes and the most that was allocated on top of them: never too low."""

    certain_peak_bytes: int
    """The same without the blocks that went back unseen. The truth is this or more."""

    end_bytes: int
    """Bytes allocated when the window ended, less those at its start: below zero where more was freed."""

    missed_bytes: int
    """Bytes of blocks that went back unseen, at an unknown time. Without a listening tracker, what is still
    alive at the end counts among them."""

    phase_peaks: Mapping[int, int] = field(default_factory=dict[int, int])
    """The highest of ``peak_bytes`` within each phase that ``mark_phase`` began, by its number."""


class AllocatorEvents:
    """Records the host allocator's events between entering and leaving; then ``account`` holds the result."""

    def __init__(self, *static: Any) -> None:
        self._static = _StaticMarks(*static)
        self._profile = profile(profile_memory=True)
        self._exits = ExitStack()
        self.account: EventAccount | None = None

    def __enter__(self) -> AllocatorEvents:
        self._exits.enter_context(self._profile)
        self._exits.enter_context(observing(self._static))
        return self

    def __exit__(self, *error: Any) -> None:
        self._static.close()
        self._exits.close()
        results = self._profile.kineto_results
        if error[0] is None and results is not None:
            self.account = settle(self._static.static_bytes, _steps(results.experimental_event_tree()))

    def on_made(self, record: StorageRecord, storage: torch.UntypedStorage) -> None:
        """Called by a tracker with a storage that it counts from now on, or whose size changed."""
        if record.nbytes:
            _mark(_MADE, record.serial, storage.data_ptr())

    def on_gone(self, record: StorageRecord) -> None:
        """Called by a tracker once a storage is freed."""
        _mark(_GONE, record.serial)


class _StaticMarks:
    """Writes a mark into the running profile when a storage from before the window gives its memory back."""

    def __init__(self, *static: Any) -> None:
        places = [storage for storage, device in places_in(*static) if device.type == "cpu"]
        self.static_bytes = sum(storage.nbytes() for storage in places)
        self._refs = {id(s): (weakref.ref(s, self._on_free), s.nbytes()) for s in places}

    def close(self) -> None:
        self._refs.clear()

    def _on_free(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        for key, (known, nbytes) in list(self._refs.items()):
            if known is ref:
                del self._refs[key]
                _mark(_FREED, nbytes)

    def on_resize(self, storage: torch.UntypedStorage) -> None:
        # The old block predates the window and goes back unseen; the new one is in the events.
        found = self._refs.pop(id(storage), None)
        if found is not None:
            _mark(_FREED, found[1])

    def on_rng_state(self, state: torch.Tensor) -> None:
        """Nothing to do: the allocator reports it."""


def mark_phase(number: int) -> None:
    """Say that a phase begins, to an account that is open; without one nothing happens."""
    _mark(_PHASE, number)


def _mark(kind: str, number: int, address: int = 0) -> None:
    # Not torch.profiler.record_function, which runs an operator that selective contexts would see.
    with _RecordFunctionFast(f"{kind} {number} {address}"):
        pass


def _steps(tree: Iterable[Any]) -> list[_Step]:
    """Return allocations, releases and marks by time."""
    found: list[_Step] = []
    queue = list(tree)
    while queue:
        event = queue.pop()
        queue.extend(event.children)
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            if fields.device.type == "cpu":
                found.append((event.start_time_ns, "block", fields.ptr, fields.alloc_size))
        elif event.name.startswith("lowtide::"):
            name, number, address = event.name.split(" ")
            found.append((event.start_time_ns, name, int(number), int(address)))
    return sorted(found, key=lambda step: step[0])


class _Ledger:
    """The blocks of the window, by address, and their running sum; ``ignored`` blocks are left out of the sum.

    Blocks are numbered in the order in which they are handed out.
    """

    def __init__(self, ignored: Collection[int] = ()) -> None:
        self.total = self.peak = 0
        self.phase_peaks: dict[int, int] = {}
        self._phase: int | None = None
        self.missed: dict[int, int] = {}
        self._ignored = ignored
        self._blocks: dict[int, tuple[int, int]] = {}
        self._owned: dict[int, tuple[int, int]] = {}
        self._count = 0

    def add(self, change: int, number: int = 0) -> None:
        if number not in self._ignored:
            self.total += change
            self.peak = max(self.peak, self.total)
            if self._phase is not None:
                self.phase_peaks[self._phase] = max(self.phase_peaks[self._phase], self.total)

    def phase(self, number: int) -> None:
        """A phase begins, with what is there."""
        self._phase = number
        self.phase_peaks[number] = max(self.phase_peaks.get(number, 0), self.total)

    def block(self, address: int, nbytes: int) -> None:
        """A block is handed out (bytes above zero) or taken back.

        torch keeps the sizes of blocks from one profile to the next and never forgets those that went back in
        between, so a release without its allocation in this window says nothing: the marks stand for it.
        """
        present, number = self._blocks.pop(address, (0, 0))
        self.add(-present, number)
        if nbytes > 0:
            if present:
                self.missed[number] = present
            self._count += 1
            self._blocks[address] = (nbytes, self._count)
            self.add(nbytes, self._count)

    def made(self, serial: int, address: int) -> None:
        if address in self._blocks:
            self._owned[serial] = (address, self._blocks[address][1])

    def gone(self, serial: int) -> None:
        """Take a storage's block back, unless that was seen, or the address belongs to a later block by now."""
        address, number = self._owned.pop(serial, (0, 0))
        present, present_number = self._blocks.get(address, (0, 0))
        if present and present_number == number:
            del self._blocks[address]
            self.add(-present, number)

    def close(self) -> None:
        """What is left and belongs to no storage that is still alive went back unseen."""
        alive = {number for _, number in self._owned.values()}
        self.missed |= {number: nbytes for nbytes, number in self._blocks.values() if number not in alive}


def settle(static_bytes: int, steps: Sequence[_Step]) -> EventAccount:
    """Go through the steps in order and close the account."""
    whole = _walk(steps, _Ledger())
    certain = _walk(steps, _Ledger(whole.missed))
    return EventAccount(
        static_bytes=static_bytes,
        peak_bytes=static_bytes + whole.peak,
        certain_peak_bytes=static_bytes + certain.peak,
        end_bytes=whole.total,
        missed_bytes=sum(whole.missed.values()),
        phase_peaks={number: static_bytes + peak for number, peak in whole.phase_peaks.items()},
    )


def _walk(steps: Iterable[_Step], ledger: _Ledger) -> _Ledger:
    for _, kind, first, second in steps:
        if kind == "block":
            ledger.block(first, second)
        elif kind == _FREED:
            ledger.add(-first)
        elif kind == _MADE:
            ledger.made(first, second)
        elif kind == _PHASE:
            ledger.phase(first)
        else:
            ledger.gone(first)
    ledger.close()
    return ledger
