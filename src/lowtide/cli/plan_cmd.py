"""``lowtide plan``: the fastest choice of what to keep that fits a memory limit, for a config's training step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json, Overrides

if TYPE_CHECKING:
    from lowtide.plan_record import Plan

__all__ = ["plan"]


def plan(
    config: Annotated[Path, Parameter(help="The YAML file; its policy is left out of account.")],
    /,
    *,
    limit: Annotated[str, Parameter(help="Memory of a process, such as 80GiB.")],
    out: Annotated[Path | None, Parameter(help="Where to write the plan, as YAML.")] = None,
    set_: Overrides = (),
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
    executor: Annotated[
        Literal["replay", "recompute"], Parameter(help="What will carry the plan out; each is priced by what it runs.")
    ] = "replay",
    simulate: Annotated[
        bool,
        Parameter(help="Run the whole step under fake tensors with the plan; tighten it where that needs more."),
    ] = True,
    json: Json = False,
) -> Answer:
    """Choose what every layer keeps and recomputes, so that the step fits and takes the least time. No GPU, no weights.

    Exit code 3 where nothing fits: the message has the least possible peak, what holds it up, and what helps.
    """
    from lowtide.cli.estimate_cmd import _processes, _threads
    from lowtide.planning import write_plan
    from lowtide.prediction import read_profile
    from lowtide.training.config import load_config
    from lowtide.training.planned import plan_config
    from lowtide.units import parse_bytes

    limit_bytes = parse_bytes(limit)
    settings = load_config(config, set_).config
    processes = _processes(settings, nproc)
    threads = settings.launch.threads or _threads(processes)
    speeds = None if profile is None else read_profile(profile)
    found = plan_config(
        settings,
        limit_bytes,
        world_size=processes,
        rank=rank,
        device=device,
        threads=threads,
        profile=speeds,
        executor=executor,
        simulate=simulate,
    )
    if out is not None:
        write_plan(found, out)
    document = {"config": str(config), "out": None if out is None else str(out), **found.model_dump(mode="json")}
    return Answer(document, text=_text(str(config), found, out), json=json)


def _text(config: str, plan: Plan, out: Path | None) -> str:
    from lowtide.planning import plan_table
    from lowtide.units import format_bytes

    share = (plan.peak_bytes + plan.margin_bytes) / plan.limit_bytes
    lines = [
        f"{config} on {plan.device}, {plan.world_size} processes, limit {format_bytes(plan.limit_bytes)}",
        f"peak {format_bytes(plan.peak_bytes)}, {plan.peak_at}",
        f"margin {format_bytes(plan.margin_bytes)}; together {share:.1%} of the limit",
    ]
    if plan.simulated_peak_bytes is not None:
        lines.append(f"the whole step, simulated with this plan: peak {format_bytes(plan.simulated_peak_bytes)}")
    if plan.step_ms is not None:
        rate = "" if plan.tokens_per_s is None else f", {plan.tokens_per_s:,.0f} tokens/s"
        lines.append(f"step {plan.step_ms:,.1f} ms, of which recompute {plan.recompute_ms:,.2f} ms{rate}")
    if plan.fastest_ms < plan.recompute_ms:
        lines.append(f"no choice recomputes less than {plan.fastest_ms:,.2f} ms; that this one is best is not proven")
    lines += ["", plan_table(plan), "", *_comparison(plan)]
    if out is not None:
        lines += ["", f"written to {out}"]
    return "\n".join([*lines, "", "taken for granted:", *(f"- {text}" for text in plan.assumptions)])


def _comparison(plan: Plan) -> list[str]:
    from lowtide.units import format_bytes

    lines: list[str] = []
    for other in plan.others:
        verdict = "fits" if other.fits else "does not fit"
        speed = ""
        if plan.step_ms and other.step_ms:
            speed = f"; this plan runs at {other.step_ms / plan.step_ms:.1%} of its speed"
        lines.append(f"with policy {other.policy} the peak is {format_bytes(other.peak_bytes)}: {verdict}{speed}")
    return lines
