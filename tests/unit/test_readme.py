"""What the README says can be typed, can be; what it shows is what comes out."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import yaml

from lowtide.cli import VERBS, _app
from lowtide.cli.sweep_cmd import read_sweep
from lowtide.policy import LayerPolicy, NoPolicy
from lowtide.training.config import load_config
from tests.helpers.documents import PAGES, README, ROOT, blocks, commands, links, lowtide_arguments

PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]
EXPECTED = "selective_op: 4 of 4 blocks checkpointed (layers.{0-3}), executor recompute"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiler)])
def test_the_loop_in_the_readme_runs_on_two_processes(compiled: bool, tmp_path: Path) -> None:
    (code,) = blocks(README, "python")
    program = tmp_path / "own_loop.py"
    program.write_text(code, encoding="utf-8")
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environ = {**inherited, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(
        [*run, *["--compile"] * compiled],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == EXPECTED
    assert "UserWarning" not in done.stderr
    assert f"print(applied)  # {EXPECTED}\n" in code


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        assert (page.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_commands_of_lowtide_are_legal(page: Path) -> None:
    for words in commands(page):
        arguments = lowtide_arguments(words)
        if arguments is None or "$" in " ".join(arguments):
            continue
        assert arguments[0] in VERBS, words
        # Reads the arguments and runs nothing; raises for an option that there is not.
        _app().parse_args(arguments, exit_on_error=False, print_error=False)
        for config in [word for word in arguments if word.startswith("examples/")]:
            if arguments[0] == "sweep":
                read_sweep(ROOT / config)
                continue
            sets = [after for word, after in itertools.pairwise(arguments) if word == "--set"]
            load_config(ROOT / config, sets)


def test_commands_of_make_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {words[1] for page in PAGES for words in commands(page) if words[0] == "make"}
    assert {"quickstart", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {n for page in PAGES for n in re.findall(r"(?:\.|lowtide)\[(\w+)\]'", page.read_text(encoding="utf-8"))}
    assert {"train", "dev", "tensorboard", "wandb"} <= named
    assert named <= set(project["optional-dependencies"])


def test_the_policy_tables_name_every_kind() -> None:
    kinds = [kind.model_fields["kind"].default for kind in (NoPolicy, *get_args(LayerPolicy))]
    for page in (README, ROOT / "docs/reference/policies.md"):
        rows = re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8").split("| kind |")[1], re.MULTILINE)
        assert rows[: len(kinds)] == kinds, page


def test_the_output_shown_is_of_the_quickstart_as_it_is() -> None:
    shown = README.read_text(encoding="utf-8").split("<!-- quickstart output -->")[1].split("<!-- end -->")[0]
    config = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text(encoding="utf-8"))
    layers, steps = config["model"]["layers"], config["training"]["steps"]
    assert f"{layers} of {layers} blocks checkpointed" in shown
    assert f"done after {steps} steps" in shown
    assert re.findall(r"^ (\w+) +\d of 6 ", shown, re.MULTILINE) == ["none", "full", config["policy"]["kind"]]
