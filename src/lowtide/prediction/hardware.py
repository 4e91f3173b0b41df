"""The devices that lowtide knows by name: what decides which kernels run, and the makers' published peaks.

Sources: the data sheets of NVIDIA (A100, H100, H200, B200, L40S, GeForce RTX 4090) and AMD (MI300X). Rates of matrix
products are dense (no sparsity) with float32 accumulation, for the SXM/OAM board where there are several. They are
the makers' peaks, which no program reaches; nothing here was measured. ``link_bytes_per_s`` is one direction of all
links of a device to its neighbours in a node: half of what data sheets state for NVLink and Infinity Fabric, and PCIe
4.0 x16 for boards without them.

"cpu" stands for one core of a plain server: 2 GHz, two 256-bit multiply-adds a cycle (64 GFLOP/s in float32, no
faster in bfloat16), 10 GB/s. A CPU's true speeds differ by factors; ``lowtide calibrate`` measures them.

``memory_bytes`` is the nominal size; what torch can use is less (driver, context, other processes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowtide.errors import UserError, listing, nearest

__all__ = ["DEVICES", "Device", "find_device", "match_device"]

_GB, _TERA, _GIGA = 10**9, 10**12, 10**9


@dataclass(frozen=True)
class Device:
    """One kind of device."""

    name: str

    kind: Literal["cpu", "cuda", "rocm"]
    """Which of torch's kernels run."""

    capability: tuple[int, int] | None = None
    """CUDA compute capability."""

    memory_bytes: int | None = None

    low_precision_flops: float | None = None
    """Matrix products in bfloat16 or float16 a second."""

    float32_flops: float | None = None
    """Float32 operations a second, without TF32 (torch's default)."""

    bytes_per_s: float | None = None
    """Bandwidth of device memory."""

    link_bytes_per_s: float | None = None
    """Bandwidth to the other devices of a node, in one direction."""


def _cuda(
    name: str, capability: tuple[int, int], memory_gb: int, low: float, single: float, bandwidth_gb: float, link_gb: int
) -> Device:
    return Device(
        name,
        "cuda",
        capability,
        memory_gb * _GB,
        low * _TERA,
        single * _TERA,
        bandwidth_gb * _GIGA,
        link_gb * _GIGA,
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("cpu", "cpu", None, None, 64 * _GIGA, 64 * _GIGA, 10 * _GIGA, 2 * _GIGA),
        _cuda("A100-40GB", (8, 0), 40, 312, 19.5, 1555, 300),
        _cuda("A100-80GB", (8, 0), 80, 312, 19.5, 2039, 300),
        _cuda("H100", (9, 0), 80, 989, 67, 3350, 450),
        _cuda("H200", (9, 0), 141, 989, 67, 4800, 450),
        _cuda("B200", (10, 0), 180, 2250, 75, 7700, 900),
        _cuda("L40S", (8, 9), 48, 362, 91.6, 864, 32),
        _cuda("RTX4090", (8, 9), 24, 165.2, 82.6, 1008, 32),
        Device("MI300X", "rocm", None, 192 * _GB, 1307 * _TERA, 163.4 * _TERA, 5300 * _GIGA, 448 * _GIGA),
    )
}
"""Every device by its name."""

_ALIASES = {"a100": "A100-80GB", "h100-80gb": "H100", "4090": "RTX4090", "rtx-4090": "RTX4090"}


def find_device(name: str | Device) -> Device:
    """Return a device by its name, in capitals or not.

    Raises:
        UserError: no such device; the message lists those there are.
    """
    if isinstance(name, Device):
        return name
    wanted = name.strip().lower()
    by_name = {known.lower(): device for known, device in DEVICES.items()}
    found = by_name.get(_ALIASES.get(wanted, wanted).lower())
    if found is not None:
        return found
    near = nearest(name, DEVICES, count=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(f"device {name!r} is not known; there are: {listing(DEVICES)}.{hint}")


def match_device(driver_name: str) -> str | None:
    """Return the table's name for a driver's (``NVIDIA A100-SXM4-40GB``); None where the table has none."""
    words = driver_name.upper().replace("-", " ").split()
    if "4090" in words:
        return "RTX4090"
    if "A100" in words:
        return "A100-40GB" if "40GB" in words else "A100-80GB"
    return next((name for name in DEVICES if name.upper() in words), None)
