"""The outline of a step: the trainer's own step under fake tensors, with every block replaced by an empty call.

    first step    each kind of block runs once, so that the form of its results is known; others of its kind are empty
    second step   watched; all blocks are empty
    afterwards    one trace for each kind, on a copy of the block that has no sharding

So the work grows with kinds, besides what sharding, optimizer and an empty call cost for each layer. Two blocks are of
one kind if they have the same class, the same plain attributes in all their modules (the one that numbers the blocks
aside), parameters and buffers of the same form, and were given arguments of the same form.

An empty call makes results, in backward gradients of arguments and parameters, all of the right form, and keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from lowtide.errors import UserError
from lowtide.prediction import find_device, speeds_of
from lowtide.prediction._outline import BlockCall, OutlineChange, PhaseTimes, StepOutline
from lowtide.records import OpTrace
from lowtide.tracing._account import PHASES
from lowtide.tracing._block import environment, trace_block
from lowtide.tracing._clock import StepClock
from lowtide.tracing._ledger import storages_of
from lowtide.tracing._libraries import as_with_real_tensors
from lowtide.tracing._modules import Modules
from lowtide.tracing._step import Session, StepSetup, category_of
from lowtide.tracing._translate import AsOnTarget

__all__ = ["Outlined", "trace_outline"]

Form = tuple[Any, ...]


@dataclass(frozen=True)
class Outlined:
    """An outline, and the trace of each kind of block in it."""

    outline: StepOutline
    traces: Mapping[str, OpTrace]


def trace_outline(
    step: Callable[[], object],
    *,
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] = (),
    setup: StepSetup | None = None,
    templates: Mapping[str, nn.Module] | None = None,
    names: Mapping[nn.Module, str] | None = None,
) -> Outlined:
    """Run ``step`` twice under fake tensors with empty blocks, then trace each kind of block.

    Args:
        step: forward, backward, optimizer and ``zero_grad``, once; made and called under a ``FakeTensorMode``.
        model: what ``step`` calls, without a policy.
        blocks: its blocks by FQN; none inside another.
        optimizer: what steps.
        setup: device, processes and what the estimate says of them.
        templates: for a sharded model, a copy of each block from before sharding, with parameters in the type in
            which it computes, by FQN; blocks of the same kind may share one.
        names: modules and what they are called; by default their names in ``model``.

    Raises:
        UserError: a block returns something that is neither a tensor nor a container of tensors.
    """
    setup = setup or StepSetup()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    device = find_device(setup.device)
    watched = names if names is not None else {module: name for name, module in model.named_modules()}
    target = AsOnTarget(device)
    kinds, numbering = _Kinds(), _numbering(blocks)
    with ExitStack() as stack:
        stubs = [stack.enter_context(_emptied(fqn, block, kinds, numbering)) for fqn, block in blocks.items()]
        with target.translating(), as_with_real_tensors(target.assumptions):
            step()
            clock = StepClock(speeds_of(setup.profile or device, threads=setup.threads), threads=setup.threads)
            session = Session(model, device, target, Modules(watched), setup.threads, clock)
            session.place(model, optimizers)
            calls: list[_Call] = []
            for stub in stubs:
                stub.session, stub.calls = session, calls
            with session.watching():
                step()
        session.ledger.bury()
    traces = {
        kind.name: trace_block(
            (templates or blocks)[kind.block], kind.args, kind.kwargs, device=device, threads=setup.threads
        )
        for kind in kinds.found.values()
    }
    return Outlined(_outline(session, clock, calls, setup, device.name, target, traces), traces)


def _outline(
    session: Session,
    clock: StepClock,
    calls: Sequence[_Call],
    setup: StepSetup,
    device: str,
    target: AsOnTarget,
    traces: Mapping[str, OpTrace],
) -> StepOutline:
    ledger = session.ledger
    changes: list[OutlineChange] = []
    for operator, storage, delta in ledger.changes:
        stage, module, op = ledger.operators[operator]
        changes.append(OutlineChange(storage=storage, delta=delta, phase=PHASES[stage], module=module, op=op))
    of_traces = dict.fromkeys(text for trace in traces.values() for text in trace.assumptions)
    dtypes = [t.dtype for trace in traces.values() for op in trace.ops for t in op.inputs if ".mm" in op.op]
    return StepOutline(
        categories=tuple(category_of(life) for life in ledger.lives),
        changes=tuple(changes),
        calls=tuple(
            BlockCall(
                block=call.block,
                kind=call.kind,
                forward=(call.forward[0], call.forward[1]),
                backward=(call.backward[0], call.backward[1]) if len(call.backward) == 2 else None,
                arguments=tuple(call.arguments),
            )
            for call in calls
        ),
        **{phase: PhaseTimes(**clock.parts(phase)) for phase in ("forward", "backward", "optimizer")},  # pyright: ignore[reportArgumentType]
        model_flops=clock.model_flops,
        hardware_flops=clock.hardware_flops,
        tokens=setup.tokens,
        dtype=dtypes[0] if dtypes else "float32",
        device=device,
        world_size=setup.world_size,
        rank=setup.rank,
        threads=setup.threads,
        assumptions=tuple(dict.fromkeys((*setup.assumptions, *target.assumptions, *of_traces, *clock.assumptions))),
        environment=environment(),
    )


@dataclass
class _Call:
    """One call of a block in the watched step."""

    block: str
    kind: str
    arguments: list[tuple[str, int]]
    forward: list[int] = field(default_factory=list[int])
    backward: list[int] = field(default_factory=list[int])


@dataclass
class _Kind:
    """Blocks that are alike."""

    name: str
    block: str
    """FQN of the first."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    """Of the results: a form, the number of the argument that a result is, or a plain value."""
    spec: TreeSpec


@dataclass
class _Kinds:
    found: dict[Form, _Kind] = field(default_factory=dict[Form, _Kind])

    def add(self, key: Form, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = _storages(tree_flatten((args, kwargs))[0])
        leaves, spec = tree_flatten(out)
        forms: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                same = next((i for i, other in given if other is leaf.untyped_storage()), None)
                forms.append(_Form.of(leaf) if same is None else same)
            elif _plain(leaf):
                forms.append(leaf)
            else:
                raise UserError(
                    f"block {fqn} returns a {type(leaf).__name__}, which is no container of tensors that torch knows "
                    "(torch.utils._pytree): the model of traces cannot stand in for it; use the whole fake step"
                )
        like_args, like_kwargs = tree_map_only(Tensor, _like, (args, kwargs))
        self.found[key] = _Kind(f"{len(self.found)}", fqn, like_args, like_kwargs, forms, spec)


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


class _Empty:
    """Stands in for one block's forward."""

    def __init__(self, fqn: str, block: nn.Module, kinds: _Kinds, numbering: frozenset[tuple[str, str]]) -> None:
        self.fqn, self.block, self.kinds = fqn, block, kinds
        self.session: Session | None = None
        self.calls: list[_Call] = []
        self.static = _static_form(block, numbering)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = (*self.static, *_form_of((args, kwargs)))
        kind = self.kinds.found.get(key)
        if kind is None:
            out = type(self.block).forward(self.block, *args, **kwargs)
            self.kinds.add(key, self.fqn, args, kwargs, out)
            return out
        call = _Call(self.fqn, kind.name, [])
        if self.session is not None:
            call.arguments = list(self._arguments(args, kwargs))
            self.calls.append(call)
        given = tree_flatten((args, kwargs))[0]
        return tree_unflatten(self._results(kind, call, given), kind.spec)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[tuple[str, int]]:
        assert self.session is not None
        named = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
        found: set[tuple[str, int]] = set()
        for name, value in named:
            for tensor in tree_flatten(value)[0]:
                for storage in storages_of(tensor) if isinstance(tensor, Tensor) else ():
                    life = self.session.ledger.find(storage)
                    if life is not None:
                        found.add((name, life.number))
        return found

    def mark(self, marks: list[int]) -> None:
        if self.session is not None:
            self.session.ledger.bury()
            marks.append(len(self.session.ledger.changes))

    def _results(self, kind: _Kind, call: _Call, given: list[Any]) -> list[Any]:
        forms = [leaf for leaf in kind.leaves if isinstance(leaf, _Form)]
        inputs = [t for t in (*given, *self.block.parameters()) if isinstance(t, Tensor) and t.requires_grad]
        made = _Pass.apply(self, call, forms, *inputs) if forms else ()
        results = iter(made if isinstance(made, tuple) else (made,))
        found: list[Any] = []
        for leaf in kind.leaves:
            if isinstance(leaf, _Form):
                found.append(next(results))
            else:
                found.append(given[leaf] if type(leaf) is int else leaf)
        return found


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, empty: _Empty, call: _Call, forms: Sequence[_Form], *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.empty, ctx.call = empty, call
        ctx.forms = [_Form.of(t) for t in inputs]
        empty.mark(call.forward)
        made = tuple(form.make() for form in forms)
        empty.mark(call.forward)
        ctx.mark_non_differentiable(*(t for t, f in zip(made, forms, strict=True) if not f.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.empty.mark(ctx.call.backward)
        made = [form.make() for form in ctx.forms]
        ctx.empty.mark(ctx.call.backward)
        return None, None, None, *made


@contextmanager
def _emptied(fqn: str, block: nn.Module, kinds: _Kinds, numbering: frozenset[tuple[str, str]]) -> Any:
    if "forward" in vars(block):
        raise UserError(f"block {fqn} has a forward of its own (a policy, or a wrapper): outline the bare model")
    empty = _Empty(fqn, block, kinds, numbering)
    vars(block)["forward"] = empty
    try:
        yield empty
    finally:
        del vars(block)["forward"]


def _storages(leaves: Sequence[Any]) -> list[tuple[int, torch.UntypedStorage]]:
    return [(i, t.untyped_storage()) for i, t in enumerate(leaves) if isinstance(t, Tensor)]


def _like(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _form_of(value: Any) -> Form:
    leaves, spec = tree_flatten(value)
    forms = [
        _Form.of(leaf) if isinstance(leaf, Tensor) else leaf if _plain(leaf) else type(leaf).__qualname__
        for leaf in leaves
    ]
    return (*forms, str(spec))


def _numbering(blocks: Mapping[str, nn.Module]) -> frozenset[tuple[str, str]]:
    """Return the attributes, as (module, key), that hold the block's own number in every block."""
    found: set[tuple[str, str]] | None = None
    for fqn, block in blocks.items():
        numbers = [int(part) for part in fqn.split(".") if part.isdecimal()]
        own = {
            (name, key)
            for name, module in block.named_modules()
            for key, value in vars(module).items()
            if numbers and type(value) is int and value == numbers[-1]
        }
        found = own if found is None else found & own
    return frozenset(found or ())


def _static_form(block: nn.Module, numbering: frozenset[tuple[str, str]]) -> Form:
    found: list[Any] = []
    for name, module in block.named_modules():
        plain = [
            (key, value)
            for key, value in sorted(vars(module).items())
            if key != "forward" and _plain(value) and (name, key) not in numbering
        ]
        tensors = [
            (key, tuple(t.shape), t.dtype, t.requires_grad)
            for key, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        ]
        found.append((name, type(module), tuple(plain), tuple(tensors)))
    return tuple(found)
