"""The law on two gloo ranks: FSDP2 with the policy applied before and after it, DDP, and FSDP1."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.errors import NothingMatchedError
from tests.helpers import families, law, models
from tests.helpers.families import FAMILIES, POLICIES
from tests.helpers.sharded import WRAPS, fsdp2, ranked_seed, ranked_step


def _check(family: str, dropout: bool, wrap: str, cells: list[tuple[str, bool]]) -> dict[str, list[str]]:
    """One control, then every policy in every order; what differed, by cell."""
    options = {"wrap": WRAPS[wrap], "seed": ranked_seed(), "steps": 2}
    build = families.builder(family, torch.float32, dropout)
    control = law.check_control(build, ranked_step, **options)
    found: dict[str, list[str]] = {}
    for policy, last in cells:
        outcome = law.run_steps(build, ranked_step, POLICIES[policy], apply_last=last, **options)
        assert outcome.applied is not None
        assert outcome.applied.regions
        found[f"{policy}, applied {'after' if last else 'before'}"] = law.differences(control, outcome)
    return found


def _cells(seed: int, count: int) -> list[tuple[str, bool]]:
    """``full`` and some others, in both orders over the whole."""
    names = random.Random(seed).sample([p for p in POLICIES if p != "full"], count)
    return [("full", bool(seed % 2)), *((name, bool((seed + i) % 2)) for i, name in enumerate(names))]


FSDP2 = ("fsdp2", "fsdp2-bfloat16")


@pytest.mark.parametrize(
    ("family", "dropout", "wrap", "seed"),
    [(f, (i // 2) % 2 == 1, FSDP2[i % 2], 31 * i + 5) for i, f in enumerate([*FAMILIES, *FAMILIES[::-1]])],
)
def test_fsdp2_slice(run_on, family, dropout, wrap, seed):
    for found in run_on(2, _check, family, dropout, wrap, _cells(seed, 3), preload=("transformers",)):
        assert len(found) == 4
        assert {k: v for k, v in found.items() if v} == {}


@pytest.mark.full
@pytest.mark.parametrize("wrap", [*FSDP2, "fsdp2-kept"])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_fsdp2_all(run_on, family, dropout, wrap):
    cells = list(product(POLICIES, (False, True)))
    for found in run_on(2, _check, family, dropout, wrap, cells, preload=("transformers",), timeout_s=250):
        assert len(found) == len(cells)
        assert {k: v for k, v in found.items() if v} == {}


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp1-bfloat16", "fsdp2-kept"])
def test_other_wrappers(run_on, wrap):
    policies = ["full"] if wrap.startswith("fsdp1") else ["full", "sdpa, matmul 1/2", "every second layer"]
    cells = list(product(policies, (False, True)))
    for found in run_on(2, _check, "decoder", True, wrap, cells):
        assert len(found) == len(cells)
        assert {k: v for k, v in found.items() if v} == {}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hugging_face_under_ddp_and_fsdp1(run_on, family):
    for wrap in ("ddp", "fsdp1"):
        for found in run_on(2, _check, family, True, wrap, [("full", False)], preload=("transformers",)):
            assert found == {"full, applied before": []}


def _mismatched_on_one_rank() -> str:
    """Only rank 1 runs the operator that the rule names."""
    spec = families.models.Spec(bias=dist.get_rank() == 1)
    model = families.models.build(spec)
    lowtide.apply(model, lowtide.SelectiveOp(save=["aten.addmm"]))
    tokens = families.models.tokens(spec)
    families.models.loss_of(model(tokens), tokens).backward()
    return "trained"


def test_a_rule_that_matches_on_one_rank_only_is_no_error_on_any(run_on):
    assert run_on(2, _mismatched_on_one_rank) == ["trained", "trained"]


def _matches_nowhere() -> str:
    model = families.build("gpt2")
    lowtide.apply(model, lowtide.SelectiveOp(save=["aten.mm"]))
    fsdp2(model)
    with pytest.raises(NothingMatchedError, match=r"aten\.addmm"):
        ranked_step(model, 0)
    return "raised"


def test_a_rule_that_matches_on_no_rank_is_an_error_on_every(run_on):
    assert run_on(2, _matches_nowhere, preload=("transformers",)) == ["raised", "raised"]


RULES = {
    "the MLP only": {"kind": "rules", "default": "save", "rules": [{"modules": "feed", "action": "recompute"}]},
    "one operator": {"kind": "rules", "default": "save", "rules": [{"op": "aten.silu", "action": "recompute"}]},
    "offload": {"kind": "rules", "default": "recompute", "rules": [{"op": "matmul", "action": "offload"}]},
}


def _rules() -> dict[str, tuple[list[str], int]]:
    """What differed under each policy, and how many bytes lay on the host at most."""
    spec = models.Spec(d=128, hidden=256, length=128, layers=3, vocab=64)
    options = {"wrap": WRAPS["fsdp2-bfloat16"], "seed": ranked_seed(), "steps": 2}

    def build() -> torch.nn.Module:
        return models.build(spec)

    def step(model: torch.nn.Module, i: int) -> torch.Tensor:
        tokens = models.tokens(spec)
        loss = models.loss_of(model(tokens), tokens)
        loss.backward()
        return loss.detach()

    control = law.check_control(build, step, **options)
    found: dict[str, tuple[list[str], int]] = {}
    for name, policy in RULES.items():
        for last in (False, True):
            outcome = law.run_steps(build, step, policy, apply_last=last, **options)
            pool = outcome.applied.regions[0].session.host_pool
            found[f"{name}, {last}"] = law.differences(control, outcome), pool.peak_bytes
            assert pool.nbytes == 0
    return found


def test_rules_and_offload_under_fsdp2(run_on):
    for found in run_on(2, _rules):
        assert {name: differences for name, (differences, _) in found.items() if differences} == {}
        assert all((parked > 0) == name.startswith("offload") for name, (_, parked) in found.items())
