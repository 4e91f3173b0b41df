"""What to keep and what to recompute under a memory limit, exact, from records alone; no torch.

    OpTrace ─► graph ─► block: every best choice for a kind of block ─┐
                                                                      ▼
                     limit, timeline of the step ─────────► model: a choice for each layer ─► Plan

_graph        values, calls, what backward needs; what one choice holds and costs
_block        the whole frontier of a block: saved bytes against recompute time
_integer      one budget of a block as an integer program
_model        a choice for each layer under the peak of the whole step
_parts        outline of a step, traces ─► what there is to choose from, the moments of the step
_plan         limit ─► Plan; Plan ─► policy
_fingerprint  by what a model is known again
_file         plans as YAML
"""

from lowtide.planning._block import Frontier, frontier_of
from lowtide.planning._file import plan_table, plan_text, read_plan, write_plan
from lowtide.planning._fingerprint import BlockFacts, check_model, parameters_hash
from lowtide.planning._graph import Call, Executor, Graph, Point, evaluate, graph_of, keep_all
from lowtide.planning._integer import best_under
from lowtide.planning._model import Assigned, Choice, Kind, Step, assign, least_peak, peak_of
from lowtide.planning._names import patterns_of
from lowtide.planning._parts import Menu, menus_of, step_of
from lowtide.planning._plan import MARGIN, Planner, policy_of

__all__ = [
    "MARGIN",
    "Assigned",
    "BlockFacts",
    "Call",
    "Choice",
    "Executor",
    "Frontier",
    "Graph",
    "Kind",
    "Menu",
    "Planner",
    "Point",
    "Step",
    "assign",
    "best_under",
    "check_model",
    "evaluate",
    "frontier_of",
    "graph_of",
    "keep_all",
    "least_peak",
    "menus_of",
    "parameters_hash",
    "patterns_of",
    "peak_of",
    "plan_table",
    "plan_text",
    "policy_of",
    "read_plan",
    "step_of",
    "write_plan",
]
