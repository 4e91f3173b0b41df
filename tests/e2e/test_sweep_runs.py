"""``lowtide sweep`` with real trainings: exit codes, tables, peaks, and every fault under torch's own launcher."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from lowtide.run_record import RunRecord
from lowtide.system.processes import processes_with
from tests.e2e.command import Ended, lowtide, started
from tests.helpers.launched import wait_for

BASE = """\
model: {kind: decoder, dim: 32, layers: 2, heads: 2}
data: {kind: random, sequence_length: 16, batch_size: 2}
sharding: {kind: none}
training: {steps: 4}
evaluation: {batches: 1}
estimate: false
"""


def _write(folder: Path, sweep: str, base: str = BASE) -> None:
    (folder / "base.yaml").write_text(base)
    (folder / "sweep.yaml").write_text(sweep)


def _records(folder: Path) -> dict[str, RunRecord]:
    files = folder.glob("runs/sweeps/*/cells/*/record.json")
    return {(r := RunRecord.from_json(f.read_bytes())).label: r for f in sorted(files)}


def _custom(target: str, **fields: int) -> str:
    given = ", ".join(f"{name}: {value}" for name, value in fields.items())
    return f"{{kind: custom, target: 'tests.e2e.parts:{target}', config: {{{given}}}}}"


SWEEP = f"""\
name: real
base: base.yaml
at_once: 2
points:
  - {{run.seed: 1}}
  - {{run.name: hungry, data: {_custom("Hungry", rank=0)}}}
  - {{run.seed: 2}}
"""


def test_a_sweep_ends_with_1_and_a_table_of_what_failed_and_no_peak_holds_another_cell(tmp_path):
    _write(tmp_path, SWEEP)
    ended = lowtide(tmp_path, "sweep", "sweep.yaml")
    assert ended.code == 1, ended.err
    lines = ended.out.splitlines()
    assert sum(line.startswith("[") for line in lines) == 3
    assert "3 cells: 2 ok, 1 out of memory" in lines
    (failed,) = [line for line in lines if line.startswith("  out of memory")]
    assert "out of memory on cpu (rank 0 of 1) during step 3" in failed
    first, hungry, last = sorted(_records(tmp_path).values(), key=lambda record: record.number)
    assert hungry.result is None
    assert first.result.peak_bytes == last.result.peak_bytes > 0
    assert list((tmp_path / "runs").rglob("checkpoints")) == []
    again = lowtide(tmp_path, "sweep", "sweep.yaml", "--resume", "--json")
    document = again.document()
    assert (again.code, document["exit_code"], document["counts"]) == (1, 1, {"ok": 2, "out_of_memory": 1})
    peak = first.result.peak_bytes
    assert [row["peak_bytes"] for row in document["cells"]] == [peak, None, peak]


def test_wrong_input_starts_nothing(tmp_path):
    _write(tmp_path, "name: s\nbase: base.yaml\ngrid: {training.stps: [1]}\n")
    ended = lowtide(tmp_path, "sweep", "sweep.yaml")
    assert ended.code == 2
    assert "Did you mean 'steps'?" in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_pricing_trains_nothing_and_says_the_peak_that_is_measured(tmp_path):
    _write(tmp_path, "name: s\nbase: base.yaml\npoints: [{run.seed: 1}, {model.dim: 64}]\n")
    document = lowtide(tmp_path, "sweep", "sweep.yaml", "--estimate", "--json").document()
    peaks = [row["predicted_peak_bytes"] for row in document["cells"]]
    assert [row["error"] for row in document["cells"]] == [None, None]
    assert 0 < peaks[0] < peaks[1]
    assert not (tmp_path / "runs").exists()


FAULTS = {
    "Broken": ("error", "ZeroDivisionError: "),
    "Hungry": ("out_of_memory", "out of memory on cpu"),
    "CudaHungry": ("out_of_memory", "out of memory on cpu"),
    "Hanging": ("timeout", "not done within"),
    "Killed": ("error", "SIGKILL, cause unknown (rank "),
    "Leaving": ("error", ""),
    "CannotWrite": ("error", ""),
}
EVERYTHING = "\n".join(
    [
        "name: faults",
        "base: base.yaml",
        "timeout_s: 150",
        "grace_s: 1",
        "settings: {sharding: {kind: fsdp2}}",
        "points:",
        *(f"  - {{launch.nproc: 1, run.name: {t}-1, data: {_custom(t, rank=0)}}}" for t in FAULTS),
        *(f"  - {{launch.nproc: 2, run.name: {t}-2, data: {_custom(t, rank=0)}}}" for t in FAULTS),
        *(f"  - {{launch.nproc: 2, run.name: {t}-3, data: {_custom(t, rank=1)}}}" for t in FAULTS),
        *(f"  - {{launch.nproc: {n}, run.name: good-{n}-{s}, run.seed: {s}}}" for n, s in ((1, 1), (2, 2), (2, 3))),
        "",
    ]
)


def _check_everything(folder: Path) -> None:
    records = {r.settings["run.name"]: r for r in _records(folder).values()}
    assert len(records) == 24
    for name, record in records.items():
        status, reason = FAULTS.get(name.split("-")[0], ("ok", None))
        assert record.status == status, (name, record.reason)
        assert (record.result is not None) == (status == "ok")
        if reason is not None:
            assert record.reason.startswith(reason), (name, record.reason)
        if record.status == "out_of_memory":
            assert record.error_rank == (1 if name.endswith("-3") else 0)
    marks = [p for p in Path("/proc").glob("[0-9]*") if processes_with_mark(p, folder)]
    assert marks == []


def processes_with_mark(process: Path, folder: Path) -> bool:
    try:
        return str(folder).encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_24_cells_with_every_fault_under_the_real_launcher(tmp_path):
    _write(tmp_path, EVERYTHING)
    with started(tmp_path, "sweep", "sweep.yaml") as command:
        out, err = command.process.communicate(timeout=1700)
        ended = Ended(command.process.returncode, out, err, tmp_path)
    assert ended.code == 1, ended.err
    _check_everything(tmp_path)
    assert "24 cells: " in ended.out


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_real_sweep_killed_20_times_and_resumed_has_the_same_records(tmp_path):
    _write(tmp_path, EVERYTHING)
    draw = random.Random(20261201)
    moments: list[str] = []
    for nth in range(20):
        with started(tmp_path, "sweep", "sweep.yaml", "--resume") as command:
            # Far enough for a cell to be anywhere: starting, training, ending, being recorded.
            until = time.monotonic() + draw.uniform(2, 14)
            while time.monotonic() < until and command.process.poll() is None:
                time.sleep(0.05)
            moments.append(f"kill {nth}: {len(_records(tmp_path))} records")
            command.process.send_signal(signal.SIGKILL)
            command.process.wait(60)
            wait_for(lambda: processes_with("LOWTIDE_E2E_MARK", command.mark) == [], f"everyone's end, {moments}")
    with started(tmp_path, "sweep", "sweep.yaml", "--resume", "--json") as command:
        out, err = command.process.communicate(timeout=1700)
    assert command.process.returncode == 1, err
    assert json.loads(out)["interrupted"] is None
    _check_everything(tmp_path)
