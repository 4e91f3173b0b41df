"""``lowtide plan`` and ``lowtide.plan``: for people, for programs and as a file; exit code 3 where nothing fits."""

from __future__ import annotations

import json

import pytest
import torch

import lowtide
from lowtide.cli import run
from lowtide.errors import DoesNotFitError, UserError
from lowtide.plan_record import Plan
from lowtide.planning import policy_of, read_plan
from tests.helpers import models
from tests.helpers.configs import write
from tests.helpers.models import Spec

CONFIG = """\
model: {kind: decoder, vocab_size: 64, dim: 64, layers: 3, heads: 2}
data: {kind: random, vocab_size: 64, sequence_length: 64, batch_size: 4}
launch: {threads: 1}
"""


@pytest.fixture
def config(tmp_path):
    return str(write(tmp_path, CONFIG))


def test_a_plan_for_people_and_a_file_that_training_takes(config, tmp_path, capsys):
    out = tmp_path / "plan.yaml"
    assert run(["plan", config, "--limit", "5MiB", "--nproc", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for text in (
        f"{config} on cpu, 2 processes, limit 5.00 MiB",
        "of the limit",
        "the whole step, simulated with this plan: peak",
        "layers.",
        "with policy none the peak is",
        "with policy full the peak is",
        f"written to {out}",
    ):
        assert text in said
    plan = read_plan(out)
    assert plan.simulated_peak_bytes is not None
    assert max(plan.peak_bytes, plan.simulated_peak_bytes) * 1.02 <= 5 * 2**20
    assert plan.world_size == 2


def test_json_is_the_plan(config, capsys):
    assert run(["plan", config, "--limit", "5MiB", "--nproc", "2", "--no-simulate", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = Plan.from_json(json.dumps({k: v for k, v in document.items() if k in Plan.model_fields}))
    assert plan.simulated_peak_bytes is None
    assert {other.policy for other in plan.others} == {"none", "full"}


def test_what_does_not_fit_ends_with_3_and_says_what_helps(config, capsys):
    assert run(["plan", config, "--limit", "500KiB", "--nproc", "2", "--no-simulate", "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["exit_code"] == 3
    assert said["error"]["kind"] == "DoesNotFitError"
    assert "the least possible peak is" in said["error"]["message"]


def test_a_plan_for_any_model_is_one_that_estimate_agrees_with():
    spec = Spec(layers=3)
    model, tokens = models.build(spec), torch.zeros(8, spec.length, dtype=torch.long)
    setup = lowtide.TrainSetup(threads=1)
    peaks = {
        name: lowtide.estimate(model, tokens, policy={"kind": name}, setup=setup).peak_bytes
        for name in ("none", "full")
    }
    limit = int((peaks["none"] + peaks["full"]) / 2 * 1.02)
    plan = lowtide.plan(model, tokens, limit=limit, setup=setup)
    again = lowtide.estimate(model, tokens, policy=policy_of(plan), setup=setup)
    assert again.peak_bytes == plan.simulated_peak_bytes
    assert plan.simulated_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)
    assert plan.peak_bytes + plan.margin_bytes <= limit
    assert 0 < plan.recompute_ms < next(o.recompute_ms for o in plan.others if o.policy == "full")
    with pytest.raises(DoesNotFitError):
        lowtide.plan(model, tokens, limit=1000, setup=setup, simulate=False)
    with pytest.raises(UserError, match="tensor parallelism"):
        lowtide.plan(model, tokens, limit=limit, setup=lowtide.TrainSetup(mesh={"tp": 2}, tensor_parallel=print))
