"""Offload: a saved value waits for backward in the host's memory.

    forward    value made ─► copy to the host on a side stream ─► the value's own memory goes back
    backward   region k begins ─► copies of region k - 1 start on the side stream ─► taken when they are needed

On a GPU host memory is pinned. On a CPU there is nothing to win: the copy lies outside of torch's allocator (in NumPy's
memory), so that what offload does to the peak can be seen and tested where there is no GPU.

A value is not offloaded, and the report says so, where that cannot lower the peak: it is small, its memory stays alive
after the region anyway (an output, or something outside holds it), or its region is the last to run, whose backward
follows at once. The last two are known after a region's first call.

Experimental: copies that overlap computation and a lower peak of CUDA's allocator were not yet shown on a GPU
(``tests/gpu/test_offload.py`` does). Torch's own eager path ignores its offload policies silently (torch 2.11 to 2.14).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.regions._held import version_only
from lowtide.regions._tape import Away

__all__ = ["MIN_BYTES", "HostPool", "Parked", "ParkedCall", "Parking"]

MIN_BYTES = 64 * 1024
"""Smaller values are kept where they are: the copy costs more than it frees."""

Key = tuple[int | None, int]
"""(rule, number of the call)."""


class HostPool:
    """Counts what lies on the host for the regions of one ``apply``."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.peak_bytes = 0
        self.forwards = 0
        """Calls of regions so far."""
        self.calls: list[weakref.ref[ParkedCall]] = []
        """Calls of regions with something parked, in the order of forward."""

    def add(self, nbytes: int) -> None:
        """Count bytes that come (or, below zero, go)."""
        self.nbytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def begin(self, call: ParkedCall) -> int:
        """Register a call whose forward has ended, and number it."""
        self.calls = [ref for ref in self.calls if ref() is not None]
        self.calls.append(weakref.ref(call))
        self.forwards += 1
        return self.forwards

    def before(self, call: ParkedCall) -> ParkedCall | None:
        """Return the call before one, whose backward comes next."""
        earlier: ParkedCall | None = None
        for ref in self.calls:
            found = ref()
            if found is call:
                return earlier
            earlier = found or earlier
        return None


@dataclass
class Parking:
    """What one region knows about offloading, over its calls."""

    pool: HostPool
    declined: dict[Key, str] = field(default_factory=dict)
    """Values that stay where they are, and why."""
    is_last: bool = False
    """Whether its backward follows its forward at once."""
    parked_bytes: int = 0
    """Bytes that its last call put on the host."""

    def refuses(self, key: Key, value: torch.Tensor) -> bool:
        """Whether a value stays where it is."""
        if self.is_last:
            self.declined[key] = "the region is the last to run, and its backward follows at once"
            return True
        if key in self.declined:
            return True
        if value.untyped_storage().nbytes() < MIN_BYTES:
            self.declined[key] = f"it is smaller than {MIN_BYTES // 1024} KiB"
            return True
        return False

    def reasons(self) -> Counter[str]:
        """Count why values were not offloaded."""
        return Counter(self.declined.values())


class ParkedCall:
    """What one call of a region put on the host."""

    def __init__(self, parking: Parking) -> None:
        self.parking = parking
        self._values: list[tuple[Key, weakref.ref[Parked]]] = []
        self._begun = False
        self._number = -1

    def park(self, key: Key, value: torch.Tensor) -> Parked:
        """Copy a value to the host."""
        parked = Parked(value, self)
        self._values.append((key, weakref.ref(parked)))
        return parked

    def waiting(self) -> Iterator[tuple[Key, Parked]]:
        """Yield what is still there."""
        for key, ref in self._values:
            parked = ref()
            if parked is not None:
                yield key, parked

    def forward_ended(self) -> None:
        """See which values did not go away: offloading those frees nothing."""
        parking = self.parking
        parking.parked_bytes = 0
        for key, parked in self.waiting():
            if parked.origin_lives():
                parking.declined[key] = "its memory stays alive after the region: an output, or held by the model"
            else:
                parking.parked_bytes += parked.nbytes
        self._number = parking.pool.begin(self)

    def backward_begins(self) -> None:
        """The first value is asked for: bring the others, and those of the region before."""
        if self._begun:
            return
        self._begun = True
        pool = self.parking.pool
        self.parking.is_last = pool.forwards == self._number
        for call in (self, pool.before(self)):
            for _, parked in call.waiting() if call is not None else ():
                parked.fetch_ahead()


class Parked(Away):
    """One value on the host; ``get`` brings it back as it was, with its strides."""

    __slots__ = ("__weakref__", "_ahead", "_call", "_device", "_form", "_host", "_origin", "_version", "nbytes")

    def __init__(self, value: torch.Tensor, call: ParkedCall) -> None:
        storage = value.untyped_storage()
        self._call = call
        self._form = (value.shape, value.stride(), value.storage_offset(), value.dtype)
        self._device = value.device
        self._origin = StorageWeakRef(storage)
        self._ahead: Any = None
        self._version = version_only(value, "offload").tensor
        self.nbytes = storage.nbytes()
        call.parking.pool.add(self.nbytes)
        self._host = None if isinstance(value, torch._subclasses.FakeTensor) else _to_host(value)

    def __del__(self) -> None:
        self._call.parking.pool.add(-self.nbytes)

    def origin_lives(self) -> bool:
        """Whether the memory that was copied is still held by somebody."""
        return not self._origin.expired()

    @property
    def written(self) -> int:
        """How often the value was written in place, also after it was parked."""
        return self._version._version

    def fetch_ahead(self) -> None:
        """Start the copy back, where copies run beside computation."""
        if self._ahead is None and self._host is not None and self._device.type != "cpu":
            self._ahead = _start_fetch(self._host, self._device)

    def get(self) -> torch.Tensor:
        """Return the value, on its device."""
        self._call.backward_begins()
        size, stride, offset, dtype = self._form
        raw = self._bytes()
        with _disable_current_modes() if self._host is not None else nullcontext():
            empty = torch.empty(0, dtype=dtype, device=self._device)
            return empty.set_(raw.untyped_storage(), offset, size, stride)

    def _bytes(self) -> torch.Tensor:
        if self._ahead is not None:
            raw, event = self._ahead
            current = torch.get_device_module(self._device).current_stream(self._device)
            current.wait_event(event)
            raw.record_stream(current)
            self._ahead = None
            return raw
        if self._host is not None and self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            module.current_stream(self._device).wait_stream(_side_stream(self._device))
        # Seen by whoever counts memory: this is the device's.
        raw = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        if self._host is not None:
            with _disable_current_modes():
                raw.copy_(self._host, non_blocking=self._device.type != "cpu")
        return raw


def _to_host(value: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        raw = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
        if value.device.type == "cpu":
            host = torch.from_numpy(np.empty(raw.numel(), dtype=np.uint8))
            return host.copy_(raw)
        host = torch.empty(raw.numel(), dtype=torch.uint8, pin_memory=True)
        module, stream = torch.get_device_module(value.device), _side_stream(value.device)
        stream.wait_stream(module.current_stream(value.device))
        with module.stream(stream):
            host.copy_(raw, non_blocking=True)
        raw.record_stream(stream)
        return host


def _start_fetch(host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
    module, stream = torch.get_device_module(device), _side_stream(device)
    with _disable_current_modes(), module.stream(stream):
        raw = torch.empty(host.numel(), dtype=torch.uint8, device=device)
        raw.copy_(host, non_blocking=True)
        return raw, stream.record_event()


_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    found = _streams.get(device)
    if found is None:
        found = _streams[device] = torch.get_device_module(device).Stream(device)
    return found
