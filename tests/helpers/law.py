"""The law: with a policy, losses and gradients are bitwise those without it, and so are the buffers.

``assert_law`` first runs its control, twice without a policy: where these differ, the comparison would mean
nothing. Several steps with an update between them, since a first step may take another path than later ones.
Every random decision has a seed of its own kind (weights, data, each step), so that none hides another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

Build = Callable[[], nn.Module]
Step = Callable[[nn.Module, int], Tensor]


def bare(name: str) -> str:
    """The name in the bare model; written apart from the library's own on purpose."""
    parts = [p for p in name.split(".") if p not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def local(value: Tensor) -> Tensor:
    """A copy of what this rank holds."""
    to_local = getattr(value, "to_local", None)
    return (to_local() if to_local is not None else value).detach().clone()


@dataclass
class Outcome:
    """What a run of some steps left behind."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    random_state: Tensor | None = None
    applied: Any = None


def run_steps(
    build: Build,
    step: Step,
    policy: Any = None,
    *,
    steps: int = 3,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    apply_last: bool = False,
    seed: int = 104_729,
) -> Outcome:
    """Build, apply, wrap (or wrap, apply), and run some steps with an update after each.

    ``step(model, i)`` runs forward and backward of step i and returns the loss.
    """
    import lowtide

    out = Outcome()
    model = build()
    wrapped = wrap(model) if wrap is not None and apply_last else model
    if policy is not None:
        out.applied = lowtide.apply(wrapped, policy)
    if wrap is not None and not apply_last:
        wrapped = wrap(model)
    wrapped.train()
    for i in range(steps):
        torch.manual_seed(seed * 31 + i)
        out.losses.append(local(step(wrapped, i)))
        out.gradients.append(
            {bare(n): None if p.grad is None else local(p.grad) for n, p in wrapped.named_parameters()}
        )
        with torch.no_grad():
            for parameter in wrapped.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.05)
                    parameter.grad = None
    out.buffers = {bare(n): local(b) for n, b in wrapped.named_buffers()}
    out.random_state = torch.get_rng_state()
    return out


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.ndim
        else (torch.equal(a.reshape(1).view(torch.uint8), b.reshape(1).view(torch.uint8)))
    )


def differences(a: Outcome, b: Outcome) -> list[str]:
    """Name everything in which two outcomes differ."""
    found = [
        f"loss of step {i}" for i, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)) if not same_bits(x, y)
    ]
    for i, (x, y) in enumerate(zip(a.gradients, b.gradients, strict=True)):
        if list(x) != list(y):
            found.append(f"parameter names: {sorted(set(x) ^ set(y)) or 'their order'}")
            continue
        found += [f"gradient of {n} in step {i}" for n in x if not same_bits(x[n], y[n])]
    if list(a.buffers) != list(b.buffers):
        found.append(f"buffer names: {sorted(set(a.buffers) ^ set(b.buffers))}")
    else:
        found += [f"buffer {n}" for n in a.buffers if not same_bits(a.buffers[n], b.buffers[n])]
    assert a.random_state is not None
    assert b.random_state is not None
    if not torch.equal(a.random_state, b.random_state):
        found.append("random state after the steps")
    return found


def check_control(build: Build, step: Step, **options: Any) -> Outcome:
    """Run twice without a policy; bitwise equal, finite, and with gradients, or the comparison is void."""
    first = run_steps(build, step, None, **options)
    second = run_steps(build, step, None, **options)
    assert differences(first, second) == [], "the control: two runs without a policy differ"
    for gradients in first.gradients:
        present = [g for g in gradients.values() if g is not None and g.numel()]
        assert present, "no parameter got a gradient"
        assert all(bool(g.isfinite().all()) for g in present)
        assert sum(bool(g.any()) for g in present) > len(present) // 2, "most gradients are zero"
    return first


def assert_law(build: Build, step: Step, policy: Any, *, control: Outcome | None = None, **options: Any) -> Outcome:
    """Check the law for one policy and return the outcome under it. ``control`` is a checked one to reuse."""
    control = control if control is not None else check_control(build, step, **options)
    found = run_steps(build, step, policy, **options)
    assert found.applied is not None
    assert found.applied.regions, "the policy made no region: the law would hold for nothing"
    assert differences(control, found) == []
    return found
