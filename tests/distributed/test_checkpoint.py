"""Checkpoints: the run that resumes is the run that went on, whatever changed around the model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lowtide.errors import InputError
from lowtide.training import checkpoint_folder
from lowtide.training.checkpoint import Progress, latest_complete, load, read_complete, save
from lowtide.training.optim import clip_gradients
from lowtide.training.optim_kinds import AdamWConfig
from tests.helpers.training import batch, build, forward_logits, loss_of, prepare

EAGER = {"backend": "aot_eager", "fullgraph": True}


def _prepared(
    sharding: str, policy: str = "none", compiled: bool = False, **fields: Any
) -> tuple[nn.Module, Optimizer]:
    if compiled:
        torch._dynamo.reset()
    made = prepare(build(**fields), sharding=sharding, policy=policy, compile_blocks=compiled, compile_options=EAGER)
    return made.model, AdamWConfig(lr=0.01).build(model=made.model, matrices=made.matrices)


def _train(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    """Steps on one global batch that is the same on any number of ranks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(first, last):
        mine = [batch(r, step) for r in range(2)][rank::size]
        optimizer.zero_grad()
        (sum(loss_of(model, tokens) for tokens in mine) / len(mine)).backward()
        # Not reached: another sharding sums the norm up in another order.
        clip_gradients(model, max_norm=1e6)
        optimizer.step()


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, whole, on every rank, by its bare name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    full = get_model_state_dict(model, options=options)
    shared = [full]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _save_after(folder: Path, sharding: str, policy: str, compiled: bool, steps: int) -> dict[str, torch.Tensor]:
    model, optimizer = _prepared(sharding, policy, compiled)
    _train(model, optimizer, 0, steps)
    save(folder, model=model, optimizer=optimizer, progress=Progress(steps, steps * 64, steps * 4))
    _train(model, optimizer, steps, steps + 2)
    return _whole(model)


def _resume(folder: Path, sharding: str, policy: str, compiled: bool) -> dict[str, torch.Tensor]:
    model, optimizer = _prepared(sharding, policy, compiled, seed=99)
    info = latest_complete(folder)
    assert info is not None
    loaded = load(info, model=model, optimizer=optimizer)
    _train(model, optimizer, loaded.progress.step, loaded.progress.step + 2)
    return _whole(model)


SETTINGS = {
    "fsdp2-none": ("fsdp2", "none", False),
    "fsdp2-full": ("fsdp2", "full", False),
    "fsdp2-selective-compiled": ("fsdp2", "selective_op", True),
    "ddp-full": ("ddp", "full", False),
    "fsdp1-full": ("fsdp1", "full", False),
}


@pytest.mark.parametrize("loading", list(SETTINGS))
@pytest.mark.parametrize("saving", ["fsdp2-selective-compiled", "fsdp2-none", "ddp-full"])
def test_a_resumed_run_goes_on_bit_by_bit_under_other_settings(run_on, tmp_path, saving, loading):
    went_on = run_on(2, _save_after, tmp_path, *SETTINGS[saving], 3)[0]
    resumed = run_on(2, _resume, tmp_path, *SETTINGS[loading])
    for found in resumed:
        assert found.keys() == went_on.keys()
        assert [n for n in went_on if not torch.equal(found[n], went_on[n])] == []


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_fsdp1_checkpoints_load_elsewhere(run_on, tmp_path, sharding):
    went_on = run_on(2, _save_after, tmp_path, "fsdp1", "full", False, 2)[0]
    found = run_on(2, _resume, tmp_path, sharding, "none", False)[0]
    assert [n for n in went_on if not torch.equal(found[n], went_on[n])] == []


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1), (2, 4)])
def test_the_number_of_ranks_may_change(run_on, tmp_path, saving, loading):
    saved = run_on(saving, _save_and_tell, tmp_path)[0]
    for found in run_on(loading, _load_and_tell, tmp_path):
        assert found["progress"] == Progress(2, 128, 8)
        assert [n for n in saved["model"] if not torch.equal(found["model"][n], saved["model"][n])] == []
        assert found["moments"] == saved["moments"]


def _moments(model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    """A sum over the whole of every optimizer state: exact, as the values are rounded to powers of two."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    shared = [{n: v.double().sum().item() for n, v in flat.items() if isinstance(v, torch.Tensor)}]
    dist.broadcast_object_list(shared, src=0)
    assert any("exp_avg_sq" in n for n in shared[0])
    return shared[0]


def _save_and_tell(folder: Path) -> dict[str, Any]:
    model, optimizer = _prepared("fsdp2", "full")
    _train(model, optimizer, 0, 2)
    save(folder, model=model, optimizer=optimizer, progress=Progress(2, 128, 8))
    return {"model": _whole(model), "moments": _moments(model, optimizer)}


def _load_and_tell(folder: Path) -> dict[str, Any]:
    model, optimizer = _prepared("fsdp2", "selective_op", seed=99)
    info = latest_complete(folder)
    assert info is not None
    loaded = load(info, model=model, optimizer=optimizer)
    return {
        "model": _whole(model),
        "moments": _moments(model, optimizer),
        "progress": loaded.progress,
        "restored": loaded.random_state_restored,
    }


def test_ranks_beyond_the_saved_ones_say_that_their_random_state_is_their_own(run_on, tmp_path):
    run_on(1, _save_and_tell, tmp_path)
    assert [found["restored"] for found in run_on(2, _load_and_tell, tmp_path)] == [True, False]


def _save_randomness(folder: Path) -> list[float]:
    torch.manual_seed(dist.get_rank())
    random.seed(10 + dist.get_rank())
    np.random.seed(20 + dist.get_rank())
    _draw()
    model, optimizer = _prepared("fsdp2")
    save(folder, model=model, optimizer=optimizer, progress=Progress(0, 0, 0))
    return _draw()


def _restore_randomness(folder: Path) -> list[float]:
    model, optimizer = _prepared("fsdp2", seed=99)
    info = latest_complete(folder)
    assert info is not None
    load(info, model=model, optimizer=optimizer)
    return _draw()


def _draw() -> list[float]:
    drawn = [torch.rand(()).item(), torch.randn(()).item(), random.random(), random.gauss(0, 1)]
    return [*drawn, float(np.random.random()), float(np.random.standard_normal())]


def test_random_state_of_every_rank_goes_on(run_on, tmp_path):
    went_on = run_on(2, _save_randomness, tmp_path)
    assert went_on[0] != went_on[1]
    assert run_on(2, _restore_randomness, tmp_path) == went_on


def _keys(folder: Path, policy: str, compiled: bool) -> list[str]:
    import torch.distributed.checkpoint as dcp

    model, optimizer = _prepared("fsdp2", policy, compiled)
    info = save(folder, model=model, optimizer=optimizer, progress=Progress(1, 0, 0))
    return sorted(dcp.FileSystemReader(info.path / "data").read_metadata().state_dict_metadata)


@pytest.mark.parametrize(("policy", "compiled"), [("none", False), ("full", False), ("selective_op", True)])
def test_names_in_a_checkpoint_are_those_of_the_bare_model(run_on, tmp_path, policy, compiled):
    bare = build()
    names = [f"model.{n}" for n in bare.state_dict()]
    states = [f"optimizer.state.{n}.{s}" for n, _ in bare.named_parameters() for s in _ADAM]
    assert run_on(2, _keys, tmp_path, policy, compiled)[0] == sorted(names + states)


_ADAM = ("exp_avg", "exp_avg_sq", "step")


def _saves(folder: Path, steps: list[int], keep_last: int | None) -> None:
    model, optimizer = _prepared("fsdp2")
    for step in steps:
        notes = {"policy": {"kind": "full"}}
        done = Progress(step, 64 * step, 4 * step)
        save(folder, model=model, optimizer=optimizer, progress=done, keep_last=keep_last, notes=notes)


def test_the_last_k_stay_and_leftovers_go(run_on, tmp_path):
    (tmp_path / ".tmp-step-00000001" / "data").mkdir(parents=True)
    run_on(2, _saves, tmp_path, [2, 4, 6, 8], 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000008"]
    info = latest_complete(tmp_path)
    assert info is not None
    assert (info.progress, info.world_size) == (Progress(8, 512, 32), 2)
    assert info.notes == {"policy": {"kind": "full"}}
    assert info.size_bytes == sum((info.path / n).stat().st_size for n in checkpoint_folder.list_files(info.path))


def test_later_steps_of_an_abandoned_continuation_are_set_aside(run_on, tmp_path):
    """Resumed from step 2, a run must not be told to go on from the old step 9, nor lose its own step 3."""
    run_on(2, _saves, tmp_path, [2, 8, 9], None)
    run_on(2, _saves, tmp_path, [3], 2)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["abandoned-step-00000008", "abandoned-step-00000009", "step-00000002", "step-00000003"]
    info = latest_complete(tmp_path)
    assert info is not None
    assert info.progress.step == 3


def test_saving_a_step_again_replaces_it(run_on, tmp_path):
    run_on(2, _saves, tmp_path, [3], None)
    before = (tmp_path / "step-00000003" / "manifest.json").stat().st_ino
    run_on(2, _saves, tmp_path, [3], None)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
    assert (tmp_path / "step-00000003" / "manifest.json").stat().st_ino != before


def _load_into(folder: Path, fields: dict[str, Any]) -> None:
    model, optimizer = _prepared("fsdp2", **fields)
    load(read_complete(folder / "step-00000002"), model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 4}, r"of another model: it lacks layers\.3\..*nearest: layers"),
        ({"layers": 2}, r"it has layers\.2\..*which this model lacks"),
        ({"ffn_dim": 80}, r"layers\.0\.mlp\.gate\.weight is \[96, 32\] there and \[80, 32\] here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(run_on, tmp_path, fields, message):
    run_on(2, _saves, tmp_path, [2], None)
    with pytest.raises(InputError, match=message):
        run_on(2, _load_into, tmp_path, fields)


def _hyperparameters(folder: Path) -> tuple[list[float], list[float]]:
    model, optimizer = _prepared("fsdp2")
    _train(model, optimizer, 0, 1)
    save(folder, model=model, optimizer=optimizer, progress=Progress(1, 0, 0))
    made = prepare(build(), sharding="fsdp2")
    other = AdamWConfig(lr=0.5, weight_decay=0.3).build(model=made.model, matrices=made.matrices)
    info = latest_complete(folder)
    assert info is not None
    load(info, model=made.model, optimizer=other)
    return [g["lr"] for g in other.param_groups], [g["weight_decay"] for g in other.param_groups]


def test_hyperparameters_are_those_of_the_run_that_resumes(run_on, tmp_path):
    assert run_on(2, _hyperparameters, tmp_path) == [([0.5, 0.5], [0.3, 0.0])] * 2


def _tied(folder: Path) -> tuple[bool, bool]:
    model, optimizer = _prepared("fsdp2", tie_weights=True)
    _train(model, optimizer, 0, 2)
    save(folder, model=model, optimizer=optimizer, progress=Progress(2, 0, 0))
    expected = _whole(model)
    other, optimizer = _prepared("fsdp2", "full", tie_weights=True, seed=99)
    info = latest_complete(folder)
    assert info is not None
    load(info, model=other, optimizer=optimizer)
    found = _whole(other)
    inner: Any = other
    same = all(torch.equal(found[n], expected[n]) for n in expected)
    return same, inner.head.weight is inner.embed.weight


def test_tied_weights_stay_tied(run_on, tmp_path):
    assert run_on(2, _tied, tmp_path) == [(True, True)] * 2


def _after_evaluation(folder: Path) -> list[str]:
    """An evaluation leaves the root's parameters gathered; saving and training must not mind."""
    model, optimizer = _prepared("fsdp2", "full")
    plain, plain_optimizer = _prepared("fsdp2", "full")
    for step in range(2):
        _train(model, optimizer, step, step + 1)
        _train(plain, plain_optimizer, step, step + 1)
        model.eval()
        with torch.no_grad():
            forward_logits(model, batch(0)[:, :-1])
        model.train()
        save(folder, model=model, optimizer=optimizer, progress=Progress(step, 0, 0))
    expected, found = _whole(plain), _whole(model)
    fresh, fresh_optimizer = _prepared("fsdp2", seed=99)
    info = latest_complete(folder)
    assert info is not None
    load(info, model=fresh, optimizer=fresh_optimizer)
    again = _whole(fresh)
    return [n for n in expected if not (torch.equal(found[n], expected[n]) and torch.equal(again[n], found[n]))]


def test_saving_after_an_evaluation_saves_the_trained_weights(run_on, tmp_path):
    assert run_on(2, _after_evaluation, tmp_path) == [[], []]


def test_one_process_without_a_group_saves_and_loads(tmp_path):
    made = prepare(build(), sharding="none", policy="full")
    optimizer = AdamWConfig().build(model=made.model, matrices=made.matrices)
    loss_of(made.model, batch(0)).backward()
    optimizer.step()
    save(tmp_path, model=made.model, optimizer=optimizer, progress=Progress(1, 32, 2))
    other = prepare(build(seed=99), sharding="none")
    other_optimizer = AdamWConfig().build(model=other.model, matrices=other.matrices)
    info = latest_complete(tmp_path)
    assert info is not None
    loaded = load(info, model=other.model, optimizer=other_optimizer)
    assert loaded.progress == Progress(1, 32, 2)
    for (name, a), (_, b) in zip(made.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(optimizer.state[a]["exp_avg"], other_optimizer.state[b]["exp_avg"]), name
