"""Plans: under their limit by every account, the same after a trip through a file, and carried out as written."""

from __future__ import annotations

import copy
from functools import partial

import pytest

import lowtide
from lowtide.errors import DoesNotFitError, InputError, PolicyError
from lowtide.planning import (
    Planner,
    check_model,
    evaluate,
    frontier_of,
    graph_of,
    patterns_of,
    plan_text,
    policy_of,
    read_plan,
    write_plan,
)
from lowtide.policy import Rule, Rules
from lowtide.training.config import TrainConfig
from lowtide.training.estimate import estimate_config
from lowtide.training.predict import outline_config, predict_policy
from tests.helpers import families, models, ops
from tests.helpers.models import Spec

VIEWS = (
    "aten.view", "aten.t", "aten.transpose", "aten._unsafe_view", "aten.expand", "aten.as_strided", "aten.unsqueeze",
    "aten.slice", "aten.select", "aten.permute", "aten.squeeze", "aten.detach", "aten.set_", "aten.alias",
)  # fmt: skip


def config(**policy):
    return TrainConfig.model_validate(
        {
            "run": {"name": "planned"},
            "model": {"kind": "decoder", "vocab_size": 256, "dim": 64, "layers": 4, "heads": 4},
            "data": {"kind": "random", "vocab_size": 256, "sequence_length": 64, "batch_size": 4},
            "sharding": {"kind": "none"},
            "policy": policy or {"kind": "none"},
        }
    )


@pytest.fixture(scope="module")
def parts():
    return outline_config(config(), threads=1)


@pytest.fixture(scope="module", params=["replay", "recompute"])
def planner(request, parts):
    return Planner(parts.outlined.outline, parts.outlined.traces, executor=request.param)


def peak_under(parts, policy):
    return predict_policy(parts, policy).peak_bytes


def plan_at(planner, parts, share):
    low, high = peak_under(parts, {"kind": "full"}), peak_under(parts, {"kind": "none"})
    limit = int(1.02 * (low + share * (high - low))) + 1
    return planner.plan(limit, parts.outlined.outline.environment)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_peak_of_a_plan_is_that_of_its_policy_and_under_the_limit(planner, parts, share):
    plan = plan_at(planner, parts, share)
    assert plan.peak_bytes + plan.margin_bytes <= plan.limit_bytes
    predicted = predict_policy(parts, policy_of(plan))
    assert predicted.peak_bytes == plan.peak_bytes
    assert predicted.step_ms == pytest.approx(plan.step_ms)
    assert plan.fastest_ms == plan.recompute_ms
    assert sum(choice.count for choice in plan.choices) == 4
    none, full = plan.others
    assert (none.policy, none.fits, none.peak_bytes) == ("none", False, peak_under(parts, {"kind": "none"}))
    assert (full.policy, full.fits, full.peak_bytes) == ("full", True, peak_under(parts, {"kind": "full"}))
    assert plan.recompute_ms < full.recompute_ms
    assert plan.step_ms < full.step_ms


def test_less_memory_never_takes_less_time_and_enough_memory_takes_none(planner, parts):
    plans = [plan_at(planner, parts, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    times = [plan.recompute_ms for plan in plans]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0
    assert policy_of(plans[-1]).kind == "none"


def test_the_whole_step_agrees_with_the_plan(planner, parts):
    plan = plan_at(planner, parts, 0.4)
    policy = policy_of(plan)
    simulated = estimate_config(
        config(**policy.model_dump(mode="json", exclude_defaults=True), kind="rules"), threads=1
    )
    assert simulated.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.01)


def test_when_nothing_fits_the_error_says_how_much_is_needed_and_what_helps(planner, parts):
    with pytest.raises(DoesNotFitError) as caught:
        planner.plan(200_000, parts.outlined.outline.environment)
    assert caught.value.exit_code == 3
    text = str(caught.value)
    for part in ("195.31 KiB", "least possible peak", "Alive there:", "optimizer state", "half the micro-batch"):
        assert part in text


def test_a_limit_one_byte_below_the_least_does_not_fit(planner, parts):
    from lowtide.planning import least_peak, peak_of

    least = peak_of(planner.step, least_peak(planner.step))[0]
    environment = parts.outlined.outline.environment
    at = planner.plan(least + int(least * 0.02), environment)
    assert at.peak_bytes == least
    with pytest.raises(DoesNotFitError):
        planner.plan(least + int(least * 0.02) - 1, environment)


def test_plan_files_survive_and_are_readable(planner, parts, tmp_path):
    plan = plan_at(planner, parts, 0.3)
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    assert read_plan(path) == plan
    head = [line for line in plan_text(plan).splitlines() if line.startswith("#")]
    assert any("layers" in line and "recompute" in line for line in head)
    assert len(plan_text(plan)) < 8000


def test_damaged_plan_files_say_what_is_wrong(planner, parts, tmp_path):
    path = tmp_path / "plan.yaml"
    plan = plan_at(planner, parts, 0.3)
    for text, said in (
        ("- 1\n", "no mapping"),
        ("a: [\n", "no YAML"),
        ("kind: Plan\n", "limit_bytes"),
        (plan_text(plan).replace("schema_version: 1", "schema_version: 2"), "schema_version"),
        (plan_text(plan).replace("limit_bytes:", "limit_byte:"), "limit_byte"),
        (plan_text(plan).replace(f"peak_bytes: {plan.peak_bytes}", f"peak_bytes: {plan.peak_bytes + 1}"), "adds up"),
        ("a: &x 1\nb: *x\n", "aliases"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=r"plan\.yaml") as caught:
            read_plan(path)
        assert said in str(caught.value), text[:40]
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path / "missing.yaml")


def test_a_plan_for_another_model_says_what_differs(planner, parts):
    from lowtide.training.build import build_bare

    plan = plan_at(planner, parts, 0.3)
    model = build_bare(config())
    facts = {
        block.fqn: (type(model.get_submodule(block.fqn)).__name__,
                    {n: p.numel() for n, p in model.get_submodule(block.fqn).named_parameters()})
        for block in parts.blocks
    }  # fmt: skip
    check_model(plan, facts)
    first = next(iter(facts))
    changed = copy.deepcopy(facts)
    changed[first][1].popitem()
    other = {**facts, first: ("OtherBlock", facts[first][1])}
    fewer = {name: fact for name, fact in facts.items() if name != first}
    more = {**facts, "layers.9": facts[first]}
    for wrong, said in (
        (changed, f"{first} has"),
        (other, "is a OtherBlock"),
        (fewer, "3 in the model"),
        (more, "nothing of layers.9"),
    ):
        with pytest.raises(PolicyError, match="another model") as caught:
            check_model(plan, wrong)
        assert said in str(caught.value)


def test_names_in_patterns():
    assert patterns_of(["model.layers.0", "model.layers.1", "model.layers.5"]) == ("model.layers.{0-1,5}",)
    assert patterns_of(["h.3"]) == ("h.3",)
    assert patterns_of(["a.0.b", "a.2.b", "c", "d.0"]) == ("a.{0,2}.b", "d.0", "c")


SPECS = {
    "plain": Spec(),
    "bias": Spec(bias=True),
    "written-out attention": Spec(attention="plain"),
    "dropout": Spec(dropout=0.2),
}


def rules_of(graph, point, executor):
    calls = {}
    for index in point.saves:
        call = graph.by_index[index]
        calls.setdefault(call.op, []).append(call.number)
    rules = [Rule(op=op, action="save", keep=numbers) for op, numbers in calls.items()]
    return Rules(default="recompute", rules=rules, executor=executor)


@pytest.mark.parametrize("executor", ["replay", "recompute"])
@pytest.mark.parametrize("name", SPECS)
def test_points_of_a_frontier_are_carried_out_as_priced(name, executor):
    spec = SPECS[name]
    plain = models.build(spec)
    x = plain.embed(models.tokens(spec)).detach().requires_grad_()
    trace = lowtide.trace(plain.blocks()[0], (x,), device="cpu")
    # Every operator costs one millisecond, so that time counts operators.
    graph = graph_of(trace, costs_ms=[1.0] * len(trace.ops), counted=[s.id for s in trace.storages if s.name == "0"])
    points = [p for p in frontier_of(graph, executor).points if p.region]
    held_by_inputs = held(carried_out(spec, Rules(default="recompute", executor=executor)), spec)
    least = evaluate(graph, (), executor).held_bytes
    for point in {points[0], points[len(points) // 3], points[2 * len(points) // 3], points[-1]}:
        model = carried_out(spec, rules_of(graph, point, executor))
        assert held(model, spec) - held_by_inputs == spec.layers * (point.held_bytes - least)
        tokens = models.tokens(spec)
        plain.zero_grad()
        again = ops.ran_again(*(partial(loss, m, tokens) for m in (plain, model)))
        ran = sum(n for op, n in again.items() if op.rpartition(".")[0] not in VIEWS)
        views = graph.views_ns if executor == "recompute" else 0
        assert ran == spec.layers * (point.recompute_ns - views) / 1_000_000, (point, again)


def carried_out(spec, policy):
    """A model under a policy, after its first steps; no region has fallen back."""
    model = models.build(spec)
    applied = lowtide.apply(model, policy)
    for _ in range(2):
        families.spec_step(model, 0, spec=spec)
        model.zero_grad()
    assert {region.executor for region in applied.regions} == {policy.executor}
    return model


def loss(model, tokens):
    return models.loss_of(model(tokens), tokens)


def held(model, spec):
    """Bytes made by forward and alive while its result is."""
    return ops.saved_bytes(lambda: model(models.tokens(spec)))
