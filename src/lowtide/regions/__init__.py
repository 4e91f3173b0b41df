"""The only code that changes a model.

_names       bare FQNs; every place in the module tree
_discover    the blocks of a model
_operators   operator names -> overloads; what matters of an overload
_plan        rules, operator by operator; which modules run
_naming      names that a model's code gives to values
_offload     saved values that wait on the host
_session     rules that matched nothing, over all regions and ranks
_region      forward of a checkpointed block: hands it to an executor
_arguments   a call's arguments, apart and together again
_state       buffers and attributes that forward changes, put back around recompute
_refusals    what is refused, each with the way out
_apply       decide, then act; remove

executor recompute
_tape        what a region ran, and how two runs are compared
_modes       the modes that write the tape and follow it

executor replay
_catalogue   which operators can be recorded, and how
_record      what forward ran, over numbered values
_schedule    what backward needs of it, and in which order
_held        values between forward and backward
_rerun       one call's values in backward, run from the record
_replay      forward on record; verified the first time

executor compile
_compiled    the same decisions for the compiler's partitioner
"""

from lowtide.regions._apply import Applied, apply
from lowtide.regions._discover import find_blocks
from lowtide.regions._names import Slot, bare_fqn, compress_names, innermost, slots
from lowtide.regions._naming import checkpoint_name
from lowtide.regions._region import Region

__all__ = [
    "Applied",
    "Region",
    "Slot",
    "apply",
    "bare_fqn",
    "checkpoint_name",
    "compress_names",
    "find_blocks",
    "innermost",
    "slots",
]
