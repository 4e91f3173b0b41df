"""``lowtide estimate``: a number before the run, for people, for programs, and as an exit code."""

from __future__ import annotations

import json

import pytest

from lowtide.cli import run
from lowtide.records import CATEGORIES, Estimate
from tests.helpers.configs import write

CONFIG = """\
model: {kind: decoder, vocab_size: 64, dim: 32, layers: 2, heads: 2}
data: {kind: random, vocab_size: 64, sequence_length: 16, batch_size: 2}
policy: {kind: full}
launch: {threads: 1}
"""


@pytest.fixture
def config(tmp_path):
    return str(write(tmp_path, CONFIG))


def document(config, capsys, *arguments):
    code = run(["estimate", config, "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_table_names_peak_categories_and_what_is_taken_for_granted(config, capsys):
    assert run(["estimate", config, "--nproc", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{config} on cpu, rank 0 of 2, policy full\npeak ")
    for text in (
        "at the peak",
        "optimizer state",
        "saved activations",
        "most of it at the peak:",
        "taken for granted:",
    ):
        assert text in out
    assert "fits" not in out


def test_json_is_the_estimate_and_the_verdict(config, capsys):
    code, found = document(config, capsys, "--nproc", "2")
    assert (code, found["fits"], found["limit_bytes"]) == (0, None, None)
    fields = {name: value for name, value in found.items() if name in Estimate.model_fields}
    estimate = Estimate.from_json(json.dumps(fields))
    assert estimate.world_size == 2
    assert list(found["at_peak"]) == list(CATEGORIES)
    assert sum(found["at_peak"].values()) == found["peak_bytes"]
    assert found["step_ms"] == found["time"]["step_ms"] > 0
    assert found["tokens_per_s"] == pytest.approx(2 * 16 * 2 / found["step_ms"] * 1000)


def test_the_limit_decides_the_exit_code(config, capsys):
    peak = document(config, capsys, "--nproc", "1")[1]["peak_bytes"]
    needed = peak + int(peak * 0.02)
    assert document(config, capsys, "--nproc", "1", "--limit", f"{needed}B")[0] == 0
    code, found = document(config, capsys, "--nproc", "1", "--limit", f"{needed - 1}B")
    assert (code, found["fits"]) == (3, False)
    assert run(["estimate", config, "--nproc", "1", "--limit", "1KiB"]) == 3
    assert "does not fit: " in capsys.readouterr().out


def test_more_processes_hold_smaller_shards(config, capsys):
    few = document(config, capsys, "--nproc", "2")[1]
    many = document(config, capsys, "--nproc", "16", "--rank", "15")[1]
    assert many["rank"] == 15
    assert 8 * many["category_peaks"]["parameters"] == few["category_peaks"]["parameters"]


def test_a_target_device_is_named_with_its_kernels(config, capsys):
    code, found = document(config, capsys, "--nproc", "8", "--device", "h100", "--set", "precision.compute=bfloat16")
    assert (code, found["device"]) == (0, "H100")
    assert any("attention on H100 runs the" in text for text in found["assumptions"])
    assert any("not yet compared with a real GPU" in text for text in found["assumptions"])


@pytest.mark.parametrize("sharding", ["fsdp2", "none"])
def test_every_way_of_sharding_is_estimated(config, capsys, sharding):
    code, found = document(config, capsys, "--set", f"sharding.kind={sharding}", "--nproc", "1")
    assert code == 0
    assert found["peak_bytes"] > found["at_peak"]["parameters"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--limit", "80G"], "80GiB"),
        (["--device", "H10"], "Did you mean 'H100'"),
        (["--nproc", "2", "--rank", "2"], "rank 2 must be at least 0"),
        (["--set", "sharding.kind=ddp"], "sharding ddp is not estimated"),
        (["--nproc", "0"], "at least one process"),
        (["--nproc", "2", "--set", "sharding.kind=none"], "sharding 'none' is for one process"),
    ],
)
def test_wrong_input_is_one_clear_message(config, capsys, arguments, says):
    assert run(["estimate", config, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_the_plot_is_one_page_that_loads_nothing_and_escapes_all(config, capsys, tmp_path):
    page = tmp_path / "estimate.html"
    assert run(["estimate", config, "--nproc", "1", "--plot", str(page)]) == 0
    text = page.read_text()
    for said in ("forward", "backward", "optimizer", "saved activations", "Alive at the peak", "Taken for granted"):
        assert said in text
    assert text.count("<polygon") >= 4
    assert not [word for word in ("http", "src=", "href=", "@import", "<script") if word in text]


def test_a_page_escapes_what_a_model_calls_its_modules():
    from lowtide.records import AliveRow, CategoryBytes, TimelinePoint
    from lowtide.reports import estimate_page
    from tests.unit.test_prediction_time import ENVIRONMENT

    live = CategoryBytes(transient=10)
    odd = "<b>&layer"
    found = Estimate(
        peak_bytes=10, at_peak=live, peak_phase="forward", peak_module=odd, peak_op=odd, category_peaks=live,
        alive_at_peak=(AliveRow(category="transient", module=odd, op=odd, nbytes=10, count=1),),
        timeline=(TimelinePoint(event=0, phase="forward", module=odd, op=odd, live=live),),
        method="fake step", device="cpu", world_size=1, rank=0, policy=odd, assumptions=(odd,), environment=ENVIRONMENT,
    )  # fmt: skip
    text = estimate_page(found, title=odd)
    assert "<b>" not in text
    assert text.count("&lt;b&gt;&amp;layer") >= 8
