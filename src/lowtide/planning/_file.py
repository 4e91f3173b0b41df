"""Plan files: YAML that a person can review, strict when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lowtide.errors import InputError
from lowtide.plan_record import Plan, PlanLayers
from lowtide.units import format_bytes

__all__ = ["plan_table", "plan_text", "read_plan", "write_plan"]


def plan_table(plan: Plan) -> str:
    """Return a table of what the layers do, for people."""
    lines = [("layers", "what they keep", "a layer", "recompute")]
    for choice in plan.choices:
        lines.append(
            (
                ", ".join(choice.layers),
                _kept(choice),
                format_bytes(choice.saved_bytes),
                f"{choice.recompute_ms:.3f} ms",
            )
        )
    lines.append(("all", f"executor {plan.executor}", format_bytes(plan.saved_bytes), f"{plan.recompute_ms:.3f} ms"))
    lines += [
        (f"  ({other.policy})", "fits" if other.fits else "does not fit: peak " + format_bytes(other.peak_bytes),
         format_bytes(other.saved_bytes), f"{other.recompute_ms:.3f} ms")
        for other in plan.others
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c.rjust(widths[2])}  {d.rjust(widths[3])}"
        for a, b, c, d in lines
    )


def _kept(choice: PlanLayers) -> str:
    if not choice.region:
        return "everything (no region)"
    saved = ", ".join(f"{_short(op)} {','.join(map(str, calls))}" for op, calls in choice.save.items())
    return saved or "inputs only"


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")


def plan_text(plan: Plan) -> str:
    """Write a plan as YAML, with its table as comments at the top."""
    head = [
        f"A plan of lowtide for {format_bytes(plan.limit_bytes)} on {plan.device}, {plan.world_size} processes.",
        f"Predicted peak {format_bytes(plan.peak_bytes)}, {plan.peak_at}; margin {format_bytes(plan.margin_bytes)}.",
        "",
        *plan_table(plan).splitlines(),
    ]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in head)
    # By way of JSON: plain lists and mappings, in the record's order.
    return comments + yaml.safe_dump(json.loads(plan.to_json()), sort_keys=False, width=110, default_flow_style=None)


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan file."""
    path.write_text(plan_text(plan), encoding="utf-8")


def read_plan(path: Path) -> Plan:
    """Read a plan file, YAML or JSON.

    Raises:
        InputError: there is no such file, or it holds no plan of this version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"plan {path}: cannot be read: {error}") from None
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise InputError(f"plan {path}: it holds YAML aliases, which a plan never does")
        document: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"plan {path}: no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(document, dict):
        raise InputError(
            f"plan {path}: it holds no mapping; `lowtide plan CONFIG --limit 80GiB --out {path}` writes one"
        )
    try:
        return Plan.from_json(json.dumps(document))
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"plan {path}: {error}") from None
