"""The examples for loops of others: each trains, and ends with the very weights that it has without a policy."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import RefusedError, find_error
from tests.e2e.command import EXAMPLES
from tests.helpers import law

SCRIPTS = sorted(path.stem for path in (EXAMPLES / "own_loop").glob("*.py"))
ONE_PROCESS = {
    "plain_loop": [],
    "hf_trainer": ["accelerate"],
    "peft_lora": ["peft"],
    "torchtitan_model": ["torchtitan"],
}
TWO_PROCESSES = {"lightning_fabric": "lightning", "accelerate_fsdp2": "accelerate"}
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "matmul": {"kind": "selective_op", "save": [{"op": "matmul", "keep": "1/2"}], "executor": "replay"},
}


def example(name: str) -> ModuleType:
    """Load an example; skip where a package is missing that it is about, with what the import says."""
    spec = importlib.util.spec_from_file_location(f"own_loop_{name}", EXAMPLES / "own_loop" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        pytest.skip(f"pip install 'lowtide[adapters]' brings what {name} needs: {error}")
    return module


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'lowtide[adapters]' (torchtitan on its own)")


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: law.local(p) for n, p in model.named_parameters()}


def test_every_example_is_run_here() -> None:
    assert set(SCRIPTS) == {*ONE_PROCESS, *TWO_PROCESSES}


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_in_one_process(name: str) -> None:
    needs(*ONE_PROCESS[name])
    train = example(name).train
    bare, losses = train({"kind": "none"})
    again, same = train({"kind": "none"})
    assert (losses, _differing(bare, again)) == (same, []), "two runs without a policy differ"
    for policy in POLICIES.values():
        model, found = train(policy)
        assert (found, _differing(bare, model)) == (losses, [])
        applied = lowtide.apply(model, policy)
        assert len(applied.regions) == applied.blocks >= 4
        assert all(r.executor == policy.get("executor", "recompute") for r in applied.regions), applied.regions[
            0
        ].reason


def _differing(a: nn.Module, b: nn.Module) -> list[str]:
    left, right = weights(a), weights(b)
    assert list(left) == list(right)
    return [n for n in left if not law.same_bits(left[n], right[n])]


def test_trainer_with_its_own_checkpointing_as_well_says_so() -> None:
    needs("accelerate")
    trainer = example("hf_trainer")
    with pytest.raises(Exception, match="leave gradient_checkpointing out of TrainingArguments") as caught:
        trainer.train({"kind": "full"}, gradient_checkpointing=True)
    assert isinstance(find_error(caught.value, RefusedError), RefusedError)


def test_adapters_alone_are_trained_and_frozen_embeddings_stay() -> None:
    needs("peft")
    lora = example("peft_lora")
    before, (model, _) = lora.build(), lora.train(POLICIES["full"])
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, dict(before.named_parameters())[n])}
    assert changed == {n for n, p in model.named_parameters() if p.requires_grad}
    assert not any("embed" in n for n in changed)
    assert len(changed) == 4 * 3 * 2


def _two(name: str, folder: str) -> Any:
    """Train on this rank without a policy, twice, and with each; what differed."""
    os.environ.update(TORCHELASTIC_RUN_ID="none", GROUP_RANK="0", LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    module = example(name)
    bare, losses = module.train({"kind": "none"})
    if hasattr(module, "sharded") and not module.sharded(bare):
        return "not sharded"
    again, same = module.train({"kind": "none"})
    found = {"control": _differing(bare, again) + ["losses"] * (losses != same)}
    for policy_name, policy in POLICIES.items():
        model, values = module.train(policy)
        found[policy_name] = _differing(bare, model) + ["losses"] * (losses != values)
    return found


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_on_two_processes(run_on: Any, name: str, tmp_path: Any) -> None:
    needs(TWO_PROCESSES[name])
    preload = (TWO_PROCESSES[name],)
    found = run_on(2, _two, name, str(tmp_path), group=False, preload=preload, timeout_s=200)
    if "not sharded" in found:
        pytest.skip(f"{name}: this version keeps every parameter whole on each process on a CPU, so nothing is shown")
    assert found == [{"control": [], "full": [], "matmul": []}] * 2
