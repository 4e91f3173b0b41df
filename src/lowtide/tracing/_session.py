"""One trace while it is made: forward, backward, and the record of every operator.

What backward needs is what autograd packs (``saved_tensors_hooks``); a storage that is still alive after forward,
without being packed, returned or given, is held by Python (a context of a custom function, a cache on the module),
counts as saved too and is named as an assumption.
"""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.prediction import Device
from lowtide.records import Environment, NameRecord, OpRecord, OpTrace, StorageRecord, TensorRecord
from lowtide.tracing._calls import Calls
from lowtide.tracing._flops import bytes_moved, flops_of, tensors
from lowtide.tracing._libraries import as_with_real_tensors
from lowtide.tracing._modules import Modules, in_backward, running_node, sequence_number
from lowtide.tracing._storages import Releases, Storage, Storages, is_nothing
from lowtide.tracing._translate import AsOnTarget
from lowtide.tracing._workspace import workspace_bytes

__all__ = ["BlockSession", "environment"]

aten = torch.ops.aten
_LIFTS = (aten.lift_fresh.default, aten.lift.default)


def environment() -> Environment:
    """Say which versions made a record."""
    return Environment(
        torch=torch.__version__, python=platform.python_version(), lowtide=sys.modules["lowtide"].__version__
    )


class BlockSession:
    """One trace while it is made."""

    def __init__(
        self, block: nn.Module, device: Device, threads: int, *, name: str | None = None, inside: str = ""
    ) -> None:
        self.block = block
        self.name = name or type(block).__name__
        self.module_names = _names(block, inside)
        self.device = device
        self.threads = threads
        self.target = AsOnTarget(device)
        self.modules = Modules(self.module_names)
        self.ops: list[OpRecord] = []
        self.storages = Storages(lambda: None if self.ended else len(self.ops))
        self.ended = False
        self.backward_follows = True
        self.saved: list[TensorRecord] = []
        self.saved_at: list[int] = []
        self.saved_in: list[str] = []
        self.asked_at: list[int | None] = []
        self.names: list[NameRecord] = []
        self.calls = Calls(self._record_given, lambda: (len(self.ops), len(self.saved)))
        self.unknown_flops: dict[str, None] = {}
        self.by_node: dict[int, int] = {}
        self.assumptions: list[str] = []

    def place(
        self, state: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], *, mid_model: bool = True
    ) -> None:
        """Number what is there before the block runs; ``mid_model`` lets gradients in."""
        parameters = {name for name, _ in self.block.named_parameters(remove_duplicate=False)}
        for name, tensor in state.items():
            self.storages.add(tensor, "parameter" if name in parameters else "buffer", name)
        given = [(str(i), value) for i, value in enumerate(args)] + list(kwargs.items())
        for name, value in given:
            for tensor in tensors(value):
                self.storages.add(tensor, "argument", name)
        if mid_model:
            self._let_gradients_in(args, kwargs)

    def _let_gradients_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = tensors((args, kwargs))
        if any(t.requires_grad for t in inputs):
            return
        first = next((t for t in inputs if t.is_floating_point()), None)
        if first is not None:
            first.requires_grad_()
            self.assumptions.append(
                "no argument asked for gradients, so the first floating-point one was taken to, as in mid-model"
            )

    def run(self, state: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run forward and backward under the recorder."""
        with ExitStack() as stack:
            self._enter(stack)
            results = self._forward(state, args, kwargs, tensors)
            self._find_held()
            self._backward([t for t in results if t.requires_grad])
            self.ended = True

    def run_forward(
        self,
        state: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors_in: Callable[[Any], Iterable[Tensor]],
    ) -> None:
        """Run forward under the recorder, then let the graph go and see what stays."""
        self.backward_follows = False
        with ExitStack() as stack:
            self._enter(stack)
            results = self._forward(state, args, kwargs, tensors_in)
            self._find_held()
            values = [t.detach() for t in results]
            del results
            gc.collect()
            self.ended = True
            del values

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(as_with_real_tensors(self.target.assumptions))
        stack.enter_context(self.modules.following())
        stack.enter_context(self.target.translating())
        stack.enter_context(_Recorder(self))
        stack.enter_context(torch.enable_grad())

    def _forward(
        self,
        state: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors_in: Callable[[Any], Iterable[Tensor]],
    ) -> list[Tensor]:
        pack = self._pack if self.backward_follows else self._pack_alone
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)
        with self.calls.following(self.module_names), hooks:
            out = torch.func.functional_call(self.block, dict(state), args, kwargs)
        results = list(tensors_in(out))
        for tensor in results:
            known = self.storages.of(tensor)
            if known is not None:
                known.returned = True
        return results

    def _record_given(self, tensor: Tensor) -> TensorRecord:
        self.storages.add(tensor, "constant")
        return self.storages.record(tensor)

    def take_name(self, tensor: Tensor, name: str) -> None:
        """Note a name that the model's code gives."""
        known = self.storages.of(tensor)
        if known is not None and not in_backward():
            at, module = len(self.ops), self.modules.current or ""
            self.names.append(NameRecord(name=name, storage=known.id, at=at, module=module))

    def _pack(self, tensor: Tensor) -> tuple[int, Tensor]:
        number = -1
        if not in_backward():
            number = len(self.saved)
            known = self.storages.add(tensor, "constant")
            if known is not None:
                known.saved = True
            self.saved.append(self.storages.record(tensor))
            self.saved_at.append(len(self.ops))
            self.saved_in.append(self.modules.current or "")
            self.asked_at.append(None)
        return number, tensor

    def _pack_alone(self, tensor: Tensor) -> tuple[int, Tensor]:
        """Hold the storage without its graph: only a backward takes such a cycle apart."""
        number, _ = self._pack(tensor)
        return number, tensor.detach()

    def _unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        number, tensor = packed
        if number >= 0 and self.asked_at[number] is None:
            self.asked_at[number] = len(self.ops)
        return tensor

    def find_releases(self, state: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run forward once more, and see what lives how long when autograd keeps nothing."""
        watch = Releases()
        forward = [op.op for op in self.ops if op.phase == "forward"]
        libraries = as_with_real_tensors(self.target.assumptions)
        with libraries, self.target.translating(), torch.enable_grad(), watch:
            with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None):  # pyright: ignore[reportArgumentType]
                out = torch.func.functional_call(self.block, dict(state), args, kwargs)
            if watch.ops != forward:
                # A table that is built once, say: what was traced is not what runs now.
                return
            found = dict(watch.released)
            del out
        made: dict[int, list[Storage]] = {}
        for storage in self.storages.found:
            if storage.made_by is not None and not storage.backward:
                made.setdefault(storage.made_by, []).append(storage)
        for (place, number), when in found.items():
            if number < len(made.get(place, ())):
                made[place][number].released = when

    def _find_held(self) -> None:
        gc.collect()
        held = [s for s in self.storages.found if s.role == "made" and not s.saved and not s.returned and s.ref()]
        for storage in held:
            storage.saved = True
            made_by = "" if storage.made_by is None else f" made by {self.ops[storage.made_by].op}"
            self.assumptions.append(
                f"{storage.nbytes} bytes{made_by} stay alive after forward without being packed by autograd (a context "
                "of a custom function, or a cache on the module): they count as saved"
            )

    def _backward(self, results: list[Tensor]) -> None:
        if not results:
            self.assumptions.append("no result needs gradients, so there is no backward")
            return
        with torch.utils._python_dispatch._disable_current_modes(), results[0].fake_mode:  # pyright: ignore[reportAttributeAccessIssue]
            root: Tensor = _Incoming.apply(self, *results)  # pyright: ignore[reportAssignmentType]
            given = torch.empty(())
        torch.autograd.backward([root], [given])

    def incoming(self, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Make the gradients of the results, which only autograd holds, as in a longer model."""
        made: list[Tensor] = []
        for i, result in enumerate(like):
            # Under the recorder this would be an operator of the block.
            with torch.utils._python_dispatch._disable_current_modes(), result.fake_mode:  # pyright: ignore[reportAttributeAccessIssue]
                made.append(torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="cpu"))
            self.storages.add(made[-1], "argument", f"gradient of result {i}")
        return tuple(made)

    def record(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, read: list[TensorRecord]
    ) -> None:
        """Write one operator down; ``read`` are its inputs as they were before."""
        index, backward = len(self.ops), in_backward()
        made, given = tensors(result), tensors((args, kwargs))
        inputs = {known.id for t in given if (known := self.storages.of(t)) is not None}
        written = _written(func, args, kwargs)
        fresh = [t for t in made if self.storages.of(t) is None]
        for tensor in fresh:
            known = self.storages.add(tensor, "made")
            if known is not None:
                known.made_by, known.backward = index, backward
        outputs = [known.id for t in made if (known := self.storages.of(t)) is not None]
        view = bool(outputs) and not written and func not in _LIFTS and all(i in inputs for i in outputs)
        for tensor in (*given, *made):
            known = self.storages.of(tensor)
            if known is not None:
                known.last_use = index
        node = running_node() if backward else None
        flops = flops_of(func, args, kwargs, result, view=view)
        if flops is None:
            self.unknown_flops[str(func)] = None
        self.ops.append(
            OpRecord(
                index=index,
                op=str(func),
                phase="backward" if backward else "forward",
                module=self._module(node),
                forward_op=None if node is None else self.by_node.get(node),
                inputs=tuple(read),
                outputs=tuple(self.storages.record(t) for t in made),
                literals=_literals(func, args, kwargs),
                view=view,
                writes=tuple(sorted({k.id for t in written if (k := self.storages.of(t)) is not None})),
                random=torch.Tag.nondeterministic_seeded in func.tags,
                flops=flops,
                bytes_moved=bytes_moved(func, args, kwargs, result, view=view),
                workspace_bytes=workspace_bytes(func, args, self.device, threads=self.threads),
                instead_of=self.target.instead_of or None,
            )
        )
        if not backward:
            self.by_node[sequence_number()] = index

    def _module(self, node: int | None) -> str:
        if self.modules.current is not None:
            return self.modules.current
        forward_op = None if node is None else self.by_node.get(node)
        return "" if forward_op is None else self.ops[forward_op].module

    def finish(self) -> OpTrace:
        """Make the record."""
        unknown = [
            f"{op} has no FLOP formula: its work is unknown, not zero, and is left out of sums"
            for op in self.unknown_flops
        ]
        return OpTrace(
            block=self.name,
            device=self.device.name,
            ops=tuple(self.ops),
            storages=tuple(
                StorageRecord(
                    id=s.id,
                    nbytes=s.nbytes,
                    role=s.role,  # pyright: ignore[reportArgumentType]
                    name=s.name,
                    made_by=s.made_by,
                    last_use=s.last_use,
                    saved=s.saved,
                    returned=s.returned,
                    backward=s.backward,
                    freed=s.freed,
                    released=s.released,
                )
                for s in self.storages.found
            ),
            saved=tuple(self.saved),
            saved_at=tuple(self.saved_at),
            saved_in=tuple(self.saved_in),
            asked_at=tuple(self.asked_at),
            calls=self.calls.records(),
            names=tuple(self.names),
            assumptions=(*self.assumptions, *self.target.assumptions, *unknown),
            environment=environment(),
        )


def _names(block: nn.Module, inside: str) -> dict[nn.Module, str]:
    """Name modules relative to the one ``inside``, which bears no name then, as does what lies around it."""
    below = f"{inside}." if inside else ""
    return {m: "" if name == inside else name.removeprefix(below) for name, m in block.named_modules()}


class _Incoming(torch.autograd.Function):
    """Stands for what comes after the block."""

    @staticmethod
    def forward(ctx: Any, session: BlockSession, *results: Tensor) -> Tensor:
        ctx.session, ctx.like = session, results
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.session.incoming(ctx.like)


class _Recorder(TorchDispatchMode):
    """Sees every operator below autograd and hands it to the session."""

    def __init__(self, session: BlockSession) -> None:
        super().__init__()
        self._session = session

    def take_name(self, tensor: Tensor, name: str) -> None:
        """Be told by ``lowtide.checkpoint_name``."""
        self._session.take_name(tensor, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler") or is_nothing(func):
            return func(*args, **kwargs)
        session = self._session
        given = tensors((args, kwargs))
        for tensor in given:
            # What nobody named before: a constant that the block's Python holds.
            session.storages.add(tensor, "constant")
        read = [session.storages.record(t) for t in given]
        result = session.target.result_of(func, func(*args, **kwargs))
        if tensors(result) or given:
            session.record(func, args, kwargs, result, read)
        return result


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that the schema says are written."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tensors(value)
    return found


def _literals(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    names = [argument.name for argument in func._schema.arguments]
    given = [*zip(names, args, strict=False), *kwargs.items()]
    return ", ".join(f"{name}={_plain(value)}" for name, value in given if not tensors(value) and value is not None)


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size | tuple) else str(value)
