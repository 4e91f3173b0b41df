"""What a sweep file means: which cells, in which order, with which keys; and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lowtide.cli.sweep_cmd import read_sweep
from lowtide.errors import ConfigError, InputError, NothingMatchedError
from lowtide.sweeps import SweepConfig
from lowtide.sweeps._grid import canonical, expand, flatten, label_of
from lowtide.sweeps._plan import larger_than
from tests.e2e.command import EXAMPLES
from tests.helpers.configs import write

BASE = """\
model: {kind: decoder, dim: 32, layers: 2, heads: 2}
data: {kind: random, batch_size: 2}
sharding: {kind: none}
"""


def _cells(base=None, **fields):
    sweep = SweepConfig(name="s", base="b", **fields)
    return [point.settings for point in expand(sweep, base or {})]


def test_a_grid_is_every_combination_the_last_field_changing_fastest():
    assert _cells(grid={"a.x": [1, 2], "b": ["u", "v"]}) == [
        {"a.x": 1, "b": "u"}, {"a.x": 1, "b": "v"}, {"a.x": 2, "b": "u"}, {"a.x": 2, "b": "v"},
    ]  # fmt: skip


def test_paired_lists_change_together_and_are_one_dimension():
    cells = _cells(grid={"a": [1, 2]}, paired=[{"x": [3, 4], "y": [5, 6]}])
    assert cells == [
        {"a": 1, "x": 3, "y": 5}, {"a": 1, "x": 4, "y": 6}, {"a": 2, "x": 3, "y": 5}, {"a": 2, "x": 4, "y": 6},
    ]  # fmt: skip


def test_points_stand_alone_or_besides_a_grid_and_common_settings_are_below_all():
    assert _cells(points=[{"a": 1}, {"b": 2}], settings={"s": 0}) == [{"s": 0, "a": 1}, {"s": 0, "b": 2}]
    assert _cells(grid={"a": [1]}, points=[{"b": 2}]) == [{"a": 1}, {"b": 2}]
    assert _cells() == [{}]


def test_equal_cells_are_one():
    assert _cells(grid={"a": [1, 2, 1]}, points=[{"a": 2}]) == [{"a": 1}, {"a": 2}]


def test_conditions_see_the_base_and_what_cells_set_inside_mappings():
    base = {"data": {"batch_size": 8}, "policy": {"kind": "none"}}
    grid = {"policy": [{"kind": "none"}, {"kind": "full"}], "n": [1, 2, 3]}
    left = _cells(base, grid=grid, leave_out=[{"policy.kind": "none", "n": {"min": 2}, "data.batch_size": [4, 8]}])
    assert [canonical(cell["policy"])[9:13] + str(cell["n"]) for cell in left] == ["none1", "full1", "full2", "full3"]
    adjusted = _cells(base, grid=grid, adjust=[{"when": {"policy.kind": "full"}, "settings": {"extra": True}}])
    assert [cell.get("extra") for cell in adjusted] == [None] * 3 + [True] * 3


def test_a_condition_that_meets_nothing_is_an_error_with_the_nearest_name():
    with pytest.raises(NothingMatchedError, match=r"no cell .* 'policy.knd'.*policy\.kind"):
        _cells({"policy": {"kind": "none"}}, grid={"a": [1]}, leave_out=[{"policy.knd": "none"}])
    with pytest.raises(NothingMatchedError, match="meets none of the 1 cells"):
        _cells(grid={"a": [1]}, leave_out=[{"a": 2}])
    with pytest.raises(ConfigError, match="no cells"):
        _cells(grid={"a": [1]}, leave_out=[{"a": 1}])


def test_true_is_not_1_in_a_condition():
    assert _cells(grid={"a": [1, True, 1.0]}, leave_out=[{"a": True}]) == [{"a": 1}, {"a": 1.0}]


def test_a_grid_that_is_too_large_is_refused_before_it_is_made():
    with pytest.raises(ConfigError, match="1,000,000,000,000 cells"):
        _cells(grid={str(i): list(range(1000)) for i in range(4)})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"paired": [{"a": [1], "b": [1, 2]}]}, "a has 1, b has 2"),
        ({"at_once": 2, "devices": ["0"]}, "`devices` has 1 entries"),
        ({"at_once": 2, "devices": ["0,1", "1"]}, "stands twice"),
        ({"grid": {"a": []}}, "at least 1"),
        ({"skip": ["skipped"]}, "out_of_memory"),
        ({"name": "../x"}, "pattern"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_makes_no_sense_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        SweepConfig(**{"name": "s", "base": "b", **fields})


def test_labels_say_what_varies():
    sweep = SweepConfig(
        name="s", base="b", grid={"policy": [{"kind": "full"}, {"kind": "selective_op", "save": ["sdpa"]}], "d.n": [1]}
    )
    assert [label_of(p) for p in expand(sweep, {})] == ["policy=full n=1", "policy=selective_op(save=[sdpa]) n=1"]


def _sweep(tmp_path, text, base=BASE):
    write(tmp_path, base, "base.yaml")
    return read_sweep(write(tmp_path, text, "sweep.yaml"))


def test_a_sweep_file_reads_like_a_config(tmp_path):
    with pytest.raises(ConfigError, match=r"sweep.yaml:3: gird: unknown key.*grid"):
        _sweep(tmp_path, "name: s\nbase: base.yaml\ngird: {a: [1]}\n")
    with pytest.raises(InputError, match=r"bas.yaml: no such file.*base.yaml"):
        _sweep(tmp_path, "name: s\nbase: bas.yaml\n")


def test_every_cell_is_checked_before_anything_runs(tmp_path):
    text = "name: s\nbase: base.yaml\ngrid: {data.batch_size: [2, -1], training.stps: [3]}\n"
    with pytest.raises(ConfigError) as caught:
        _sweep(tmp_path, text)
    message = str(caught.value)
    assert message.startswith("2 of 2 cells are not legal")
    assert "Did you mean 'steps'?" in message
    assert "cell batch_size=-1 stps=3" in message


def test_any_field_varies_the_number_of_processes_too_and_a_key_depends_on_the_content(tmp_path):
    text = "name: s\nbase: base.yaml\ngrid: {launch.nproc: [1, 2], policy: [{kind: full}, {kind: none}]}\n"
    settings = "settings: {sharding: {kind: ddp}}\n"
    _, cells, folder = _sweep(tmp_path, text + settings)
    assert [(c.config["launch"]["nproc"], c.config["policy"]["kind"]) for c in cells] == [
        (1, "full"), (1, "none"), (2, "full"), (2, "none"),
    ]  # fmt: skip
    assert len({c.key for c in cells}) == 4
    assert str(folder) == "runs/sweeps/s"
    _, again, _ = _sweep(tmp_path, text + settings + "# another comment\n")
    assert [c.key for c in again] == [c.key for c in cells]
    _, other, _ = _sweep(tmp_path, text + settings, BASE + "training: {steps: 7}\n")
    assert not {c.key for c in other} & {c.key for c in cells}
    _, named, _ = _sweep(tmp_path, text + settings, BASE + "run: {name: other, directory: elsewhere}\n")
    assert [c.key for c in named] == [c.key for c in cells]


def test_what_the_environment_gives_stands_in_no_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_SECRET", "hunter2hunter2")
    text = "name: s\nbase: base.yaml\npoints: [{run.name: '${env:SWEEP_SECRET}'}]\n"
    _, (cell,), _ = _sweep(tmp_path, text)
    assert "hunter2" not in f"{cell}{cell.text}{cell.flat}"
    assert cell.config["run"]["name"] == "${env:SWEEP_SECRET}"


def test_a_cell_is_larger_where_it_grows_in_memory_fields_only(tmp_path):
    text = (
        "name: s\nbase: base.yaml\n"
        "grid: {data.batch_size: [2, 4], model.layers: [2, 3], policy: [{kind: none}, {kind: full}]}\n"
    )
    settings, cells, _ = _sweep(tmp_path, text)
    by = {(c.config["data"]["batch_size"], c.config["model"]["layers"], c.config["policy"]["kind"]): c for c in cells}
    small = by[2, 2, "none"]

    def larger(cell, other=small):
        return larger_than(cell, other, settings.prune_fields)

    assert larger(by[4, 2, "none"]) == ["data.batch_size"]
    assert sorted(larger(by[4, 3, "none"])) == ["data.batch_size", "model.layers"]
    assert larger(small) == []
    assert larger(by[4, 3, "full"]) == []
    assert larger(by[4, 2, "none"], by[2, 3, "none"]) == []


def test_a_pruning_field_that_no_cell_has_is_an_error(tmp_path):
    with pytest.raises(NothingMatchedError, match=r"'data.batchsize'.*data\.batch_size"):
        _sweep(tmp_path, "name: s\nbase: base.yaml\nprune_fields: [data.batchsize]\n")


def test_flatten_keeps_lists_and_empty_mappings_whole():
    assert flatten({"a": {"b": [1, {"c": 2}], "d": {}}, "e": None}) == {"a.b": [1, {"c": 2}], "a.d": {}, "e": None}


def test_the_shipped_sweep_is_legal_and_tries_save_lists_alone_and_together():
    settings, cells, _ = read_sweep(EXAMPLES / "sweep_ac.yaml")
    assert settings.estimate
    assert [c.config["data"]["batch_size"] for c in cells] == [4] * 7 + [16] * 7
    kinds = [c.config["policy"]["kind"] for c in cells[:7]]
    assert kinds == ["none", "full", "every_nth_layer", *["selective_op"] * 4]
    assert {c.config["launch"]["nproc"] for c in cells} == {2}
