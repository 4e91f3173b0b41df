"""The law for steps of every kind: autocast, accumulation, other shapes, hooks, threads, errors in between.

And what apply and a step must leave alone: the state of the process, and a forward without gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import LowtideError
from tests.helpers import law, models, ops
from tests.helpers.families import both, spec_step
from tests.helpers.models import Spec


def _decoder(**options: Any) -> Callable[[], nn.Module]:
    return partial(models.build, Spec(dropout=0.2, **options))


def autocast(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    with torch.autocast("cpu", torch.bfloat16):
        loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss


def autocast_with_backward_inside(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    with torch.autocast("cpu", torch.bfloat16):
        loss = models.loss_of(model(tokens), tokens)
        loss.backward()
    return loss


def autocast_with_a_warm_cache(model: Any, i: int) -> Tensor:
    """The weights of a block are cast before its region runs: the cache is then missing in recompute."""
    tokens = models.tokens(step=i)
    with torch.autocast("cpu", torch.bfloat16):
        side = model.layers[1].feed.up(torch.ones(1, 32)).sum()
        loss = models.loss_of(model(tokens), tokens) + 0.01 * side
    loss.backward()
    return loss


def autocast_inside_no_grad_first(model: Any, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(tokens)
        loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss


def accumulated(model: nn.Module, i: int) -> Tensor:
    total = torch.zeros(())
    for j in range(3):
        tokens = models.tokens(step=10 * i + j)
        loss = models.loss_of(model(tokens), tokens) / 3
        loss.backward()
        total = total + loss.detach()
    return total


def other_shapes(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)[:, : 16 - 3 * i]
    loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss


def backward_twice(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    loss = models.loss_of(model(tokens), tokens)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def two_losses(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    logits = model(tokens)
    first, second = models.loss_of(logits[:1], tokens[:1]), models.loss_of(logits[1:], tokens[1:])
    first.backward(retain_graph=True)
    second.backward()
    return first + second


def through_autograd_grad(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    loss = models.loss_of(model(tokens), tokens)
    named = list(model.parameters())
    for p, g in zip(named, torch.autograd.grad(loss, named), strict=True):
        p.grad = g
    return loss


def some_gradients_only(model: Any, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    loss = models.loss_of(model(tokens), tokens)
    some = [*model.layers[0].parameters(), model.head.weight]
    for p, g in zip(some, torch.autograd.grad(loss, some), strict=True):
        p.grad = g
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.grad is None else p.grad
    return loss


def evaluated_in_between(model: nn.Module, i: int) -> Tensor:
    model.eval()
    with torch.no_grad():
        model(models.tokens(step=50 + i))
    with torch.inference_mode():
        model(models.tokens(step=60 + i))
    model.train()
    return spec_step(model, i, spec=Spec())


def eval_mode_with_gradients(model: nn.Module, i: int) -> Tensor:
    model.eval()
    first = spec_step(model, i, spec=Spec())
    model.train()
    return first + spec_step(model, i + 1, spec=Spec())


def random_state_moved_before_backward(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    loss = models.loss_of(model(tokens), tokens)
    torch.rand(100)
    loss.backward()
    return loss + torch.rand(())


def in_another_thread(model: nn.Module, i: int) -> Tensor:
    from concurrent.futures import ThreadPoolExecutor

    tokens = models.tokens(step=i)
    loss = models.loss_of(model(tokens), tokens)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    return loss


def with_module_hooks(model: Any, i: int) -> Tensor:
    """Hooks on the block run outside the region, once a call."""
    calls = []
    handles = [b.register_forward_hook(lambda m, a, out: calls.append(1) or out * 0.5) for b in model.layers]
    loss = spec_step(model, i, spec=Spec())
    assert len(calls) == 3
    for handle in handles:
        handle.remove()
    return loss


def with_tensor_hooks(model: Any, i: int) -> Tensor:
    seen: list[Tensor] = []
    handles = [p.register_post_accumulate_grad_hook(lambda p: seen.append(p)) for p in model.parameters()]
    loss = spec_step(model, i, spec=Spec())
    assert len(seen) == len(handles)
    for handle in handles:
        handle.remove()
    return loss


def with_saved_tensor_hooks(model: nn.Module, i: int) -> Tensor:
    tokens = models.tokens(step=i)
    with torch.autograd.graph.save_on_cpu():
        loss = models.loss_of(model(tokens), tokens)
    loss.backward()
    return loss


def profiled(model: nn.Module, i: int) -> Tensor:
    with torch.profiler.profile(), torch.profiler.record_function("step"):
        return spec_step(model, i, spec=Spec())


WAYS = [
    autocast, autocast_with_backward_inside, autocast_with_a_warm_cache, autocast_inside_no_grad_first, accumulated,
    other_shapes, backward_twice, two_losses, through_autograd_grad, some_gradients_only, evaluated_in_between,
    eval_mode_with_gradients, random_state_moved_before_backward, in_another_thread, with_module_hooks,
    with_tensor_hooks, with_saved_tensor_hooks, profiled,
]  # fmt: skip


@both
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_ways_to_run_a_step(way, policy):
    law.assert_law(_decoder(), way, policy)


@both
def test_double_backward_is_exact_or_told(policy):
    spec = Spec(attention="plain", dropout=0.2)

    def penalised(model: nn.Module, i: int) -> Tensor:
        tokens = models.tokens(spec, step=i)
        loss = models.loss_of(model(tokens), tokens)
        named = list(model.parameters())
        grads = torch.autograd.grad(loss, named, create_graph=True)
        total = loss + 0.1 * sum(g.square().sum() for g in grads)
        total.backward()
        return total

    build = partial(models.build, spec)
    control = law.check_control(build, penalised, steps=2)
    with contextlib.suppress(LowtideError):
        assert law.differences(control, law.run_steps(build, penalised, policy, steps=2)) == []


def hook_that_fails(*_: Any) -> None:
    raise KeyError("on purpose")


@both
def test_an_exception_in_forward_or_backward_leaves_no_trace(policy):
    spec = Spec(dropout=0.2)
    control = law.check_control(partial(models.build, spec), partial(spec_step, spec=spec))

    def build() -> nn.Module:
        model = models.build(spec)
        lowtide.apply(model, policy)
        hook = model.layers[2].register_forward_pre_hook(hook_that_fails)
        with pytest.raises(KeyError):
            model(models.tokens(spec))
        hook.remove()
        inner = model.layers[1].feed.register_forward_hook(hook_that_fails)
        with pytest.raises(KeyError):
            model(models.tokens(spec))
        inner.remove()
        loss = models.loss_of(model(models.tokens(spec)), models.tokens(spec))
        model.layers[1].feed_norm.weight.register_hook(hook_that_fails)
        with pytest.raises(KeyError):
            loss.backward()
        model.layers[1].feed_norm.weight._backward_hooks.clear()
        model.zero_grad()
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
        return model

    law.assert_law(build, partial(spec_step, spec=spec), policy, control=control)


@contextlib.contextmanager
def _process_wide_state_unchanged():
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    import torch.utils.checkpoint as ck

    def picture() -> dict[str, Any]:
        return {
            "dtype": torch.get_default_dtype(),
            "grad": torch.is_grad_enabled(),
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul": torch.get_float32_matmul_precision(),
            "ignored": set(ck.SAC_IGNORED_OPS),
            "checkpoint": ck.checkpoint,
            "call": nn.Module.__call__,
            "getattr": nn.Module.__getattr__,
            "functorch": torch._functorch.config.get_config_copy(),
            "inductor": torch._inductor.config.get_config_copy(),
            "dynamo": torch._dynamo.config.get_config_copy(),
            "modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        }

    before = picture()
    yield
    after = picture()
    assert {k for k in before if before[k] != after[k]} == set()


@both
def test_the_state_of_the_process_is_left_alone(policy):
    model = models.build(Spec(dropout=0.2))
    with _process_wide_state_unchanged():
        before = torch.get_rng_state()
        applied = lowtide.apply(model, policy)
        assert torch.equal(before, torch.get_rng_state())
        spec_step(model, 0, spec=Spec())
        applied.remove()


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_bare_forward_runs_and_nothing_else(mode, policy):
    bare, model = models.build().eval(), models.build().eval()
    lowtide.apply(model, policy)
    tokens = models.tokens()
    with mode():
        assert ops.peek(model, tokens) == ops.peek(bare, tokens)
        assert torch.equal(model(tokens), bare(tokens))
    spec_step(model, 0, spec=Spec())
    with mode():
        assert ops.peek(model, tokens) == ops.peek(bare, tokens)
