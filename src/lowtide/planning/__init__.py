"""What to keep and what to recompute under a memory limit, exact, from records alone; no torch.

    OpTrace ─► graph ─► block: every best choice for a kind of block ─┐
                                                                      ▼
                     limit, timeline of the step ─────────► model: a choice for each layer ─► Plan

_graph     values, calls, what backward needs; what one choice holds and costs
_block     the whole frontier of a block: saved bytes against recompute time
_integer   one budget of a block as an integer program
_model     a choice for each layer under the peak of the whole step
"""

from lowtide.planning._block import Frontier, frontier_of
from lowtide.planning._graph import Call, Executor, Graph, Point, evaluate, graph_of, keep_all
from lowtide.planning._integer import best_under
from lowtide.planning._model import Assigned, Choice, Kind, Step, assign, least_peak, peak_of

__all__ = [
    "Assigned",
    "Call",
    "Choice",
    "Executor",
    "Frontier",
    "Graph",
    "Kind",
    "Point",
    "Step",
    "assign",
    "best_under",
    "evaluate",
    "frontier_of",
    "graph_of",
    "keep_all",
    "least_peak",
    "peak_of",
]
