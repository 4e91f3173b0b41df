"""``lowtide config ...`` and the habits of every verb: exit codes, one message, one JSON document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lowtide
from lowtide.cli import VERBS, run
from tests.helpers.configs import MINIMAL, write


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write(tmp_path, MINIMAL))


def test_check_says_that_a_config_is_legal(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check", config]) == 0
    assert capsys.readouterr() == (f"{config}: legal\n", "")


def test_check_gives_all_errors_and_exit_code_2(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check", config, "--set", "training.stps=3", "--set", "run.seed=-1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lowtide: {config}: 2 errors\n")
    assert "\n  --set training.stps=3: training.stps: unknown key" in err
    assert "  --set run.seed=-1: run.seed: got -1; legal: a whole number, at least 0" in err


def test_json_is_one_document_also_for_errors(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check", config, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"config": config, "legal": True, "unchecked": []}
    assert run(["config", "check", "nowhere.yaml", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "error": {"kind": "InputError", "message": err.removeprefix("lowtide: ").strip()},
        "exit_code": 2,
    }
    assert err.startswith("lowtide: nowhere.yaml: no such file.")
    assert run(["config", "chek", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_check_names_what_it_did_not_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model: {kind: custom, target: 'no_such_package:Net'}\ndata: {kind: random}\n"
    text += "logging: {trackers: [{kind: custom, target: 'mine:T'}]}\n"
    path = str(write(tmp_path, text))
    assert run(["config", "check", path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: legal",
        "not checked without --allow-code: model (no_such_package:Net)",
        "not checked without --allow-code: logging.trackers.0 (mine:T)",
    ]
    assert run(["config", "check", path, "--allow-code"]) == 2
    assert "No module named 'no_such_package'" in capsys.readouterr().err


def test_show_prints_what_loads_again(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", config, "--set", "run.name=${env:LOWTIDE_TEST_NAME:-abc}"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["run"]["name"] == "${env:LOWTIDE_TEST_NAME:-abc}"
    again = str(write(tmp_path, shown, "again.yaml"))
    assert run(["config", "show", again]) == 0
    assert capsys.readouterr().out == shown
    assert run(["config", "show", again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == yaml.safe_load(shown)


def test_schema_is_a_json_schema_of_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model", "data"]
    kinds = [choice["properties"]["kind"]["const"] for choice in schema["properties"]["model"]["anyOf"]]
    assert kinds == ["decoder", "huggingface", "custom"]
    assert run(["config", "schema", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Config reference\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["confg"], 'Unknown command "confg". Did you mean "config"?'),
        (["config", "chek", "x"], 'Unknown command "chek". Did you mean "check"?'),
        (["config", "check"], "parameter CONFIG requires an argument"),
        (["config", "check", "x.yaml", "--st", "a=1"], "Unknown option: --st. Did you mean --set?"),
        (["config", "check", "a.yaml", "b.yaml"], "b.yaml"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("lowtide: ")
    assert message in err


def test_a_fault_of_our_own_has_exit_code_1_and_still_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(VERBS, "broken", ("tests.unit.test_config_cli:_broken_verb", "Fails."))
    assert run(["broken", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["message"] == "a fault of lowtide's own: ZeroDivisionError: division by zero"
    assert "Traceback" in err
    assert "printed by a library" in err


def _broken_verb(*, json: bool = False) -> None:
    print("printed by a library")
    _ = 1 / 0


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"lowtide {lowtide.__version__}"
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in VERBS)
    assert run([]) == 0


def test_a_reader_that_stops_early_is_no_error(config: str) -> None:
    command = f"{sys.executable} -m lowtide config schema | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.stdout == "{\n"
    assert ended.stderr == ""


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from lowtide.cli import run; run(['--help'])\n"
        "heavy = {'torch', 'pydantic', 'numpy', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
