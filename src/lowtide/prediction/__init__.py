"""What a choice will cost, from records alone; no torch.

hardware   the table of devices: what decides kernels, and published peaks
_profile   what `lowtide calibrate` measured on one machine
_classes   kinds of operators, and the shares of the peaks that they reach
_time      operator, block, collective ─► milliseconds
_choices   recipes of a policy, trace of a block ─► what each region keeps
_decide    recipe, trace, executor ─► each operator's rule; what a region holds and runs again
_explain   trace of a model, regions ─► InspectReport
_block     trace of a block, regions ─► BlockCost: bytes held, its own rise, times
_outline   a step with its blocks taken out
_memory    outline, one BlockCost for each call ─► Estimate
"""

from lowtide.prediction._block import BlockCost, RegionChoice, block_cost
from lowtide.prediction._choices import regions_of
from lowtide.prediction._decide import Decided, Executor, RegionFate, decide_region
from lowtide.prediction._explain import Explained, ExplainedRegion, explain
from lowtide.prediction._memory import predict_step
from lowtide.prediction._outline import BlockCall, StepOutline
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
    "BlockCall",
    "BlockCost",
    "CollectivePoint",
    "Decided",
    "Device",
    "DeviceProfile",
    "Executor",
    "Explained",
    "ExplainedRegion",
    "RatePoint",
    "RegionChoice",
    "RegionFate",
    "Speeds",
    "StepOutline",
    "Work",
    "block_cost",
    "collective_ms",
    "decide_region",
    "explain",
    "find_device",
    "match_device",
    "op_ms",
    "peak_flops",
    "predict_step",
    "read_profile",
    "regions_of",
    "speeds_of",
    "trace_ms",
    "unpriced",
    "work_ms",
]
