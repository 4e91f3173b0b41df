"""Sharded training against one process: gradients bit by bit, units, compiled blocks, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowtide.errors import NothingMatchedError, RefusedError
from lowtide.training.optim import clip_gradients, matrix_names
from lowtide.training.parallelize import gradient_sync, parallelize
from lowtide.training.parallelize_kinds import Fsdp2Config, NoShardingConfig, PrecisionConfig
from tests.helpers.training import (
    CPU,
    POLICIES,
    batch,
    build,
    full_gradients,
    loss_of,
    mean_gradients,
    prepare,
)

TRANSFORMERS = ("transformers",)


def _reference(kind: str, dtype: torch.dtype, **fields: Any) -> dict[str, torch.Tensor]:
    """Gradients of one process that runs the batches of all ranks, one model for each."""
    models = [build(kind, **fields).to(dtype) for _ in range(dist.get_world_size())]
    for rank, model in enumerate(models):
        loss_of(model, batch(rank)).backward()
    return mean_gradients(*models)


def _differences(kind: str, sharding: str, policy: str, compute: str, fields: dict[str, Any]) -> list[str]:
    expected = _reference(kind, getattr(torch, compute), **fields)
    model = prepare(build(kind, **fields), sharding=sharding, policy=policy, compute=compute).model
    loss_of(model, batch(dist.get_rank())).backward()
    found = full_gradients(model)
    assert list(found) == list(expected)
    return [name for name in expected if not torch.equal(found[name], expected[name])]


PAIRS = [(s, p) for s in ("fsdp2", "fsdp2-kept", "fsdp1", "ddp") for p in POLICIES]


@pytest.mark.parametrize(("sharding", "policy"), [p for p in PAIRS if p != ("fsdp1", "selective_op")])
def test_gradients_are_bitwise_those_of_one_process(run_on, sharding, policy):
    assert run_on(2, _differences, "decoder", sharding, policy, "float32", {}) == [[], []]


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp1"])
def test_gradients_in_bfloat16_are_bitwise_those_of_one_process(run_on, sharding, tie_weights):
    fields = {"tie_weights": tie_weights}
    assert run_on(2, _differences, "decoder", sharding, "full", "bfloat16", fields) == [[], []]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma"])
def test_hugging_face_models_shard_by_themselves(run_on, kind):
    policy = "full" if kind in ("llama", "gpt2") else "selective_op"
    assert run_on(2, _differences, kind, "fsdp2", policy, "float32", {}, preload=TRANSFORMERS) == [[], []]


def _one_process_is_a_world() -> bool:
    reference = build()
    loss_of(reference, batch(0)).backward()
    model = prepare(build(), sharding="fsdp2", policy="selective_op").model
    loss_of(model, batch(0)).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    return all(torch.equal(g, expected[n]) for n, g in full_gradients(model).items())


def test_one_process_shards_over_itself(run_on):
    assert run_on(1, _one_process_is_a_world) == [True]


def _accumulated(sharding: str) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    models = [build() for _ in range(size)]
    for (r, model), micro in itertools.product(enumerate(models), range(3)):
        loss_of(model, batch(r, micro)).backward()
    expected = mean_gradients(*models)
    model = prepare(build(), sharding=sharding, policy="full").model
    for micro in range(3):
        with gradient_sync(model, enabled=micro == 2):
            loss_of(model, batch(rank, micro)).backward()
    found = full_gradients(model)
    return [n for n in expected if not torch.allclose(found[n], expected[n], rtol=1e-6, atol=1e-8)]


@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp1", "ddp"])
def test_accumulated_gradients_are_the_sum_of_micro_batches(run_on, sharding):
    assert run_on(2, _accumulated, sharding) == [[], []]


def _without_sync_ranks_differ() -> tuple[bool, bool]:
    """Prove that the switch acts: unsynchronised DDP gradients are this rank's own."""
    model = prepare(build(), sharding="ddp").model
    own = build()
    loss_of(own, batch(dist.get_rank())).backward()
    with gradient_sync(model, enabled=False):
        loss_of(model, batch(dist.get_rank())).backward()
    unsynced = full_gradients(model)
    equal = all(torch.equal(unsynced[n], p.grad) for n, p in own.named_parameters())
    model.zero_grad()
    with gradient_sync(model, enabled=True):
        loss_of(model, batch(dist.get_rank())).backward()
    synced = full_gradients(model)
    return equal, all(torch.equal(synced[n], p.grad) for n, p in own.named_parameters())


def test_gradient_sync_off_leaves_each_rank_its_own(run_on):
    assert run_on(2, _without_sync_ranks_differ) == [(True, False)] * 2


def _norms(sharding: str, compute: str) -> tuple[float, float, float]:
    model = prepare(build(), sharding=sharding, compute=compute).model
    loss_of(model, batch(dist.get_rank())).backward()
    before = torch.stack([g.norm() for g in full_gradients(model).values()]).norm().item()
    told = clip_gradients(model, max_norm=0.05).item()
    after = torch.stack([g.norm() for g in full_gradients(model).values()]).norm().item()
    return before, told, after


@pytest.mark.parametrize(
    ("sharding", "compute"), [("fsdp2", "float32"), ("fsdp2", "bfloat16"), ("fsdp1", "float32"), ("ddp", "float32")]
)
def test_clipping_sees_the_norm_over_all_shards(run_on, sharding, compute):
    for before, told, after in run_on(2, _norms, sharding, compute):
        assert told == pytest.approx(before, rel=1e-5)
        assert before > 0.1
        assert after == pytest.approx(0.05, rel=1e-4)


class _Recurrent(nn.Module):
    """One block at several places of a stack, and the same object under a second parent."""

    def __init__(self, block: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList([block, block, other])
        self.again = nn.ModuleDict({"only": block})
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.again["only"](x))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(self.norm(x)))


def _recurrent() -> _Recurrent:
    torch.manual_seed(5)
    return _Recurrent(_Residual(), _Residual())


def _shared_block(policy: str) -> tuple[list[str], tuple[str, ...], bool, bool]:
    models = [_recurrent() for _ in range(2)]
    for rank, model in enumerate(models):
        loss_of(model, batch(rank)).backward()
    expected = mean_gradients(*models)
    places_named = {"kind": "full", "layers": ["layers.*", "again.only"]}
    prepared = parallelize(
        _recurrent(),
        policy=places_named if policy == "every place" else POLICIES[policy],
        sharding=Fsdp2Config(),
        precision=PrecisionConfig(),
        device=CPU,
        compile_blocks=True,
        compile_options={"backend": "aot_eager", "fullgraph": True},
    )
    model: Any = prepared.model
    places = [*model.layers[:2], model.again["only"]]
    compiled = all(p is places[0] and p._compiled_call_impl is not None for p in places)
    loss_of(model, batch(dist.get_rank())).backward()
    found = full_gradients(model)
    wrong = [n for n in expected if not torch.allclose(found[n], expected[n], rtol=1e-5, atol=1e-7)]
    return wrong, prepared.compiled, compiled, set(found) == set(expected)


@pytest.mark.parametrize("policy", ["none", "every place"])
def test_a_shared_block_is_compiled_and_sharded_once_for_all_its_places(run_on, policy):
    expected = ([], ("layers.0", "layers.2"), True, True)
    assert run_on(2, _shared_block, policy) == [expected, expected]


def _shared_under_fsdp1() -> None:
    prepare(_recurrent(), sharding="fsdp1")


def test_fsdp1_refuses_a_shared_block_and_names_its_places(run_on):
    with pytest.raises(RefusedError, match=r"layers\.0, layers\.1, again\.only are one module; fsdp1"):
        run_on(1, _shared_under_fsdp1)


def _compiled_matches_eager(policy: str) -> tuple[list[str], int]:
    torch._dynamo.reset()
    eager = prepare(build(layers=10), sharding="fsdp2", policy="none").model
    loss_of(eager, batch(dist.get_rank())).backward()
    expected = full_gradients(eager)
    prepared = prepare(
        build(layers=10),
        sharding="fsdp2",
        policy=policy,
        compile_blocks=True,
        compile_options={"backend": "aot_eager", "fullgraph": True},
    )
    loss_of(prepared.model, batch(dist.get_rank())).backward()
    prepared.applied.check()
    found = full_gradients(prepared.model)
    return [n for n in expected if not torch.equal(found[n], expected[n])], len(prepared.compiled)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_compiled_blocks_keep_gradients_in_a_deep_stack(run_on, policy):
    assert run_on(2, _compiled_matches_eager, policy) == [([], 10), ([], 10)]


def _hugging_face_compiled(kind: str) -> list[str]:
    torch._dynamo.reset()
    eager = build(kind)
    loss_of(eager, batch(0)).backward()
    options = {"backend": "aot_eager", "fullgraph": True}
    prepared = prepare(build(kind), sharding="fsdp2", policy="full", compile_blocks=True, compile_options=options)
    loss_of(prepared.model, batch(0)).backward()
    found = full_gradients(prepared.model)
    return [n for n, p in eager.named_parameters() if not torch.allclose(found[n], p.grad, rtol=1e-5, atol=1e-7)]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma"])
def test_blocks_of_hugging_face_models_compile_without_a_graph_break(run_on, kind):
    assert run_on(1, _hugging_face_compiled, kind, preload=TRANSFORMERS) == [[]]


@pytest.mark.compiler
def test_the_default_compiler_gives_the_same_gradients_within_rounding():
    torch._dynamo.reset()
    eager = build()
    loss_of(eager, batch(0)).backward()
    prepared = prepare(build(), sharding="none", policy="selective_op", compile_blocks=True)
    loss_of(prepared.model, batch(0)).backward()
    prepared.applied.check()
    for (name, a), (_, b) in zip(prepared.model.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class _Named(nn.Module):
    """No stack: the blocks can only be named."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.first, self.second = _Residual(), _Residual()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embed(tokens))))


def _named_blocks(policy: dict[str, Any]) -> tuple[str, ...]:
    model = _Named()
    prepared = parallelize(model, policy=policy, sharding=Fsdp2Config(), precision=PrecisionConfig(), device=CPU)
    loss_of(prepared.model, batch(0)).backward()
    return prepared.units


def test_without_a_stack_the_policys_layers_are_the_units_else_there_is_one(run_on):
    named = {"kind": "full", "layers": ["first", "second"]}
    assert run_on(2, _named_blocks, named) == [("first", "second", "")] * 2
    assert run_on(1, _named_blocks, {"kind": "none"}) == [("",)]


def _units(policy: str) -> tuple[int, tuple[str, ...]]:
    prepared = prepare(build(), sharding="fsdp2", policy=policy)
    return sum(isinstance(m, FSDPModule) for m in prepared.model.modules()), prepared.units


@pytest.mark.parametrize("policy", list(POLICIES))
def test_there_is_one_unit_per_block_and_one_for_the_root(run_on, policy):
    expected = (4, ("layers.0", "layers.1", "layers.2", ""))
    assert run_on(2, _units, policy) == [expected, expected]


def _tied_across() -> None:
    model: Any = build()
    model.layers[2].mlp.gate.weight = model.layers[0].mlp.gate.weight
    prepare(model, sharding="fsdp2")


def _tied_to_root() -> None:
    model: Any = build(dim=64)
    model.layers[1].attention.query.weight = model.head.weight
    prepare(model, sharding="fsdp2")


def test_parameters_tied_across_units_are_refused_by_name(run_on):
    with pytest.raises(
        RefusedError, match=r"layers\.0\.mlp\.gate\.weight, layers\.2\.mlp\.gate\.weight are one parameter"
    ):
        run_on(1, _tied_across)
    with pytest.raises(RefusedError, match=r"the root"):
        run_on(1, _tied_to_root)


def _combination(sharding: str, policy: str, compute: str) -> None:
    prepare(build(), sharding=sharding, policy=policy, compute=compute)


@pytest.mark.parametrize(
    ("ranks", "sharding", "policy", "compute", "message"),
    [
        (2, "none", "none", "float32", "would train 2 models"),
        (1, "fsdp1", "selective_op", "float32", "takes the policies none and full, not 'selective_op'"),
        (1, "ddp", "none", "bfloat16", "needs sharding fsdp2 or fsdp1"),
        (1, "none", "none", "bfloat16", "needs sharding fsdp2 or fsdp1"),
    ],
)
def test_combinations_that_would_not_do_what_they_say_are_refused(run_on, ranks, sharding, policy, compute, message):
    with pytest.raises(RefusedError, match=message):
        run_on(ranks, _combination, sharding, policy, compute)


def test_sharding_without_a_group_says_what_to_enter():
    with pytest.raises(RefusedError, match="process_group"):
        prepare(build(), sharding="fsdp2")


def test_compiling_a_model_without_blocks_is_an_error():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(2, 2)

    with pytest.raises(NothingMatchedError, match="Plain has no repeated blocks to compile"):
        prepare(Plain(), sharding="none", compile_blocks=True)


def test_a_block_that_is_compiled_already_is_refused_by_name():
    model: Any = build()
    model.layers[1].mlp.compile(backend="eager")
    with pytest.raises(RefusedError, match=r"layers\.1\.mlp is compiled already"):
        prepare(model, sharding="none", compile_blocks=True)


def test_parameters_take_their_type_and_buffers_keep_theirs():
    model = build()
    model.register_buffer("table", torch.ones(3))
    parallelize(
        model,
        policy={"kind": "none"},
        sharding=NoShardingConfig(),
        precision=PrecisionConfig(parameters="bfloat16", compute="bfloat16"),
        device=CPU,
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.get_buffer("table").dtype == torch.float32
    loss_of(model, batch(0)).backward()


def test_casting_keeps_tied_weights_tied():
    model: Any = build(tie_weights=True)
    parallelize(
        model,
        policy={"kind": "none"},
        sharding=NoShardingConfig(),
        precision=PrecisionConfig(parameters="bfloat16", compute="bfloat16"),
        device=CPU,
    )
    assert model.head.weight is model.embed.weight


def _names(sharding: str, policy: str) -> tuple[frozenset[str], list[str]]:
    prepared = prepare(build(), sharding=sharding, policy=policy)
    return prepared.matrices, [n for n, _ in _bare(prepared.model)]


def _bare(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    from lowtide.training.optim import named_bare_parameters

    return named_bare_parameters(model)


@pytest.mark.parametrize(
    ("sharding", "policy"), [("fsdp2", "selective_op"), ("fsdp1", "full"), ("ddp", "selective_op")]
)
def test_names_are_those_of_the_bare_model(run_on, sharding, policy):
    model = build()
    expected = (matrix_names(model), [n for n, _ in model.named_parameters()])
    assert run_on(2, _names, sharding, policy) == [expected, expected]


def test_fsdp2_options_are_values():
    assert Fsdp2Config() == Fsdp2Config(reshard_after_forward=True)
    assert hash(Fsdp2Config()) == hash(Fsdp2Config())
