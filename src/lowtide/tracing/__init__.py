"""What a model would do on a device, found on a CPU under fake tensors: nothing is computed, nothing allocated.

_attention    which attention kernel a device picks
_translate    the target's operators in place of the CPU's
_modules      which module an operator belongs to
_flops        operations and bytes of an operator
_workspace    what kernels allocate inside
_block        one block's operators            ──► OpTrace
"""

from lowtide.tracing._attention import AttentionCall, choose_attention
from lowtide.tracing._block import trace_block

__all__ = ["AttentionCall", "choose_attention", "trace_block"]
