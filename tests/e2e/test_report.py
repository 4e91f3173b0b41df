"""``lowtide report``: every number is the record's, a stranger's text is text, and the page works in a real browser."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys

import pytest

import lowtide
from lowtide.cli import run
from lowtide.errors import InputError
from lowtide.reports import (
    find_records,
    frontier_of,
    plot_frontier,
    plot_prediction,
    plot_timeline,
    rows_of,
    to_csv,
    to_parquet,
    write_page,
)
from lowtide.system.files import write_json
from tests.helpers.reported import NASTY, look, record, write_records


def test_records_are_found_once_each_and_runs_that_stand_alone_too(tmp_path):
    made = write_records(tmp_path, 5)
    alone = tmp_path / "20260101-run"
    alone.mkdir()
    write_json(
        alone / "run.json", {"experiment_id": "alone", "status": "failed", "error": {"type": "E", "message": "m"}}
    )
    damaged = tmp_path / "sweeps/grid/cells/damaged"
    damaged.mkdir()
    (damaged / "record.json").write_text("{")
    unfinished = tmp_path / "sweeps/grid/cells/unfinished"
    unfinished.mkdir()
    (unfinished / "cell.yaml").write_text("")
    found = find_records(tmp_path)
    assert [r.id for r in found.records] == ["alone", *(r.id for r in made)]
    assert found.folders[1] == "sweeps/grid/cells/cell-00000"
    assert (len(found.unread), found.unfinished) == (1, 1)
    assert "damaged" in found.unread[0]


def test_a_folder_without_runs_is_an_error_that_says_so(tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        find_records(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        find_records(tmp_path / "nowhere")


def test_rows_hold_the_numbers_of_the_records_and_none_for_what_failed(tmp_path):
    made = write_records(tmp_path, 10)
    rows = rows_of(find_records(tmp_path))
    assert [row["id"] for row in rows] == [r.id for r in made]
    for row, each in zip(rows, made, strict=True):
        result = each.result
        assert row["peak_bytes"] == (None if result is None else 10_000_000 + each.number * 4099)
        assert row["tokens_per_s"] == (None if result is None else result.tokens_per_s)
        kind = each.config["policy"]["kind"]
        assert row["saved_bytes"] == (
            None if result is None else {"none": 9000, "full": 1000, "selective_op": 5000}[kind] + each.number
        )
        assert row["config.policy.kind"] == kind
    assert [name for name in rows[0] if name.startswith("config.")] == ["config.data.batch_size", "config.policy.kind"]


def test_csv_and_parquet_and_the_frame_hold_the_same(tmp_path):
    pd = pytest.importorskip("pandas", reason="needs pandas")
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    write_records(tmp_path, 10, nasty=True)
    found = find_records(tmp_path)
    rows = rows_of(found)
    read = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows] == read
    frame = lowtide.load_runs(tmp_path)
    assert list(frame.columns) == list(rows[0])
    assert frame["peak_bytes"].dtype == "Int64"
    to_parquet(found, tmp_path / "t.parquet")
    back = pd.read_parquet(tmp_path / "t.parquet")
    for name in frame.columns:
        values = [None if pd.isna(v) else v for v in back[name]]
        assert values == [row[name] for row in rows], name


def test_without_pandas_the_error_says_what_to_install(tmp_path):
    write_records(tmp_path, 1)
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "import lowtide, lowtide.errors\n"
        f"try: lowtide.load_runs({str(tmp_path)!r})\n"
        "except lowtide.errors.InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "a DataFrame needs pandas: pip install 'lowtide[reports]'\n"


def test_the_frontier_is_what_nothing_beats_in_both():
    records = [record(number) for number in range(60)]
    best = frontier_of(records)
    known = [(r.result.peak_bytes, r.result.tokens_per_s, r.id) for r in records if r.result is not None]
    expected = [
        id_ for peak, speed, id_ in sorted(known)
        if not any((p <= peak and s >= speed) and (p, s) != (peak, speed) for p, s, _ in known)
    ]  # fmt: skip
    assert [r.id for r in best] == expected
    svg = plot_frontier(records)
    assert svg.count('<circle class="f"') == len(expected)
    assert svg.count("<circle") == len(known)


def test_plots_without_numbers_say_so():
    failed = [record(2)]
    assert "no run has both numbers" in plot_frontier(failed)
    assert "no run has both numbers" in plot_prediction(failed)


def test_plots_become_files_and_png_where_the_extra_is_there(tmp_path, capsys):
    pytest.importorskip("vl_convert", reason="needs vl-convert-python")
    write_records(tmp_path, 2)
    out, plots = tmp_path / "r.html", tmp_path / "plots"
    assert run(["report", str(tmp_path / "sweeps"), "--out", str(out), "--plots", str(plots), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["runs"], document["counts"]) == (2, {"ok": 2})
    assert sorted(p.name for p in plots.iterdir()) == sorted(
        f"{name}.{kind}"
        for name in ("frontier", "prediction", "timeline-0000", "timeline-0001")
        for kind in ("png", "svg")
    )
    assert (plots / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_holds_no_markup_of_strangers_and_no_address(tmp_path):
    write_records(tmp_path, 10, nasty=True)
    page = write_page(find_records(tmp_path), title=f"Runs in {NASTY}")
    assert page.count("<script") == 2
    assert "<img" not in page
    assert re.findall(r"https?://[^\s\"'<]+", page.replace("http://www.w3.org/2000/svg", "")) == []
    svg = plot_timeline(record(0).predicted, title=NASTY) + plot_frontier([record(0, nasty=True)])
    assert "<script" not in svg
    assert "<img" not in svg


def _page(tmp_path, count, *, nasty=False):
    made = write_records(tmp_path / "runs", count, nasty=nasty)
    page = tmp_path / "report.html"
    page.write_text(write_page(find_records(tmp_path / "runs"), title="Runs"), encoding="utf-8")
    return made, page


def _check_numbers(made, dom):
    """Compare each number in the browser's document with the record's."""
    by_id = {f"{index}:{each.id}": each for index, each in enumerate(made)}
    assert [key for key, _ in dom.rows] == list(by_id)
    for key, cells in dom.rows:
        each = by_id[key]
        result = each.result
        assert cells[0][0] == each.label
        assert cells[1][0] == each.status
        values = [None if value is None else float(value) for _, value in cells[2:5]]
        peak, speed = (None, None) if result is None else (result.peak_bytes, result.tokens_per_s)
        assert values == [peak, each.predicted.peak_bytes, speed]
        assert all(bool(text) == (value is not None) for (text, _), value in zip(cells[2:5], values, strict=True))


def test_in_a_browser_every_number_is_the_records_and_nothing_complains(tmp_path):
    made, page = _page(tmp_path, 5)
    dom, said = look(page, f"open=0:{made[0].id}", profile=tmp_path / "profile")
    assert said == []
    _check_numbers(made, dom)
    assert dom.tags["circle"] == 6  # three runs that are ok, in two plots
    assert "aten.mm.default" in dom.detail
    assert str(made[0].result.peak_bytes) in dom.detail


def test_in_a_browser_markup_in_a_config_is_text(tmp_path):
    made, page = _page(tmp_path, 5, nasty=True)
    dom, said = look(page, f"open=1:{made[1].id}", profile=tmp_path / "profile")
    assert said == []
    assert dom.title == "Runs"
    assert dom.tags.get("img") is None
    assert dom.tags["script"] == 2
    assert NASTY in dom.detail
    assert all(NASTY in cells[0][0] for _, cells in dom.rows)


def test_in_a_browser_rows_are_sorted_and_filtered(tmp_path):
    made, page = _page(tmp_path, 10)
    dom, said = look(page, "sort=tokens_per_s&down=1&status=ok&filter=full", profile=tmp_path / "profile")
    assert said == []
    kept = [r for r in made if r.status == "ok" and r.config["policy"]["kind"] == "full"]
    kept.sort(key=lambda r: -r.result.tokens_per_s)
    assert [key.split(":")[1] for key, _ in dom.rows] == [r.id for r in kept]


@pytest.mark.full
def test_in_a_browser_2000_cells_are_all_there(tmp_path):
    made, page = _page(tmp_path, 2000)
    dom, said = look(page, profile=tmp_path / "profile")
    assert said == []
    _check_numbers(made, dom)
