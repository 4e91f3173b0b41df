"""A whole training step under fake tensors: what is alive when, and what for.

    step() ─► (once, unwatched: the first optimizer step makes states and over-counts) ─► step() watched ─► Estimate

The caller makes everything under a ``FakeTensorMode``: real model, real policy, real ``fully_shard``, real optimizer,
and a ``step`` that runs forward, backward and optimizer, as training does. Every storage is followed from making to
death. What it was for:

    parameters         there before: parameters and buffers (shards)
    optimizer_state    there before, in the optimizer
    gradients          on a parameter's ``grad`` when the optimizer steps, from its making on
    communication      made or refilled by FSDP and collectives (gathered parameters, their buffers)
    inputs             handed to the model, and whole numbers made before it ran
    logits_and_loss    the model's results, what the loss made of them, and their gradients
    saved_activations  made in forward and still there when backward begins
    transient          everything else; in backward also what is recomputed, and kernels' workspaces

On a target other than the CPU the target's kernels run (``_translate``). Compiled code is not traced: under fake
tensors and a dispatch mode torch runs it eagerly, so a compiled model's estimate would be another program's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide.prediction import Device, DeviceProfile, find_device, speeds_of
from lowtide.records import Category, Estimate
from lowtide.tracing._account import PHASES, Account
from lowtide.tracing._block import environment
from lowtide.tracing._clock import StepClock
from lowtide.tracing._ledger import (
    Ledger,
    Life,
    Watch,
    following_resizes,
    following_rng_states,
    is_lift,
    storages_of,
)
from lowtide.tracing._libraries import as_with_real_tensors
from lowtide.tracing._modules import Modules, in_backward, running_node, sequence_number
from lowtide.tracing._translate import AsOnTarget
from lowtide.tracing._workspace import workspace_bytes

Stage = Literal["before", "forward", "loss", "backward", "after", "optimizer"]

_COMMUNICATES = ("fsdp", "c10d", "_c10d_functional", "c10d_functional")
_GPU_BLOCK_BYTES = 512
"""torch's caching allocator hands out and counts multiples of it (``kMinBlockSize``, torch 2.11 to 2.15)."""

_ALLOCATES = ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "zeros", "new_zeros")


@dataclass(frozen=True)
class StepSetup:
    """Who takes the step, and for which device; what an estimate says besides bytes."""

    device: str | Device = "cpu"
    world_size: int = 1
    rank: int = 0
    policy: str = "none"
    threads: int = 1
    """CPU threads of a process: kernels on a CPU have workspaces for each."""
    profile: DeviceProfile | None = None
    """Measured speeds of the device, in place of the table's."""
    tokens: int | None = None
    """Tokens that all ranks take in a step, for tokens a second."""
    assumptions: tuple[str, ...] = ()


def trace_step(
    step: Callable[[], object],
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    setup: StepSetup | None = None,
    names: Mapping[nn.Module, str] | None = None,
    warm_up: int = 1,
) -> Estimate:
    """Run ``step`` under fake tensors and return what was alive.

    Args:
        step: forward, backward, optimizer and ``zero_grad``, once; made and called under a ``FakeTensorMode``.
        model: what ``step`` calls.
        optimizer: what steps, for its states.
        setup: device, processes and what the estimate says of them.
        names: modules and what they are called; by default their names in ``model``.
        warm_up: steps before the one that is watched.
    """
    setup = setup or StepSetup()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    device = find_device(setup.device)
    watched = names if names is not None else {module: name for name, module in model.named_modules()}
    target = AsOnTarget(device)
    with target.translating(), as_with_real_tensors(target.assumptions):
        for _ in range(warm_up):
            step()
        clock = StepClock(speeds_of(setup.profile or device, threads=setup.threads), threads=setup.threads)
        session = Session(model, device, target, Modules(watched), setup.threads, clock)
        session.place(model, optimizers)
        with session.watching():
            step()
    session.ledger.bury()
    return Account(session.ledger, category_of).estimate(
        device=device.name,
        world_size=setup.world_size,
        rank=setup.rank,
        policy=setup.policy,
        time=clock.time(tokens=setup.tokens),
        assumptions=(*setup.assumptions, *target.assumptions, *clock.assumptions),
        environment=environment(),
    )


def category_of(life: Life) -> Category:
    """Decide what a storage was for, once the step is over."""
    if life.category is not None:
        return life.category
    if life.stage == "loss":
        return "logits_and_loss"
    return "saved_activations" if life.stage == "forward" and life.outlived_forward else "transient"


class Session:
    """One step while it is watched."""

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        target: AsOnTarget,
        modules: Modules,
        threads: int,
        clock: StepClock,
    ) -> None:
        self.clock = clock
        self.root = model
        self.device = device
        self.target = target
        self.modules = modules
        self.threads = threads
        self.ledger = Ledger(1 if device.kind == "cpu" else _GPU_BLOCK_BYTES)
        self.stage: Stage = "before"
        self.after_root = -1
        """Nodes with this sequence number or a later one belong to the loss."""
        self.by_node: dict[int, str] = {}

    def place(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Register what is there before the step."""
        self.ledger.operators.append(("before", "", "there before the step"))
        parameters = [*model.parameters(), *model.buffers()]
        self._register(parameters, "parameters")
        self._register((p.grad for p in parameters if p.grad is not None), "gradients")
        for optimizer in optimizers:
            self._register(_tensors(list(optimizer.state.values())), "optimizer_state")

    def _register(self, tensors: Iterable[Tensor], category: Category) -> None:
        for tensor in tensors:
            for storage in storages_of(tensor):
                if self.ledger.find(storage) is None:
                    life = self.ledger.add(storage, "before", "", "there before the step")
                    life.category = category

    def watching(self) -> ExitStack:
        """Enter everything that tells of the step."""
        stack = ExitStack()
        stack.enter_context(following_resizes(self._on_resize))
        stack.enter_context(following_rng_states(self._on_rng_state))
        stack.enter_context(self.modules.following())
        self.modules.on_enter, self.modules.on_leave = self._enter, self._leave
        for handle in (
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ):
            stack.callback(handle.remove)
        stack.enter_context(Watch(self._before, self._seen, self.clock.wrapped))
        return stack

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module is self.root and not in_backward():
            self._mark(args, "inputs")
            self.stage = "forward"

    def _leave(self, module: nn.Module, output: Any) -> None:
        if module is self.root and not in_backward():
            self.after_root = torch.autograd._get_sequence_nr()
            self._mark(list(_tensors(output)), "logits_and_loss")
            self.stage = "loss"

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.stage = "optimizer"
        for group in optimizer.param_groups:
            self._mark([p.grad for p in group["params"] if p.grad is not None], "gradients", certain=True)

    def _optimizer_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.stage = "after"

    def _mark(self, value: Any, category: Category, *, certain: bool = False) -> None:
        for storage in storages_of(value):
            life = self.ledger.find(storage)
            if life is not None and (certain or life.category is None):
                life.category = category

    def _before(self, func: Any) -> None:
        self.ledger.bury()
        if in_backward():
            if self.stage != "backward":
                self._backward_begins()
        elif self.stage == "backward":
            self.stage = "after"
        self.ledger.operators.append((self.stage, self._module(), str(func)))

    def _backward_begins(self) -> None:
        for life in self.ledger.alive():
            life.outlived_forward = True
        self.stage = "backward"

    def _module(self) -> str:
        if self.modules.current is not None:
            return self.modules.current
        node = running_node()
        return "" if node is None else self.by_node.get(node, "")

    def _seen(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
        result = self.target.result_of(func, result)
        stage, module, name = self.ledger.operators[-1]
        communicates = func.namespace in _COMMUNICATES
        for storage in storages_of(result):
            life = self.ledger.find(storage)
            if life is not None:
                if life.counted:
                    self.ledger.resize(life, storage.nbytes())
                continue
            outside = not is_lift(func) and any(storage is other for other in storages_of((args, kwargs)))
            life = self.ledger.add(storage, stage, module, name, counted=not outside)
            life.category = self._certain(func, stage, result)
        if communicates:
            self._communicated(args, kwargs, result)
        inside = workspace_bytes(func, args, self.device, threads=self.threads)
        if inside:
            self.ledger.pulse(inside, stage, module, name)
        self.clock.operator(PHASES[stage], func, args, kwargs, result)
        if not in_backward() or self.modules.current is not None:
            self.by_node[sequence_number()] = module
        return result

    def _certain(self, func: Any, stage: str, result: Any) -> Category | None:
        if func.namespace in _COMMUNICATES:
            return "communication"
        if stage == "backward" and self.modules.current is None:
            node = running_node()
            if node is not None and node >= self.after_root >= 0:
                return "logits_and_loss"
        whole = isinstance(result, Tensor) and not result.is_floating_point()
        return "inputs" if stage in ("before", "after") and whole else None

    def _communicated(self, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Buffers that were allocated for a collective are known when it uses them."""
        for storage in storages_of((args, kwargs, result)):
            life = self.ledger.find(storage)
            if life is not None and life.category is None and life.op.split(".")[1:2] and _allocated(life):
                life.category = "communication"

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        life = self.ledger.find(storage)
        if life is None:
            life = self.ledger.add(storage, self.stage, self._module(), "refilled in place")
            life.category = "communication"
            return
        if not life.counted:
            life.counted = True
            life.category = life.category or "communication"
            life.op, life.module = "refilled in place", self._module()
        self.ledger.resize(life, storage.nbytes())

    def _on_rng_state(self, state: Tensor) -> None:
        for storage in storages_of(state):
            if self.ledger.find(storage) is None:
                self.ledger.add(storage, self.stage, self._module(), "torch.get_rng_state")


def _allocated(life: Life) -> bool:
    return life.op.split(".")[1] in _ALLOCATES


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield tensors in containers and in objects with fields (a model's output)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for item in vars(value).values():
            yield from _tensors(item)
