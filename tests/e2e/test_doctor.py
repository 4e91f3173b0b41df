"""``lowtide doctor``: usable or not, whatever is missing, without a traceback and with nobody left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.command import lowtide


def _by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in document["checks"]}


def test_here_it_can_train(tmp_path: Path) -> None:
    ended = lowtide(tmp_path, "doctor", "--json")
    document = ended.document()
    assert (ended.code, document["usable"], document["broken"]) == (0, True, [])
    found = _by_name(document)
    assert found["torch"]["status"] == found["two processes, gloo"]["status"] == "ok"
    assert found["memory"]["data"]["total_bytes"] > 2**28
    assert found["cpu"]["data"]["usable_cores"] >= 1
    assert not (tmp_path / "runs").exists()


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    broken = tmp_path / "path" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    with_it = {"PYTHONPATH": f"{broken.parent}:{Path(__file__).parents[2] / 'src'}", "COLUMNS": "200"}
    ended = lowtide(tmp_path, "doctor", environ=with_it)
    assert ended.code == 1
    assert "libtorch_cpu.so" in ended.out
    assert ended.out.rstrip().endswith("broken: torch, two processes, gloo")
    assert "Traceback" not in ended.out + ended.err


def test_what_does_not_end_in_time_is_broken_and_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = lowtide(tmp_path, "doctor", "--json", "--timeout", "0.2", "--runs-dir", "file/runs")
    found = _by_name(json.loads(ended.out))
    assert ended.code == 1
    assert found["torch"] | {"data": {}} == {
        "name": "torch",
        "status": "broken",
        "found": "no answer within 0.2 s",
        "advice": "pip install 'torch>=2.11'",
        "data": {},
    }
    assert found["runs folder"]["status"] == "broken"
