"""What a model would do on a device, found on a CPU under fake tensors: nothing is computed, nothing allocated.

_attention    which attention kernel a device picks
_translate    the target's operators in place of the CPU's
_modules      which module an operator belongs to
_flops        operations and bytes of an operator
_workspace    what kernels allocate inside
_libraries    libraries that would go another way under fake tensors
_storages     storages of one block: made, freed, let go of
_calls        calls of modules: what they were given and returned
_session      one trace while it is made
_block        one block's operators                              ──► OpTrace
_world        a process group of any size in one process
_ledger       storages from making to death
_clock        time and utilisation of a step
_step         a whole training step: what is alive, and what for
_outline      a step with its blocks taken out                    ──► StepOutline, one OpTrace for each kind of block
_account      a ledger                                           ──► Estimate
"""

from lowtide.tracing._attention import AttentionCall, choose_attention
from lowtide.tracing._block import run_forward, trace_block, trace_forward
from lowtide.tracing._libraries import as_with_real_tensors
from lowtide.tracing._outline import Outlined, trace_outline
from lowtide.tracing._step import StepSetup, trace_step
from lowtide.tracing._world import fake_building, fake_world

__all__ = [
    "AttentionCall",
    "Outlined",
    "StepSetup",
    "as_with_real_tensors",
    "choose_attention",
    "fake_building",
    "fake_world",
    "run_forward",
    "trace_block",
    "trace_forward",
    "trace_outline",
    "trace_step",
]
