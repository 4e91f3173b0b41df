"""``lowtide profile``: where the time and the memory of a config's step go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json, Overrides

__all__ = ["profile"]

Phase = Literal["forward", "step"]
Data = Literal["random", "config"]


def profile(
    config: Annotated[Path, Parameter(help="The YAML file.")],
    /,
    *,
    set_: Overrides = (),
    phase: Annotated[Phase, Parameter(help="A whole training step, or its forward alone.")] = "step",
    nproc: Annotated[int | None, Parameter(help="Processes to start; default: as `lowtide train` would.")] = None,
    data: Annotated[Data, Parameter(help="Random batches of the config's shape, or the config's own data.")] = "random",
    warmup: Annotated[int, Parameter(help="Steps before anything is timed.")] = 2,
    repeats: Annotated[int, Parameter(help="Steps that are timed; their median counts.")] = 5,
    active: Annotated[int, Parameter(help="Steps in the table of operators and in the trace.")] = 1,
    top: Annotated[int, Parameter(help="Rows of each table.")] = 15,
    trace: Annotated[bool, Parameter(help="Write a Chrome trace for each rank; on CUDA a memory snapshot too.")] = True,
    device_profile: Annotated[
        Path | None, Parameter(help="What `lowtide calibrate` wrote: the peak that MFU and HFU are shares of.")
    ] = None,
    out: Annotated[Path, Parameter(help="The folder of profile.json and the traces.")] = Path("profile"),
    json: Json = False,
) -> Answer:
    """Time the phases of a training step, measure their peaks, and say which operators and modules cost most."""
    from lowtide.errors import UserError
    from lowtide.training.config import load_config
    from lowtide.training.launch import launch, under_torchrun

    for name, value, least in (("--warmup", warmup, 0), ("--repeats", repeats, 1), ("--active", active, 1)):
        if value < least:
            raise UserError(f"{name} {value}: at least {least}")
    if under_torchrun():
        told = {"phase": phase, "warmup": warmup, "repeats": repeats, "active": active, "trace": trace}
        return _rank(
            config, set_, {**told, "random_data": data == "random", "device_profile": device_profile, "out": out}
        )
    settings = load_config(config, set_).config
    arguments = ["profile", str(config), *(part for text in set_ for part in ("--set", text))]
    arguments += ["--phase", phase, "--data", data, "--out", str(out), "--trace" if trace else "--no-trace"]
    for name, value in (("--warmup", warmup), ("--repeats", repeats), ("--active", active)):
        arguments += [name, str(value)]
    arguments += [] if device_profile is None else ["--device-profile", str(device_profile)]
    wanted = settings.launch.nproc if nproc is None else nproc
    if wanted is None and settings.sharding.kind == "none":
        wanted = 1
    result = launch(arguments, nproc=wanted, threads=settings.launch.threads)
    result.report(sys.stderr)
    return _answer(result.exit_code, out, top, json=json)


def _rank(config: Path, overrides: tuple[str, ...], told: dict[str, Any]) -> Answer:
    """Be one rank: rank 0 writes the document."""
    from lowtide.training.rank_status import run_rank

    def main() -> None:
        from lowtide.system.files import write_json
        from lowtide.training.config import load_config
        from lowtide.training.mesh import on_main, process_group
        from lowtide.training.profiling import PROFILE_FILE, ProfileOptions, profile_config

        settings = load_config(config, overrides).config
        options = ProfileOptions(**told)
        with process_group(settings.launch.timeout_s) as world:
            on_main(lambda: options.out.mkdir(parents=True, exist_ok=True))
            document = profile_config(settings, world, options)
            if world.is_main:
                write_json(options.out / PROFILE_FILE, {"config": str(config), **document})

    return Answer(None, text="", exit_code=run_rank(main))


def _answer(exit_code: int, out: Path, top: int, *, json: bool) -> Answer:
    from lowtide.system.files import read_json

    if exit_code != 0:
        return Answer({"exit_code": exit_code, "profile": None}, text="", json=json, exit_code=exit_code)
    document = read_json(out / "profile.json")
    traces = sorted(str(path) for path in out.glob("trace-rank*.json"))
    snapshots = sorted(str(path) for path in out.glob("snapshot-rank*.pickle"))
    told = {**document, "traces": traces, "snapshots": snapshots}
    return Answer(told, text="\n".join(_text(told, out, top)), json=json)


def _text(told: dict[str, Any], out: Path, top: int) -> list[str]:
    what = "a training step" if told["phase"] == "step" else "forward alone"
    lines = [
        f"{told['config']}: {what}, {told['world_size']} processes on {told['device']}, {told['data']} data",
        f"policy {told['policy']}",
        f"median of {told['repeats']} steps after {told['warmup']}:",
        "",
        *_ranks(told),
        "",
        *_speeds(told),
        "",
        *_operators(told["operators"], top),
        "",
        *_modules(told["operators"], top),
        "",
    ]
    lines += [f"- {note}" for note in told["notes"]]
    files = [str(out / "profile.json"), *told["traces"], *told["snapshots"]]
    return [*lines, f"files: {' '.join(files)}"]


def _ranks(told: dict[str, Any]) -> list[str]:
    from lowtide.units import format_bytes

    phases = [name for name in told["ranks"][0]["ms"] if told["phase"] == "step" or name in ("data", "forward", "step")]
    lines = [f"{'':10}" + "".join(f"{name + ' ms':>14}" for name in phases) + f"{'peak':>14}"]
    rows = [(f"rank {rank['rank']}", rank) for rank in told["ranks"]]
    for name, rank in rows:
        peak = "not available" if rank["peak_bytes"] is None else format_bytes(rank["peak_bytes"])
        lines.append(f"{name:10}" + "".join(f"{rank['ms'][p]:14.2f}" for p in phases) + f"{peak:>14}")
    if len(rows) > 1:
        most = [max(rank["ms"][p] for _, rank in rows) for p in phases]
        peaks = [rank["peak_bytes"] for _, rank in rows]
        peak = "not available" if None in peaks else format_bytes(max(peaks))
        lines.append(f"{'maximum':10}" + "".join(f"{value:14.2f}" for value in most) + f"{peak:>14}")
    by_phase: dict[str, int] = {}
    for _, rank in rows:
        for name, nbytes in rank["phase_peak_bytes"].items():
            by_phase[name] = max(by_phase.get(name, 0), nbytes)
    return [*lines, "peaks by phase: " + ", ".join(f"{name} {format_bytes(n)}" for name, n in by_phase.items())]


def _speeds(told: dict[str, Any]) -> list[str]:
    counted = "not known" if told["hardware_flops"] is None else f"{told['hardware_flops'] / 1e9:,.3f}"
    lines = [
        f"{told['tokens_per_s']:,.0f} tokens/s; GFLOPs a step: the model's {told['model_flops'] / 1e9:,.3f}, "
        f"run with recompute {counted}"
    ]
    if told["mfu"] is None:
        return [*lines, "MFU and HFU are not known: no peak for this device (lowtide calibrate, then --device-profile)"]
    hfu = "not known" if told["hfu"] is None else f"{told['hfu']:.1%}"
    return [*lines, f"MFU {told['mfu']:.1%}, HFU {hfu}"]


def _operators(rows: list[dict[str, Any]], top: int) -> list[str]:
    sums: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        total = sums.setdefault((row["op"], row["phase"]), [0, 0.0, 0])
        total[0] += row["calls"]
        total[1] += row["time_ms"]
        total[2] += row["allocated_bytes"]
    return _table("operator", {f"{op}  ({phase})" if phase else op: v for (op, phase), v in sums.items()}, top)


def _modules(rows: list[dict[str, Any]], top: int) -> list[str]:
    sums: dict[str, list[float]] = {}
    for row in rows:
        total = sums.setdefault(row["module"] or "(no module)", [0, 0.0, 0])
        total[0] += row["calls"]
        total[1] += row["time_ms"]
        total[2] += row["allocated_bytes"]
    return _table("module", sums, top)


def _table(head: str, sums: dict[str, list[float]], top: int) -> list[str]:
    from lowtide.units import format_bytes

    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    lines = [f"{'ms':>10}{'calls':>8}{'allocated':>14}  {head}"]
    for name, (calls, time_ms, nbytes) in ordered[:top]:
        lines.append(f"{time_ms:10.3f}{int(calls):8}{format_bytes(nbytes):>14}  {name}")
    if len(ordered) > top:
        lines.append(f"{'':34}and {len(ordered) - top} more, in profile.json")
    return lines
