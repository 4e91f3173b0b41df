"""The training config: its defaults, its ranges, and how its fields must agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from lowtide.errors import InputError
from lowtide.policy import NoPolicy, SaveRule, SelectiveOp
from lowtide.training.config import TrainConfig, config_hash, load_config, reference_page
from tests.helpers.configs import MINIMAL, complaint, read, write


def test_sections_are_those_of_the_design(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL).config
    assert list(TrainConfig.model_fields) == [
        "run", "launch", "model", "data", "policy", "sharding", "precision", "compile", "estimate", "optimizer",
        "schedule", "training", "evaluation", "checkpoint", "profile", "logging",
    ]  # fmt: skip
    assert config.policy == NoPolicy()
    assert config.sharding.kind == "fsdp2"
    assert config.optimizer.kind == "adamw"
    assert [t.kind for t in config.logging.trackers] == ["console", "jsonl"]
    assert config.launch.nproc is None
    assert (config.evaluation.every, config.checkpoint.every) == (None, None)


def test_every_field_has_its_prose() -> None:
    schema = TrainConfig.model_json_schema()
    missing = [name for name, info in TrainConfig.model_fields.items() if not info.description]
    for name, part in schema["$defs"].items():
        missing += [
            f"{name}.{f}" for f, p in part.get("properties", {}).items() if f != "kind" and "description" not in p
        ]
    # The two numbers of a share say themselves what they are.
    assert [name for name in missing if not name.startswith("Keep.")] == []


def test_the_policy_is_the_librarys_own_value(tmp_path: Path) -> None:
    text = MINIMAL + "policy: {kind: selective_op, save: [{op: aten.mm, keep: 1/2}, sdpa]}\n"
    policy = read(tmp_path, text).config.policy
    assert policy == SelectiveOp(save=({"op": "aten.mm", "keep": "1/2"}, SaveRule(op="sdpa")))


def test_a_config_does_not_change(tmp_path: Path) -> None:
    config = read(tmp_path, MINIMAL).config
    with pytest.raises(ValidationError, match="frozen"):
        config.training.steps = 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("training: {steps: ten}", "training.steps: got 'ten'; legal: a whole number, at least 1"),
        ("training: {steps: 1.5}", "training.steps: got 1.5; legal: a whole number, at least 1"),
        ("training: {steps: true}", "training.steps: got true; legal: a whole number, at least 1"),
        ("training: {max_grad_norm: true}", "training.max_grad_norm: got true; legal: null or a number, above 0"),
        ("training: {max_grad_norm: .inf}", "training.max_grad_norm: got inf; legal: null or a number, above 0"),
        ("training: {deterministic: maybe}", "training.deterministic: got 'maybe'; legal: true or false"),
        ("optimizer: {kind: adamw, lr: -3e-4}", "optimizer.lr: got -0.0003; legal: a number, above 0"),
        ("run: {name: 7}", "run.name: got 7; legal: text (put it in quotes)"),
        ("run: {seed: -1}", "run.seed: got -1; legal: a whole number, at least 0"),
        ("precision: {compute: bfloat61}", "precision.compute: got 'bfloat61'; legal: float32, bfloat16. "
         "Did you mean 'bfloat16'?"),
        ("sharding: fsdp2", "sharding: got 'fsdp2'; should be a mapping with kind: fsdp2, fsdp1, ddp, none"),
        ("sharding: {cpu_offload: true}", "sharding.kind: is required; legal: fsdp2, fsdp1, ddp, none"),
        ("sharding: {kind: fdsp2}", "sharding.kind: got 'fdsp2'; no such kind; legal: fsdp2, fsdp1, ddp, none. "
         "Did you mean 'fsdp2'?"),
        ("sharding: {kind: ddp, cpu_offload: true}", "sharding.cpu_offload: unknown key; legal: kind"),
        ("sharding: {kind: [ddp]}", "sharding.kind: got ['ddp']; no such kind; legal: fsdp2"),
        ("optimizer: [1]", "optimizer: got [1]; should be a mapping with kind: adamw, custom"),
        ("evaluation:", "evaluation: got null; legal: a mapping with every, batches"),
        ("checkpoint: 3", "checkpoint: got 3; legal: a mapping with every, keep_last"),
        ("policy: {kind: selective_op}", "policy.save: is required; legal: "),
        ("policy: {kind: selective_op, save: [{op: aten.mm, kep: 1/2}]}", "policy.save.0.kep: unknown key; "
         "legal: op, keep, optional. Did you mean 'keep'?"),
        ("policy: {kind: some_layers, checkpoint: 5/4}", "policy.checkpoint: got '5/4'; '5/4' is not a share"),
        ("logging: {trackers: [{kind: consol}]}", "logging.trackers.0.kind: got 'consol'; no such kind of tracker; "
         "legal: console, custom, jsonl, tensorboard, wandb. Did you mean 'console'?"),
        ("logging: {trackers: {kind: console}}", "logging.trackers: got {kind: 'console'}; legal: a list"),
        ("? ''\n: 3", "'': unknown key; legal: run, launch"),
    ],
)  # fmt: skip
def test_one_wrong_value(tmp_path: Path, line: str, message: str) -> None:
    assert complaint(tmp_path, MINIMAL + line + "\n").startswith(f"train.yaml:3: {message}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "training: {steps: 10}\nschedule:\n  warmup_steps: 11\n",
            "train.yaml:5: schedule.warmup_steps: got 11; legal: 0 to training.steps, which is 10",
        ),
        (
            "launch: {nproc: 2}\nsharding: {kind: none}\n",
            "train.yaml:4: sharding.kind: got 'none'; legal with launch.nproc 2: fsdp2, fsdp1, ddp",
        ),
        (
            "sharding: {kind: ddp}\nprecision: {compute: bfloat16}\n",
            "train.yaml:4: precision.compute: got 'bfloat16'; legal with sharding.kind ddp: float32",
        ),
        (
            "sharding: {kind: fsdp1}\npolicy: {kind: selective_op, save: [sdpa]}\n",
            "train.yaml:4: policy.kind: got 'selective_op'; legal with sharding.kind fsdp1: none, full",
        ),
    ],
)
def test_fields_that_do_not_agree(tmp_path: Path, lines: str, message: str) -> None:
    assert complaint(tmp_path, MINIMAL + lines).startswith(message)


def test_all_errors_stand_in_one_message_in_the_order_of_lines(tmp_path: Path) -> None:
    said = complaint(
        tmp_path,
        """\
        data: {kind: random}
        training:
          steps: 0
        traning: 3
        policy: {kind: every_nth_layer, n: 0}
        """,
        "run.seed=x",
    )
    lines = said.splitlines()
    assert lines[0] == "train.yaml: 5 errors"
    assert [line.split(": ")[:2] for line in lines[1:]] == [
        ["  --set run.seed=x", "run.seed"],
        ["  train.yaml", "model"],
        ["  train.yaml:3", "training.steps"],
        ["  train.yaml:4", "traning"],
        ["  train.yaml:5", "policy.n"],
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n", "3", "- a\n", "text", "null", "{}"])
def test_a_file_that_is_no_mapping_says_what_a_config_holds(tmp_path: Path, text: str) -> None:
    said = complaint(tmp_path, text)
    assert "model: is required" in said or "a config is a mapping with run, launch, model" in said


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "quickstart.yaml")
    with pytest.raises(InputError, match=r"quickstrat.yaml: no such file. Did you mean '.*quickstart.yaml'\?"):
        load_config(tmp_path / "quickstrat.yaml")
    with pytest.raises(InputError, match="There is no folder"):
        load_config(tmp_path / "nowhere" / "x.yaml")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_the_hash_is_of_content(tmp_path: Path) -> None:
    first = load_config(write(tmp_path, MINIMAL, "a.yaml"))
    other = load_config(write(tmp_path, "# a comment\ndata:\n  kind: random\nmodel:\n  kind: decoder\n", "b.yaml"))
    spelled = load_config(write(tmp_path, MINIMAL, "c.yaml"), ["compile=false"])
    changed = load_config(write(tmp_path, MINIMAL, "a.yaml"), ["compile=true"])
    assert config_hash(first.resolved) == config_hash(other.resolved) == config_hash(spelled.resolved)
    assert config_hash(first.resolved) != config_hash(changed.resolved)
    assert changed.given == MINIMAL
    assert changed.overrides == ("compile=true",)


def test_reading_a_config_imports_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "policy: {kind: full}\n")
    code = (
        "import sys; from lowtide.training.config import load_config, reference_page\n"
        f"load_config({str(path)!r}); reference_page(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
    assert page.read_text(encoding="utf-8") == reference_page(), (
        "run: python -m lowtide config schema --markdown > docs/reference/config.md"
    )
