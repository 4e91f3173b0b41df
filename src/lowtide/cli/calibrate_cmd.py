"""``lowtide calibrate``: measure this machine's device into a file that estimates and plans read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json

if TYPE_CHECKING:
    from lowtide.prediction import DeviceProfile

__all__ = ["calibrate"]


def calibrate(
    *,
    out: Annotated[Path, Parameter(help="The file to write.")] = Path("device-profile.json"),
    device: Annotated[
        Literal["cpu", "cuda"] | None, Parameter(help="Default: a GPU where torch can use one, else the CPU.")
    ] = None,
    threads: Annotated[int | None, Parameter(help="CPU threads to compute with; default: torch's.")] = None,
    json: Json = False,
) -> Answer:
    """Measure how fast this machine's device is, in under a minute; nothing else should run meanwhile.

    Products, attention, memory and launches; started by torchrun with several processes also the collectives between
    them (gloo on a CPU, NCCL on GPUs), and rank 0 writes the file.
    """
    import os

    import torch

    from lowtide.measurement import calibrate as measure
    from lowtide.system.files import write_text
    from lowtide.training.launch import under_torchrun

    if threads is not None:
        torch.set_num_threads(threads)
    if under_torchrun():
        profile = _between_ranks(device)
    else:
        profile = measure(device)
    if os.environ.get("RANK", "0") != "0":
        return Answer(None, text="")
    write_text(out, profile.to_json(indent=1) + "\n")
    return Answer({"path": str(out), **profile.model_dump(mode="json")}, text=_text(profile, out), json=json)


def _between_ranks(device: Literal["cpu", "cuda"] | None) -> DeviceProfile:
    from lowtide.measurement import calibrate as measure
    from lowtide.training.mesh import process_group

    with process_group(device=device or "auto") as world:
        return measure(world.device)


def _text(profile: DeviceProfile, out: Path) -> str:
    lines = [f"{profile.device}, {profile.threads} thread(s), measured in {profile.seconds:.0f} s", ""]
    kinds = dict.fromkeys(p.operators for p in profile.rates)
    for kind in kinds:
        for dtype in ("float32", "bfloat16"):
            rates = [p.per_s for p in profile.rates if p.operators == kind and p.dtype == dtype]
            if rates:
                unit = "GFLOP/s" if kind in ("matmul", "attention", "attention_backward") else "GB/s"
                spread = f"{min(rates) / 1e9:,.1f} to {max(rates) / 1e9:,.1f}"
                lines.append(f"{kind.replace('_', ' '):20}{dtype:10}{spread:>22} {unit}")
    lines += ["", f"an operator {profile.operator_us:.1f} us, a view {profile.view_us:.1f} us"]
    rows: list[Any] = [p for p in profile.collectives if p.nbytes == max(q.nbytes for q in profile.collectives)]
    lines += [f"{p.collective} of {p.nbytes:,} bytes over {p.ranks} ranks: {p.ms:.2f} ms" for p in rows]
    return "\n".join([*lines, "", f"written to {out}: give it to `lowtide estimate --profile {out}`"])
