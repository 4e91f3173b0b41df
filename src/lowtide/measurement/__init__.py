"""What memory really does: live bytes, saved bytes, the true peak of a step.

    _walk      anything that holds tensors -> storages, each once
    _observe   resizes and copied random states, which no operator shows
    _live      live bytes by storages, on real and fake tensors         (accuracy and limits stand there)
    _events    the host allocator's own account of a window
    _peak      one step's true peak, by the rules of truth
    _profiler  what each operator cost, by operator and module; Chrome traces
    _saved     what the graph holds after forward, block by block
    _calibrate how fast this machine's device is

Never RSS: it holds the interpreter, the allocator's free lists and other libraries.
"""

from lowtide.measurement._calibrate import calibrate
from lowtide.measurement._events import AllocatorEvents, EventAccount, mark_phase
from lowtide.measurement._live import LiveStorages, StorageRecord
from lowtide.measurement._peak import Peak, PeakMeter, measure_peak
from lowtide.measurement._profiler import StepProfiler, phase_mark
from lowtide.measurement._saved import BlockSaved, SavedMeasurement, measure_saved_bytes
from lowtide.measurement._walk import places_in, tensors_in

__all__ = [
    "AllocatorEvents",
    "BlockSaved",
    "EventAccount",
    "LiveStorages",
    "Peak",
    "PeakMeter",
    "SavedMeasurement",
    "StepProfiler",
    "StorageRecord",
    "calibrate",
    "mark_phase",
    "measure_peak",
    "measure_saved_bytes",
    "phase_mark",
    "places_in",
    "tensors_in",
]
