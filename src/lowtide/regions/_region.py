"""A region: a module whose ``forward`` is carried out under ``torch.utils.checkpoint``.

``Region`` stands in for ``forward`` on the instance. That keeps names, ``isinstance``, pickling, deepcopy and
``compile(fullgraph=True)``, and because module hooks run outside ``forward``, FSDP2's own operators never enter
the region, in either order with ``fully_shard`` (checked in torch 2.11 to 2.14).

The first time that a region meets inputs of a form it records thoroughly: every operator with its literals, writes
to tensors from outside, changed buffers. Its first recompute is compared with all of that. Afterwards a region
without saves runs plain, with no mode in the way; a region with saves keeps comparing operators and shapes.

What forward changed must not change twice: recompute runs with the buffers and attributes from before forward in
place (``_state``), and with the arguments as they were given (``_arguments``).

Limits: hooks on modules inside a region run again in recompute; a Python side effect in plain regions is caught only
where it changes operators, shapes or literals at the first recompute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from lowtide.errors import RefusedError, StateChangedError
from lowtide.policy import LayerPolicy, RegionRecipe
from lowtide.regions._arguments import Spec, flatten
from lowtide.regions._modes import Recording, Repeating
from lowtide.regions._names import bare_fqn
from lowtide.regions._offload import ParkedCall, Parking
from lowtide.regions._plan import Scope
from lowtide.regions._refusals import own_checkpointing
from lowtide.regions._replay import Replayer
from lowtide.regions._session import Session
from lowtide.regions._state import HostRandom, StateWatch, modules_of
from lowtide.regions._tape import Tape, generator_states, random_without_state, refuse_outside_writes

_MOST_FORMS = 256


@dataclasses.dataclass
class _Facts:
    """What is known of a region for one form of inputs."""

    needs_tape: bool
    changed_buffers: tuple[str, ...]
    draws_on_host: bool
    """Whether forward draws from the generators of NumPy or Python."""
    verified: bool = False
    unneeded: frozenset[tuple[int | None, int]] = frozenset()
    """(rule, call) of outputs that a rule names and backward never needs."""


class Region:
    """Replaces ``forward`` on one module. Made by ``apply``; ``apply(...).remove()`` takes it away."""

    kind: type[nn.Module] = nn.Module
    """The class of module that this class of region is for."""

    def __init__(
        self,
        module: nn.Module,
        recipe: RegionRecipe,
        policy: LayerPolicy,
        session: Session,
        aliases: tuple[str, ...],
    ) -> None:
        self._module = weakref.ref(module)
        self.recipe = recipe
        self.policy = policy
        self.session = session
        self.aliases = aliases
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        self.plan, self.compiled_contexts = session.plan_of(recipe)
        self._forget()

    def _forget(self) -> None:
        """Know nothing of any form of inputs."""
        self.facts: dict[Any, _Facts] = {}
        self.replayer: Replayer | None = None
        self.not_replayed: dict[Any, str] = {}
        self._scoped: tuple[list[int], Scope] | None = None
        self.parking = Parking(self.session.host_pool) if self.plan.offloads else None

    # A weak reference: a module that held a strong one to itself would wait for the cycle collector to free its
    # parameters. Copies and pickles carry the module, so that a copy runs its own parameters.
    def __reduce__(self) -> Any:
        return _new_region, (self.kind,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("recipe", "policy", "session", "aliases", "replaced")
        return {"module": self._module(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module = weakref.ref(state.pop("module"))
        self.__dict__.update(state)
        self.plan, self.compiled_contexts = self.session.plan_of(self.recipe)
        self._forget()

    @property
    def module(self) -> nn.Module:
        """The module whose forward this is."""
        module = self._module()
        assert module is not None
        return module

    @property
    def fqn(self) -> str:
        """Name of the region's module in the bare model."""
        return self.recipe.fqn

    @property
    def index(self) -> int:
        """Index of the block."""
        return self.recipe.block.index

    @property
    def executor(self) -> str:
        """What carries the region out in eager code; a compiled block is carried out by the compiler."""
        if self.recipe.budget is not None:
            return "compile"
        return "replay" if self._wants_replay and not self.not_replayed else "recompute"

    @property
    def _wants_replay(self) -> bool:
        """Whether replay is asked for, or is the only one that knows what backward needs; it cannot offload yet."""
        wanted = self.policy.executor == "replay" or (self.policy.executor == "auto" and self.plan.wide)
        return wanted and not self.plan.offloads

    @property
    def reason(self) -> str:
        """Why that executor."""
        if self.not_replayed:
            return f"not replayed: {next(iter(self.not_replayed.values()))}"
        if self.plan.offloads and self.policy.executor == "replay":
            return "not replayed: the policy offloads, which recompute carries out"
        if self.recipe.budget is not None:
            return "the compiler chooses"
        if self.policy.executor != "auto":
            return "asked for"
        return "saves what backward needs, and nothing else" if self._wants_replay else "by default"

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that stands behind, for ``inspect.signature``."""
        return self._inner(self.module)

    @property
    def __name__(self) -> str:
        return "forward"

    def _inner(self, module: nn.Module) -> Callable[..., Any]:
        if self.replaced is not None:
            return self.replaced
        return types.MethodType(type(module).forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward: bare under ``no_grad``, else checkpointed."""
        module = self.module
        if not torch.is_grad_enabled():
            # Written out: dynamo, which comes here in evaluation, does not trace the making of a bound method.
            bare = self.replaced
            return type(module).forward(module, *args, **kwargs) if bare is None else bare(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._trace(module, args, kwargs)
        if torch._C._are_functorch_transforms_active():
            raise RefusedError(
                f"region {self.fqn} runs inside torch.func (vmap, grad, jvp ...), where saved tensors cannot be "
                "replaced: call remove() on what lowtide.apply returned, or take the transform off this model"
            )
        if self.recipe.budget is not None:
            raise RefusedError(
                f"region {self.fqn}: a memory budget is for compiled blocks, and this one runs eagerly: nothing would "
                "be done. Compile it (`compile: true`, or block.compile() after lowtide.apply), or use another policy"
            )
        return self._run(module, args, kwargs)

    def _trace(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What dynamo traces: it must touch nothing that differs between blocks, else each is compiled anew."""
        replaced = self.replaced

        def body(*args: Any, **kwargs: Any) -> Any:
            return type(module).forward(module, *args, **kwargs) if replaced is None else replaced(*args, **kwargs)

        if self.recipe.budget is not None:
            # One budget for each graph, and nothing process-wide (torch 2.13 and later).
            with torch.autograd.graph.region_activation_memory_budget(self.recipe.budget):
                return self._checkpointed(body, args, kwargs)
        return self._checkpointed(body, args, kwargs)

    def _checkpointed(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return checkpoint(
            body,
            *args,
            use_reentrant=False,
            preserve_rng_state=self.recipe.preserve_rng,
            context_fn=self.compiled_contexts,
            **kwargs,
        )

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module.__dict__.get("gradient_checkpointing") is True:
            raise own_checkpointing(self.fqn, module)
        _refuse_caches(self.fqn, args, kwargs)
        leaves, spec = flatten(args, kwargs)
        modules = modules_of(module)
        form = _form(modules, leaves)
        if self._wants_replay and form not in self.not_replayed:
            return self._replay(module, args, kwargs, form)
        facts = self.facts.get(form)
        invocation = _Invocation(self, module, args, kwargs, spec)
        if facts is None or not facts.verified:
            out = self._run_thoroughly(invocation, leaves, form, modules)
        else:
            invocation.watch = StateWatch(modules, clone=facts.changed_buffers)
            invocation.host = HostRandom() if facts.draws_on_host else None
            if facts.needs_tape:
                out = self._checkpoint(invocation, leaves, Tape(thorough=False, unneeded=facts.unneeded))
            else:
                out = self._plain(invocation, leaves)
        self.session.region_ended(self.fqn)
        return out

    def _plain(self, invocation: _Invocation, leaves: list[Any]) -> Any:
        """Run without a mode; random operators, which no mode sees here, are found by the generators' states."""
        if self.plan.preserve_rng or self.plan.allow_inexact:
            return checkpoint(invocation, *leaves, use_reentrant=False, preserve_rng_state=self.plan.preserve_rng)
        before = generator_states(leaves)
        out = checkpoint(invocation, *leaves, use_reentrant=False, preserve_rng_state=False)
        after = generator_states(leaves)
        if any(not torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True)):
            raise RefusedError(random_without_state(self.fqn, "an operator"))
        return out

    def _replay(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], form: Any) -> Any:
        """Run forward on record; the first time, see whether it can be replayed."""
        inner = self._inner(module)
        if self.replayer is None:
            self.replayer = Replayer(self.plan, self.session, self.fqn)
        out, problem = self.replayer.run(lambda: inner(*args, **kwargs), module, form, self._scope())
        if problem is not None:
            if len(self.not_replayed) >= _MOST_FORMS:
                self.not_replayed.clear()
            self.not_replayed[form] = problem
        self.session.region_ended(self.fqn)
        return out

    def _run_thoroughly(self, invocation: _Invocation, leaves: list[Any], form: Any, modules: list[nn.Module]) -> Any:
        """Record everything, and learn what later calls need."""
        module, host = invocation.module, HostRandom()
        invocation.watch = StateWatch(modules, clone=None)
        storages = {b.untyped_storage()._cdata: name for name, b in module.named_buffers()}
        tape = Tape(thorough=True)
        invocation.learning = (form, tape)
        out = self._checkpoint(invocation, leaves, tape)
        changed = invocation.watch.forget_unchanged()
        draws_on_host = host.changed()
        invocation.host = host if draws_on_host else None
        plan = self.plan
        if not plan.allow_inexact:
            if draws_on_host and not plan.preserve_rng:
                raise RefusedError(random_without_state(self.fqn, "NumPy or Python's random"))
            refuse_outside_writes(self.fqn, tape, storages, [t for t in leaves if isinstance(t, torch.Tensor)])
        if len(self.facts) >= _MOST_FORMS:
            self.facts.clear()
        self.facts[form] = _Facts(plan.selects or tape.saw_routing, changed, draws_on_host)
        return out

    def _checkpoint(self, invocation: _Invocation, leaves: list[Any], tape: Tape) -> Any:
        parked = None if self.parking is None else ParkedCall(self.parking)
        contexts = (
            Recording(self.plan, tape, self.session, self.fqn, self._scope(), parked),
            Repeating(self.plan, tape, self.session.check, self.fqn),
        )
        out = checkpoint(
            invocation,
            *leaves,
            use_reentrant=False,
            preserve_rng_state=self.plan.preserve_rng,
            context_fn=lambda: contexts,
        )
        if parked is not None:
            parked.forward_ended()
        return out

    def _scope(self) -> Scope | None:
        """Return what tells which modules run, where a rule asks for it; made anew when modules came or went."""
        if not self.plan.needs_scope:
            return None
        modules = modules_of(self.module)
        if self._scoped is None or self._scoped[0] != [id(m) for m in modules]:
            names: dict[int, list[str]] = {}
            prefix = self.recipe.module
            for name, module in self.module.named_modules(remove_duplicate=False):
                names.setdefault(id(module), []).append(".".join(filter(None, (prefix, bare_fqn(name)))))
            self._scoped = [id(m) for m in modules], Scope(self.plan, names, Region._run.__code__)
        return self._scoped[1]

    def recompute_ended(self, form: Any, tape: Tape) -> None:
        """A thorough recompute went through without a difference: later calls of this form need less."""
        facts = self.facts.get(form)
        if facts is not None:
            facts.verified = True
            facts.unneeded = tape.unused()


@functools.cache
def region_class(kind: type[nn.Module]) -> type[Region]:
    """Make the class of region for a class of module, with a ``__call__`` of its own code.

    Dynamo counts recompilations per code object: with one ``__call__`` for all, the ninth kind of block in a process
    would pass its limit and silently run eager.
    """
    call = Region.__call__
    own = types.FunctionType(call.__code__.replace(), call.__globals__, "__call__", None, call.__closure__)
    return type("Region", (Region,), {"kind": kind, "__call__": own, "__module__": Region.__module__})


def _new_region(kind: type[nn.Module]) -> Region:
    return object.__new__(region_class(kind))


class _Invocation:
    """The function that torch's checkpoint runs: once in forward, and again in each recompute."""

    def __init__(
        self,
        region: Region,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        spec: Spec,
    ) -> None:
        self.region = region
        self.module = module
        self.inner = region._inner(module)
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.spec = spec
        self.watch: StateWatch | None = None
        self.host: HostRandom | None = None
        self.recomputes = 0
        self.learning: tuple[Any, Tape] | None = None

    def __call__(self, *leaves: Any) -> Any:
        if self.given is not None:
            args, kwargs = self.given
            self.given = None
            return self.inner(*args, **kwargs)
        self.recomputes += 1
        if self.recomputes == 2:
            self.region.session.tell_recomputed_twice(self.region.fqn)
        assert self.watch is not None, "taken before forward"
        try:
            args, kwargs = self.spec.rebuild(leaves, self.region.fqn)
            host = contextlib.nullcontext() if self.host is None else self.host.in_place()
            with self.watch.in_place(self.region.fqn), host:
                out = self.inner(*args, **kwargs)
        except _StopRecomputationError:
            # Torch's way to end a recompute once it has all that backward needs.
            self._ended()
            raise
        except StateChangedError:
            # What was learned of this region does not hold: the next call looks again.
            self.region.facts.clear()
            raise
        self._ended()
        return out

    def _ended(self) -> None:
        if self.learning is not None:
            self.region.recompute_ended(*self.learning)


def _form(modules: list[nn.Module], leaves: list[Any]) -> Any:
    """What a thorough pass is good for: the inputs' shapes, every module's mode and autocast's state."""
    parts: list[Any] = [
        tuple([m.training for m in modules]),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    ]
    for v in leaves:
        if isinstance(v, torch.Tensor):
            parts.append((v.shape, v.dtype, v.device, v.requires_grad))
        elif isinstance(v, int | float | bool | str | type(None)):
            parts.append((type(v), v))
        else:
            parts.append(type(v))
    return tuple(parts)


def _refuse_caches(fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A key-value cache grows in forward and would grow again in recompute."""
    for value in (*args, *kwargs.values()):
        if value is None or isinstance(value, torch.Tensor):
            continue
        names = {c.__name__ for c in type(value).__mro__ if c.__module__.startswith("transformers.")}
        if names & {"Cache", "EncoderDecoderCache", "DynamicCache"}:
            raise RefusedError(
                f"region {fqn}: the model passes a {type(value).__name__} (a key-value cache) into a checkpointed "
                "block; recompute would append to it a second time. Call the model with use_cache=False, or set "
                "model.config.use_cache = False"
            )
