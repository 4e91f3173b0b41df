"""What a choice will cost, from records alone; no torch.

hardware   the table of devices: what decides kernels, and published peaks
"""

from lowtide.prediction.hardware import DEVICES, Device, find_device

__all__ = ["DEVICES", "Device", "find_device"]
