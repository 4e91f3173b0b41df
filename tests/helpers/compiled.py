"""The compiled graphs of one block: what its forward and backward run, and what goes from one to the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

import lowtide
from tests.helpers import families
from tests.helpers.models import Spec


@dataclass
class Graph:
    """One compiled graph."""

    counts: Counter[str]
    """Operators by name."""

    inputs: list[str]
    """Names of what it is given; for backward: saved values and gradients."""


def graphs_of(policy: Any, spec: Spec) -> tuple[list[Graph], list[Graph]]:
    """Compile the first block of a model and run one step: the forward graphs and the backward graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward: list[Graph] = []
    backward: list[Graph] = []

    def keep(into: list[Graph]) -> Any:
        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            nodes = list(graph.graph.nodes)
            counts = Counter(str(n.target) for n in nodes if n.op == "call_function")
            into.append(Graph(counts, [n.name for n in nodes if n.op == "placeholder"]))
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep(forward), bw_compiler=keep(backward), partition_fn=min_cut_rematerialization_partition
    )
    model = families.models.build(spec)
    if policy is not None:
        lowtide.apply(model, policy)
    model.layers[0].compile(backend=backend, fullgraph=True)
    families.spec_step(model, 0, spec=spec)
    return forward, backward
