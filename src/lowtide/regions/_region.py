"""A region: a module whose ``forward`` is carried out under ``torch.utils.checkpoint``.

``Region`` stands in for ``forward`` on the instance. That keeps names, ``isinstance``, pickling, deepcopy and
``compile(fullgraph=True)``, and because module hooks run outside ``forward``, FSDP2's own operators never enter
the region, in either order with ``fully_shard`` (checked in torch 2.11 to 2.14).

The first time that a region meets inputs of a form it records thoroughly: every operator with its literals, writes
to tensors from outside, changed buffers. Its first recompute is compared with all of that. Afterwards a region
without saves runs plain, with no mode in the way; a region with saves keeps comparing operators and shapes.

What forward changed must not change twice: buffers that it wrote (running statistics, counters) are swapped for
copies of their values before forward while recompute runs. Arguments are taken apart before forward, so a block that
assigns into a dictionary it was given starts recompute from what it was given (pytorch issue 178568).

Limits: hooks on modules inside a region run again in recompute; a Python side effect in plain regions is caught only
where it changes operators, shapes or literals at the first recompute.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from lowtide.errors import RefusedError
from lowtide.policy import LayerPolicy, RegionRecipe
from lowtide.regions._replay import run_replayed
from lowtide.regions._session import Session
from lowtide.regions._tape import Recording, Repeating, Tape, refuse_outside_writes

_MOST_FORMS = 256


@dataclasses.dataclass
class _Facts:
    """What is known of a region for one form of inputs."""

    needs_tape: bool
    changed_buffers: tuple[str, ...]
    verified: bool = False
    unneeded: frozenset[tuple[int, int]] = frozenset()
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
        self._forget()

    def _forget(self) -> None:
        """Know nothing of any form of inputs."""
        self.facts: dict[Any, _Facts] = {}
        self.replayed: set[Any] = set()
        self.not_replayed: dict[Any, str] = {}

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
        self._forget()

    @property
    def module(self) -> nn.Module:
        """The module whose forward this is."""
        module = self._module()
        assert module is not None
        return module

    @property
    def fqn(self) -> str:
        """Name of the block in the bare model."""
        return self.recipe.block.fqn

    @property
    def index(self) -> int:
        """Index of the block."""
        return self.recipe.block.index

    @property
    def executor(self) -> str:
        """What carries the region out in eager code; a compiled block is carried out by the compiler."""
        if self.policy.executor != "replay" or self.not_replayed:
            return "recompute"
        return "replay"

    @property
    def reason(self) -> str:
        """Why that executor."""
        if self.not_replayed:
            return f"not replayed: {next(iter(self.not_replayed.values()))}"
        return "by default" if self.policy.executor == "auto" else "asked for"

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
        return self._run(module, args, kwargs)

    def _trace(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What dynamo traces: it must touch nothing that differs between blocks, else each is compiled anew."""
        replaced = self.replaced

        def body(*args: Any, **kwargs: Any) -> Any:
            return type(module).forward(module, *args, **kwargs) if replaced is None else replaced(*args, **kwargs)

        return checkpoint(
            body,
            *args,
            use_reentrant=False,
            preserve_rng_state=self.session.preserve_rng,
            context_fn=self.session.compiled_contexts,
            **kwargs,
        )

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_caches(self.fqn, args, kwargs)
        leaves, spec = _flatten(args, kwargs)
        form = _form(module, leaves)
        if self.policy.executor == "replay" and form not in self.not_replayed:
            return self._replay(module, args, kwargs, form)
        facts = self.facts.get(form)
        invocation = _Invocation(self, module, args, kwargs, spec)
        if facts is None or not facts.verified:
            out = self._run_thoroughly(invocation, leaves, form)
        elif facts.needs_tape:
            invocation.remember_buffers(facts.changed_buffers)
            out = self._checkpoint(invocation, leaves, Tape(thorough=False, unneeded=facts.unneeded))
        else:
            invocation.remember_buffers(facts.changed_buffers)
            out = checkpoint(invocation, *leaves, use_reentrant=False, preserve_rng_state=self.session.preserve_rng)
        self.session.region_ended(self.fqn)
        return out

    def _replay(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], form: Any) -> Any:
        """Run forward on record; the first time, see whether it can be replayed."""
        inner = self._inner(module)
        out, problem = run_replayed(
            lambda: inner(*args, **kwargs),
            plan=self.session.plan,
            witness=self.session,
            fqn=self.fqn,
            verify=form not in self.replayed,
            module=module,
        )
        if problem is None:
            self.replayed.add(form)
        else:
            self.not_replayed[form] = problem
        self.session.region_ended(self.fqn)
        return out

    def _run_thoroughly(self, invocation: _Invocation, leaves: list[Any], form: Any) -> Any:
        """Record everything, and learn what later calls need."""
        buffers = dict(invocation.module.named_buffers())
        invocation.remember_buffers(buffers)
        tape = Tape(thorough=True)
        invocation.learning = (form, tape)
        out = self._checkpoint(invocation, leaves, tape)
        changed = invocation.keep_changed_buffers()
        plan = self.session.plan
        if not plan.allow_inexact:
            storages = {b.untyped_storage()._cdata: name for name, b in buffers.items()}
            refuse_outside_writes(self.fqn, tape, storages, [t for t in leaves if isinstance(t, torch.Tensor)])
        if len(self.facts) >= _MOST_FORMS:
            self.facts.clear()
        self.facts[form] = _Facts(bool(plan.table) or tape.saw_routing, changed)
        return out

    def _checkpoint(self, invocation: _Invocation, leaves: list[Any], tape: Tape) -> Any:
        contexts = (
            Recording(self.session.plan, tape, self.session, self.fqn),
            Repeating(self.session.plan, tape, self.session.check, self.fqn),
        )
        return checkpoint(
            invocation,
            *leaves,
            use_reentrant=False,
            preserve_rng_state=self.session.preserve_rng,
            context_fn=lambda: contexts,
        )

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
        spec: _Spec,
    ) -> None:
        self.region = region
        self.module = module
        self.inner = region._inner(module)
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.spec = spec
        self.before: dict[str, torch.Tensor] = {}
        self.versions: dict[str, int] = {}
        self.learning: tuple[Any, Tape] | None = None

    def __call__(self, *leaves: Any) -> Any:
        if self.given is not None:
            args, kwargs = self.given
            self.given = None
            return self.inner(*args, **kwargs)
        args, kwargs = self.spec.rebuild(leaves)
        with _swapped_buffers(self.module, self.before):
            try:
                out = self.inner(*args, **kwargs)
            except _StopRecomputationError:
                # Torch's way to end a recompute once it has all that backward needs.
                self._ended()
                raise
        self._ended()
        return out

    def _ended(self) -> None:
        if self.learning is not None:
            self.region.recompute_ended(*self.learning)

    def remember_buffers(self, names: Any) -> None:
        """Copy buffers as they are before forward."""
        for name in names:
            buffer = _buffer(self.module, name)
            if buffer is not None:
                self.before[name] = buffer.detach().clone()
                self.versions[name] = buffer._version

    def keep_changed_buffers(self) -> tuple[str, ...]:
        """Forget the copies of buffers that forward left as they were; name the others."""
        for name in list(self.before):
            buffer = _buffer(self.module, name)
            if buffer is None or (buffer._version == self.versions[name] and _same_bits(buffer, self.before[name])):
                del self.before[name]
        return tuple(self.before)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if isinstance(a, torch._subclasses.FakeTensor) or a.is_meta:
        return True
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _buffer(module: nn.Module, name: str) -> torch.Tensor | None:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._buffers.get(leaf)


@contextmanager
def _swapped_buffers(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Generator[None]:
    """Put copies of ``values`` in the place of the module's buffers, and the buffers back at the end."""
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in values]
    originals = [owner._buffers[leaf] for owner, leaf in places]
    if places:
        # The mode that follows the tape must not take these for the region's own operators.
        with _disable_current_modes():
            copies = [value.clone() for value in values.values()]
    else:
        copies = []
    try:
        for (owner, leaf), value in zip(places, copies, strict=True):
            owner._buffers[leaf] = value
        yield
    finally:
        for (owner, leaf), original in zip(places, originals, strict=True):
            owner._buffers[leaf] = original


@dataclasses.dataclass(frozen=True)
class _Spec:
    """How leaves become arguments again, in fresh containers."""

    tree: TreeSpec | None
    positional: int
    names: tuple[str, ...]
    copied: tuple[int, ...]
    """Leaves that are dataclasses: a shallow copy each, since a block may assign to their fields."""

    def rebuild(self, leaves: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs."""
        if self.copied:
            leaves = tuple(copy.copy(v) if i in self.copied else v for i, v in enumerate(leaves))
        if self.tree is not None:
            args, kwargs = tree_unflatten(list(leaves), self.tree)
            return tuple(args), kwargs
        return leaves[: self.positional], dict(zip(self.names, leaves[self.positional :], strict=True))


_SIMPLE = (torch.Tensor, int, float, bool, str, type(None), torch.dtype, torch.device)


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], _Spec]:
    """Take arguments apart, so that recompute starts from what forward was given."""
    flat = [*args, *kwargs.values()]
    if all(isinstance(v, _SIMPLE) for v in flat):
        return flat, _Spec(None, len(args), tuple(kwargs), ())
    leaves, tree = tree_flatten((args, kwargs))
    copied = tuple(i for i, v in enumerate(leaves) if dataclasses.is_dataclass(v) and not isinstance(v, type))
    leaves = [copy.copy(v) if i in copied else v for i, v in enumerate(leaves)]
    return leaves, _Spec(tree, 0, (), copied)


def _form(module: nn.Module, leaves: list[Any]) -> Any:
    """What a thorough pass is good for: the inputs' shapes, the module's mode and autocast's state."""
    parts: list[Any] = [module.training, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]
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
                "block; recompute would append to it a second time. Set model.config.use_cache = False, or call the "
                "model with use_cache=False"
            )
