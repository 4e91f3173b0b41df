"""The only code that changes a model.

_names       bare FQNs; every place in the module tree
_discover    the blocks of a model
_operators   operator names -> overloads; what matters of an overload
_tape        what a region ran, and the modes that write and follow it
_session     rules that matched nothing, over all regions and ranks
_region      forward of a checkpointed block (executor recompute)
_compiled    the same decisions for the compiler's partitioner
_refusals    what is refused, each with the way out
_apply       decide, then act; remove
"""

from lowtide.regions._apply import Applied, apply
from lowtide.regions._discover import find_blocks
from lowtide.regions._names import Slot, bare_fqn, innermost, slots
from lowtide.regions._region import Region

__all__ = ["Applied", "Region", "Slot", "apply", "bare_fqn", "find_blocks", "innermost", "slots"]
