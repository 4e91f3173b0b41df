"""``lowtide estimate``: peak memory and time of a config's training step, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json, Overrides

if TYPE_CHECKING:
    from lowtide.records import Estimate, StepTime
    from lowtide.training.config import TrainConfig

__all__ = ["estimate"]

_MARGIN = 0.02
"""Share of the peak that must be free besides."""

_MOST_HOLDERS = 8
_DOES_NOT_FIT = 3


def estimate(
    config: Annotated[Path, Parameter(help="The YAML file.")],
    /,
    *,
    set_: Overrides = (),
    limit: Annotated[
        str | None, Parameter(help="Memory of a process, such as 80GiB: exit code 3 where the step does not fit.")
    ] = None,
    nproc: Annotated[
        int | None, Parameter(help="Processes of the run, any number; default: as many as `lowtide train` would start.")
    ] = None,
    rank: Annotated[int, Parameter(help="The process that is looked at.")] = 0,
    device: Annotated[
        str | None,
        Parameter(help="What each process computes on: a name such as H100; default: the profile's or cpu."),
    ] = None,
    profile: Annotated[
        Path | None, Parameter(help="What `lowtide calibrate` measured: its speeds instead of the table's.")
    ] = None,
    plot: Annotated[
        Path | None, Parameter(help="Also write an HTML page: memory over the step, and what is on top at the peak.")
    ] = None,
    json: Json = False,
) -> Answer:
    """Say what one training step will need at its peak and how long it takes, without running it: no GPU, no weights.

    Exit code 0 where it fits the limit or none is given, 3 where it does not.
    """
    from lowtide.prediction import read_profile
    from lowtide.training.config import load_config
    from lowtide.training.estimate import estimate_config
    from lowtide.units import parse_bytes

    limit_bytes = None if limit is None else parse_bytes(limit)
    settings = load_config(config, set_).config
    processes = _processes(settings, nproc)
    threads = settings.launch.threads or _threads(processes)
    speeds = None if profile is None else read_profile(profile)
    found = estimate_config(settings, world_size=processes, rank=rank, device=device, threads=threads, profile=speeds)
    margin_bytes = int(found.peak_bytes * _MARGIN)
    fits = None if limit_bytes is None else found.peak_bytes + margin_bytes <= limit_bytes
    document: dict[str, Any] = {
        "config": str(config),
        **found.model_dump(mode="json"),
        "step_ms": found.step_ms,
        "tokens_per_s": found.tokens_per_s,
        "limit_bytes": limit_bytes,
        "margin_bytes": margin_bytes,
        "fits": fits,
    }
    if plot is not None:
        from lowtide.reports import write_estimate_page

        write_estimate_page(found, plot, title=str(config))
    text = _text(str(config), found, limit_bytes, margin_bytes)
    return Answer(document, text=text, json=json, exit_code=_DOES_NOT_FIT if fits is False else 0)


def _processes(settings: TrainConfig, nproc: int | None) -> int:
    from lowtide.errors import UserError
    from lowtide.training.launch import choose_nproc

    wanted = settings.launch.nproc if nproc is None else nproc
    if settings.sharding.kind == "none":
        if wanted not in (None, 1):
            raise UserError(
                f"sharding 'none' is for one process, and {wanted} were asked for: use fsdp2 or ddp, or --nproc 1"
            )
        return 1
    if wanted is not None and wanted < 1:
        raise UserError(f"--nproc {wanted}: a run has at least one process")
    return choose_nproc(None) if wanted is None else wanted


def _threads(processes: int) -> int:
    """Threads of a process as ``lowtide train`` would set them; on a CPU, kernels have workspaces for each."""
    import os

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else max(1, cores // processes)


def _text(config: str, found: Estimate, limit_bytes: int | None, margin_bytes: int) -> str:
    from lowtide.units import format_bytes

    place = " ".join(filter(None, (found.peak_module, found.peak_op)))
    lines = [
        f"{config} on {found.device}, rank {found.rank} of {found.world_size}, policy {found.policy}",
        f"peak {format_bytes(found.peak_bytes)}, in {found.peak_phase}, at {place or 'its start'}",
        *_time_lines(found.time),
        "",
        f"{'':20}{'at the peak':>14}{'at most':>14}",
    ]
    most = found.category_peaks.as_dict()
    for name, nbytes in found.at_peak.as_dict().items():
        if most[name]:
            lines.append(f"{name.replace('_', ' '):20}{format_bytes(nbytes):>14}{format_bytes(most[name]):>14}")
    lines += ["", "most of it at the peak:"]
    for row in found.alive_at_peak[:_MOST_HOLDERS]:
        where = " ".join(filter(None, (row.module, row.op)))
        lines.append(f"{format_bytes(row.nbytes):>14}  {row.category.replace('_', ' ')}: {where}")
    if limit_bytes is not None:
        lines += ["", _verdict(found.peak_bytes, limit_bytes, margin_bytes)]
    return "\n".join([*lines, "", "taken for granted:", *(f"- {text}" for text in found.assumptions)])


def _time_lines(time: StepTime | None) -> list[str]:
    if time is None:
        return []
    parts = f"forward {time.forward_ms:,.1f}, backward {time.backward_ms:,.1f}, optimizer {time.optimizer_ms:,.1f}"
    lines = [f"step {time.step_ms:,.1f} ms ({parts}; collectives {time.communication_ms:,.1f})"]
    facts = [] if time.tokens_per_s is None else [f"{time.tokens_per_s:,.0f} tokens/s"]
    if time.mfu is not None and time.hfu is not None:
        facts.append(f"MFU {time.mfu:.1%}, HFU {time.hfu:.1%}")
    return [*lines, ", ".join(facts)] if facts else lines


def _verdict(peak_bytes: int, limit_bytes: int, margin_bytes: int) -> str:
    from lowtide.units import format_bytes

    needed = peak_bytes + margin_bytes
    parts = f"{format_bytes(needed)} ({format_bytes(peak_bytes)} and a margin of {_MARGIN:.0%})"
    if needed <= limit_bytes:
        return f"fits: {parts} within {format_bytes(limit_bytes)}"
    over = format_bytes(needed - limit_bytes)
    return f"does not fit: {parts} is {over} more than the limit of {format_bytes(limit_bytes)}"
