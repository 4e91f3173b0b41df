"""What a choice will cost, from records alone; no torch.

hardware   the table of devices: what decides kernels, and published peaks
_profile   what `lowtide calibrate` measured on one machine
_classes   kinds of operators, and the shares of the peaks that they reach
_time      operator, block, collective ─► milliseconds
"""

from lowtide.prediction._profile import CollectivePoint, DeviceProfile, RatePoint, read_profile
from lowtide.prediction._time import (
    AnyDevice,
    Speeds,
    Work,
    collective_ms,
    op_ms,
    peak_flops,
    speeds_of,
    trace_ms,
    unpriced,
    work_ms,
)
from lowtide.prediction.hardware import DEVICES, Device, find_device, match_device

__all__ = [
    "DEVICES",
    "AnyDevice",
    "CollectivePoint",
    "Device",
    "DeviceProfile",
    "RatePoint",
    "Speeds",
    "Work",
    "collective_ms",
    "find_device",
    "match_device",
    "op_ms",
    "peak_flops",
    "read_profile",
    "speeds_of",
    "trace_ms",
    "unpriced",
    "work_ms",
]
