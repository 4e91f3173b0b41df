"""The two modes of executor recompute: one writes the tape in forward, one follows it in recompute.

Torch's own selective contexts match a recomputed operator to a saved one by its name and count alone: another
operator of the same name and shape in between gives wrong gradients without an error, a random operator whose output
is saved leaves the generator where the next random operator does not expect it, and saving an output that is
later written in place fails (measured in torch 2.13 and 2.14). The modes here compare the whole sequence of
operators and their outputs' shapes, put the generators where forward had them, and recompute what was overwritten.

``Recording`` runs in forward. It appends every operator to a ``Tape`` and keeps the outputs that the rules name.
``Repeating`` runs in recompute. It walks along the tape, returns what was kept and runs the rest.

Not compared: views (outside the thorough first pass), metadata, profiler marks, the operators of FSDP and c10d, and
``_to_copy``, which autocast's weight cache makes come and go (pytorch issue 193338).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.errors import RecomputeError, RefusedError
from lowtide.regions._naming import Made, Maker, Makers
from lowtide.regions._offload import ParkedCall
from lowtide.regions._operators import Trait, draws, mutated_arguments, traits
from lowtide.regions._plan import NOTHING, Decision, Plan, Scope
from lowtide.regions._tape import (
    Away,
    Kept,
    Tape,
    Witness,
    describe,
    digest_of,
    generator_states,
    graph_is_freed,
    has_values,
    literals_of,
    random_without_state,
    restore_generators,
    shape_of,
    share,
    storage_of,
    version_of,
)

__all__ = ["CAUSES", "Recording", "Repeating"]

CAUSES = (
    "The second run of this region is not like its first, so its gradients would be wrong. Usual causes: a table or "
    "mask that is built at the first call and cached (run one forward under torch.no_grad() first); a cache object "
    "that the block appends to (use_cache=False); a counter, a clock or other Python state that the block reads; "
    "an argument that the block changes in place."
)


class _RegionMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.fsdp_depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else every operator passes through a wrapper that switches dynamo off.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def passes_by(self, func: Any, trait: Trait, args: tuple[Any, ...]) -> bool:
        """Tell whether a call is no operator of the region: metadata, profiler marks, FSDP's own."""
        inside = self.is_fsdp(func, args) if trait & Trait.SKIPPED else self.fsdp_depth
        return bool(inside or trait & Trait.SKIPPED)

    def is_fsdp(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Tell whether a call belongs to FSDP2's hooks on a unit inside the region.

        They gather in forward and not in recompute, or the other way, and are no operators of the region. FSDP2 does
        its work inside profiler marks named ``FSDP::...`` (torch 2.11 to 2.14), which a mode sees begin and end.
        """
        if func is _ENTER and (self.fsdp_depth or str(args[0]).startswith("FSDP::")):
            self.fsdp_depth += 1
        elif func in _EXITS and self.fsdp_depth:
            self.fsdp_depth -= 1
        return self.fsdp_depth > 0


def _present(value: torch.Tensor | Away) -> torch.Tensor:
    return value.get() if isinstance(value, Away) else share(value)


def is_followed(plan: Plan, func: Any, trait: Trait, args: Sequence[Any]) -> bool:
    """Tell whether the rules are about a call, so that it has its place on every tape.

    Autocast's cache makes casts of weights come and go between forward and recompute.
    """
    if not plan.concerns(func):
        return False
    return not (trait & Trait.CAST and func not in plan.overloads and args and isinstance(args[0], torch.nn.Parameter))


_ENTER = torch.ops.profiler._record_function_enter_new.default
_EXITS = frozenset(
    getattr(torch.ops.profiler._record_function_exit, o) for o in torch.ops.profiler._record_function_exit.overloads()
)


class Recording(_RegionMode):
    """Writes the tape in forward and keeps what the rules name."""

    def __init__(
        self,
        plan: Plan,
        tape: Tape,
        witness: Witness,
        fqn: str,
        scope: Scope | None = None,
        parked: ParkedCall | None = None,
    ) -> None:
        super().__init__()
        self.parked = parked
        self.plan = plan
        self.fqn = fqn
        self.tape = tape
        self.witness = witness
        self.scope = scope
        self.calls = [0] * len(plan.rules)
        self.defaults = 0
        """How many calls the default of the policy decided to keep."""
        self.made: set[int] = set()
        self.makers = Makers() if plan.by_name else None
        self.overwritten: set[int] = set()
        """Storages that were written to, where names matter."""
        self.kept_storages: dict[int, list[int]] = {}
        self.routed: set[int] = set()
        """Positions of routing results: they stay, also where a part of them is written in place."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        trait = traits(func)
        if self.passes_by(func, trait, args):
            return func(*args, **kwargs)
        if trait & Trait.RANDOM:
            self._check_random(func, args, kwargs)
        tape = self.tape
        if self.routed and trait & Trait.MUTATES:
            self._save_routing(func, args, kwargs)
        # Before the call: an operator such as t_ changes the shape of its own argument.
        literals = literals_of(args, kwargs) if tape.thorough else None
        out = func(*args, **kwargs)
        followed = is_followed(self.plan, func, trait, args)
        if not followed and not tape.thorough and trait & (Trait.VIEW | Trait.CAST):
            return out
        if trait & Trait.MUTATES:
            self._forget_overwritten(func, args, kwargs)
        if not followed and trait & Trait.CAST:
            self._note(func, out, trait)
            return out
        position = len(tape.funcs)
        tape.funcs.append(func)
        tape.shapes.append(shape_of(out))
        if tape.thorough:
            self._note(func, out, trait)
            tape.literals.append(literals)
            tape.digests.append(digest_of(out) if self.plan.strict and has_values(out, trait) else None)
        decision = self.plan.decide(func, self.calls, self.scope) if followed else NOTHING
        keeps = self._keeps(decision, trait, position)
        if keeps or self.makers is not None:
            drew = trait & Trait.RANDOM and draws(func, args, kwargs)
            self._made(position, out, trait, Made(decision, generator_states(out) if drew else None), keeps=keeps)
        return out

    def _made(self, position: int, out: Any, trait: Trait, made: Made, *, keeps: bool) -> None:
        if keeps:
            self._keep(position, out, made)
        if self.makers is not None and not trait & (Trait.VIEW | Trait.MUTATES):
            self.makers.note(position, out, made, routes=bool(trait & Trait.ROUTING))

    def _keeps(self, decision: Decision, trait: Trait, position: int) -> bool:
        rule, call = decision.rule, decision.call
        if rule is not None and call == 0:
            self.witness.matched(self.plan.rules[rule].number)
        if trait & Trait.ROUTING:
            self.tape.saw_routing = True
            self.routed.add(position)
            return True
        if rule is None and decision.keep:
            call = self.defaults
            self.defaults += 1
        # What is written in place, or waited for, is kept by the operator that made it, or not at all.
        if not decision.keep or trait & (Trait.MUTATES | Trait.WAITS) or (rule, call) in self.tape.unneeded:
            return False
        self.tape.kept_calls[position] = (rule, call)
        return True

    def _keep(self, position: int, out: Any, made: Made) -> None:
        stay: Callable[[torch.Tensor], Any] = share
        if self.parked is not None and made.decision.away:
            stay = functools.partial(self._park, self.parked, (made.decision.rule, made.decision.call))
        value = stay(out) if isinstance(out, torch.Tensor) else tree_map_only(torch.Tensor, stay, out)
        self.tape.kept[position] = Kept(value, version_of(value), made.generators)
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.kept_storages.setdefault(storage_of(t), []).append(position)

    def _park(self, parked: ParkedCall, key: tuple[int | None, int], value: torch.Tensor) -> Any:
        return share(value) if parked.parking.refuses(key, value) else parked.park(key, value)

    def _save_routing(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy what is about to be written in place beside a router's choice (it scales the weights of the chosen)."""
        for target in mutated_arguments(func, args, kwargs):
            storage = storage_of(target)
            for position in self.routed.intersection(self.kept_storages.get(storage, ())):
                kept = self.tape.kept[position]

                def whole(tensor: torch.Tensor, storage: int = storage) -> torch.Tensor:
                    return tensor.clone() if storage_of(tensor) == storage else tensor

                value = tree_map_only(torch.Tensor, whole, kept.value)
                self.tape.kept[position] = Kept(value, version_of(value), kept.generators, written_later=True)
                self.kept_storages[storage].remove(position)

    def _forget_overwritten(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Drop kept values that this operator overwrites: they are recomputed, writes and all."""
        for target in mutated_arguments(func, args, kwargs):
            storage = storage_of(target)
            if self.makers is not None and self.makers.forget(target):
                self.overwritten.add(storage)
            for position in self.kept_storages.pop(storage, ()):
                self.tape.kept.pop(position, None)
                self.tape.kept_calls.pop(position, None)
            if self.tape.thorough and storage not in self.made:
                self.tape.wrote_outside.append((func, target))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # Nothing is named any more; outputs held for that would live as long as the graph.
        self.makers = None

    def take_name(self, tensor: torch.Tensor, name: str) -> None:
        """Decide a value anew, by its name.

        Raises:
            RefusedError: it should be kept, and cannot be: it was written in place, or is part of a lost whole.
        """
        self.witness.named(name)
        if self.makers is None:
            return
        maker = self.makers.find(tensor)
        before = NOTHING if maker is None else maker.made.decision
        decision = self.plan.decide_name(name, before, self.calls, self.scope)
        if decision is None or decision.rule is None:
            return
        if decision.call == 0:
            self.witness.matched(self.plan.rules[decision.rule].number)
        if maker is None:
            if decision.keep and storage_of(tensor) in self.overwritten:
                raise self._cannot_keep(name, "it was written in place after it was made")
        elif not decision.keep and not maker.routes:
            self.tape.kept.pop(maker.position, None)
            self.tape.kept_calls.pop(maker.position, None)
        elif decision.keep and maker.position not in self.tape.kept:
            self._keep_named(name, tensor, maker, decision)

    def _keep_named(self, name: str, tensor: torch.Tensor, maker: Maker, decision: Decision) -> None:
        call = (decision.rule, decision.call)
        if call in self.tape.unneeded:
            return
        out = maker.output(tensor)
        if out is None:
            raise self._cannot_keep(name, "other outputs of the operator that made it are gone")
        self._keep(maker.position, out, Made(decision, maker.made.generators))
        self.tape.kept_calls[maker.position] = call

    def _cannot_keep(self, name: str, why: str) -> RefusedError:
        return RefusedError(
            f"region {self.fqn}: the value named {name!r} cannot be saved by executor recompute: {why}. Give the name "
            "right after the operator that makes the value, or set executor: replay"
        )

    def _note(self, func: Any, out: Any, trait: Trait) -> None:
        if not self.tape.thorough:
            return
        self.witness.ran(func)
        if not trait & (Trait.VIEW | Trait.MUTATES) or func is torch.ops.aten.lift_fresh.default:
            self.made.update(storage_of(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor))

    def _check_random(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.plan.allow_inexact or not draws(func, args, kwargs):
            return
        if kwargs.get("generator") is not None:
            raise RefusedError(
                f"region {self.fqn}: {describe(func)} draws from a generator of its own, which recompute cannot "
                "put back: it would draw other numbers. Use the default generator, or leave this layer out of the "
                "policy; allow_inexact: true lets it through"
            )
        if not self.plan.preserve_rng:
            raise RefusedError(random_without_state(self.fqn, describe(func)))


class Repeating(_RegionMode):
    """Walks along the tape in recompute: returns what was kept, runs and compares the rest."""

    def __init__(self, plan: Plan, tape: Tape, on_enter: Callable[[], None], fqn: str) -> None:
        super().__init__()
        self.plan = plan
        self.fqn = fqn
        self.tape = tape
        self.on_enter = on_enter
        self.position = 0
        self.release = False

    def __enter__(self) -> Repeating:
        self.on_enter()
        self.position = 0
        self.release = graph_is_freed()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        trait = traits(func)
        tape = self.tape
        unruled = not is_followed(self.plan, func, trait, args)
        if self.is_fsdp(func, args) if trait & Trait.SKIPPED else self.fsdp_depth:
            return func(*args, **kwargs)
        if trait & Trait.SKIPPED or (unruled and (trait & Trait.CAST or (trait & Trait.VIEW and not tape.thorough))):
            return func(*args, **kwargs)
        position = self.position
        if position >= len(tape.funcs) or tape.funcs[position] is not func:
            raise self._other_operator(func)
        self.position = position + 1
        tape.used.add(position)
        if tape.thorough and tape.literals[position] != literals_of(args, kwargs):
            raise self._other_arguments(func, position, args, kwargs)
        kept = tape.kept.get(position)
        if kept is not None and version_of(kept.value) == kept.version:
            return self._give_back(position, kept)
        out = func(*args, **kwargs)
        if shape_of(out) != tape.shapes[position]:
            raise self._other_shape(func, position, out)
        if tape.thorough and tape.digests[position] is not None and tape.digests[position] != digest_of(out):
            raise self._other_values(func, position)
        return out

    def _give_back(self, position: int, kept: Kept) -> Any:
        if kept.generators is not None:
            restore_generators(kept.generators)
        if self.release:
            del self.tape.kept[position]
        value = kept.value
        if kept.written_later:
            return tree_map_only(torch.Tensor, torch.clone, value)
        if isinstance(value, torch.Tensor | Away):
            return _present(value)
        return tree_map_only((torch.Tensor, Away), _present, value)

    def _place(self, position: int) -> str:
        return f"region {self.fqn}, operator {position + 1} of {len(self.tape.funcs)}"

    def _other_operator(self, func: Any) -> RecomputeError:
        position, funcs = self.position, self.tape.funcs
        expected = f"forward ran {describe(funcs[position])}" if position < len(funcs) else "forward had ended"
        return RecomputeError(f"{self._place(position)}: {expected}, recompute runs {describe(func)}. {CAUSES}")

    def _other_arguments(
        self, func: Any, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RecomputeError:
        return RecomputeError(
            f"{self._place(position)}, {describe(func)}: its arguments were {_plain(self.tape.literals[position])} in "
            f"forward and are {_plain(literals_of(args, kwargs))} in recompute. {CAUSES}"
        )

    def _other_shape(self, func: Any, position: int, out: Any) -> RecomputeError:
        return RecomputeError(
            f"{self._place(position)}, {describe(func)}: its output was {_plain(self.tape.shapes[position])} in "
            f"forward and is {_plain(shape_of(out))} in recompute. {CAUSES}"
        )

    def _other_values(self, func: Any, position: int) -> RecomputeError:
        return RecomputeError(
            f"{self._place(position)}, {describe(func)}: determinism is strict, and its result differs from forward's "
            f"in at least one bit, with equal shapes. It is the first that differs. {CAUSES} A kernel that is not "
            "deterministic (torch.use_deterministic_algorithms(True) names them) does the same."
        )


def _plain(value: Any) -> str:
    """A shape or literal for a message, kept short."""
    text = str(value).replace("torch.Size", "").replace("<class '", "").replace("'>", "")
    return text if len(text) <= 200 else text[:197] + "..."
