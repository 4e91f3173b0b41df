"""The pages under docs/: their code runs, their configs are legal, their tables are what the code makes."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import yaml

import lowtide.errors
from lowtide.system.run_state import Status
from lowtide.training.config import load_config
from tests.e2e.command import lowtide as run_lowtide
from tests.e2e.command import write
from tests.helpers.documents import PAGES, ROOT, blocks

DOCS = ROOT / "docs"
MINIMAL = {"model": {"kind": "decoder"}, "data": {"kind": "random"}}


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _code(page: str) -> list[str]:
    return blocks(DOCS / page, "python")


TABLES = _script("make_tables")


def _table(name: str) -> str:
    (found,) = [t[name] for page in PAGES if name in (t := TABLES.tables_in(page.read_text(encoding="utf-8")))]
    return found


@pytest.mark.parametrize("name", ["aliases", "routing", "events", "sweep"])
def test_a_table_is_what_the_code_says(name: str) -> None:
    assert _table(name) == TABLES.TABLES[name](), "run python docs/make_tables.py"


def test_the_saved_bytes_shown_are_those_of_the_example() -> None:
    shown, made = _table("saved bytes"), TABLES.saved_table()
    version = re.compile(r"torch [\d.]+")
    if version.findall(shown) == version.findall(made):
        assert shown == made, "run python docs/make_tables.py"
    else:  # kernels of another torch may keep other bytes, for the same policies of the same blocks
        first_columns = re.compile(r"^\|[^|]+\|[^|]+\|", re.MULTILINE)
        assert first_columns.findall(shown) == first_columns.findall(made)


def test_a_picture_loads_nothing() -> None:
    for picture in [
        (DOCS / "images/quickstart.svg").read_text(encoding="utf-8"),
        _script("make_picture").draw("a", "b"),
    ]:
        assert re.findall(r"(?:url\(|href=)[\"']?(\w+:[^)\"']*)", picture) == []
        assert "@font-face" not in picture


def test_the_code_of_one_s_own_loop_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = [tmp_path / write(tmp_path, code, f"{i}.py") for i, code in enumerate(_code("howto/own-loop.md"))]
    runpy.run_path(str(first))
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "every_nth_layer: 3 of 6 blocks checkpointed ({2,4,6}), executor recompute",
        *(f"{i} {i} recompute by default" for i in (2, 4, 6)),
    ]
    runpy.run_path(str(second))
    assert re.search(r"^saved bytes a block +none +full +selective_op$", capsys.readouterr().out, re.MULTILINE)


def test_components_of_one_s_own_train(tmp_path: Path) -> None:
    (code,) = _code("howto/custom-components.md")
    (config,) = blocks(DOCS / "howto/custom-components.md", "yaml")
    write(tmp_path, code, "mine.py")
    write(tmp_path, config)
    assert run_lowtide(tmp_path, "config", "check", "train.yaml", "--allow-code").code == 0
    ended = run_lowtide(tmp_path, "train", "train.yaml", "--nproc", "2")
    assert ended.code == 0, ended.err
    assert "full: 3 of 3 blocks checkpointed (blocks.{0-2})" in ended.out
    steps = [line.split()[0] for line in (ended.run / "losses.txt").read_text().splitlines()]
    assert steps == ["1", "5"]


def test_parts_of_configs_are_legal(tmp_path: Path) -> None:
    found = [yaml.safe_load(code) for page in PAGES for code in blocks(page, "yaml")]
    assert len(found) >= 3
    for i, part in enumerate(found):
        file = tmp_path / write(tmp_path, yaml.safe_dump({**MINIMAL, **part}), f"{i}.yaml")
        load_config(file, allow_code=False)


def test_the_page_of_exit_codes_has_them_all() -> None:
    text = (DOCS / "reference/exit-codes.md").read_text(encoding="utf-8")
    kinds = [getattr(lowtide.errors, name) for name in lowtide.errors.__all__]
    codes = {kind.exit_code for kind in kinds if isinstance(kind, type)} | {0}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes
    written = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert written == set(get_args(Status)) - {"lost"}
    assert "`lost`" in text


def test_decisions_are_numbered_once_each() -> None:
    numbers = [page.name[:4] for page in sorted((DOCS / "decisions").glob("*.md"))]
    assert numbers == [f"{i + 1:04d}" for i in range(len(numbers))]


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", source)
    rows = re.findall(
        r"^\| `([^`]+)` \|", (DOCS / "howto/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) > 8
    for row in rows:
        # What stands for a name, and the places that the code fills in, is left out.
        pieces = [piece.strip() for piece in re.split(r"\.\.\.|'[^']*'", row)]
        for piece in [p for p in pieces if len(p) > 8]:
            assert piece in said, piece
