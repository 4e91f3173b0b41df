"""``lowtide train``: start the processes of a run, or be one of them."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json, Overrides

if TYPE_CHECKING:
    from lowtide.training.config import TrainConfig
    from lowtide.training.launch import LaunchResult
    from lowtide.training.summary import Summary

__all__ = ["train"]


def train(
    config: Annotated[Path, Parameter(help="The YAML file.")],
    /,
    *,
    set_: Overrides = (),
    nproc: Annotated[int | None, Parameter(help="Processes to start; default: one per GPU, else 2.")] = None,
    resume: Annotated[
        str | None,
        Parameter(help="'auto' (the newest run of the same run.name, or a fresh one) or the folder of a run."),
    ] = None,
    plan: Annotated[
        Path | None, Parameter(help="A plan file of `lowtide plan`, in the place of the config's policy.")
    ] = None,
    experiment_id: Annotated[str | None, Parameter(help="Name of the run's folder; default: made anew.")] = None,
    json: Json = False,
) -> Answer:
    """Train a model as a config says.

    Starts its own processes; under torchrun (torchrun ... -m lowtide train CONFIG) it is one of them.
    """
    from lowtide.training.config import load_config
    from lowtide.training.ids import check_experiment_id
    from lowtide.training.launch import launch, under_torchrun

    if plan is not None:
        set_ = (*set_, f"policy={{kind: plan, path: {_quoted(str(plan))}}}")
    if under_torchrun():
        return _rank(config, set_, resume, experiment_id, json=json)
    settings = load_config(config, set_).config
    if experiment_id is not None:
        check_experiment_id(experiment_id)
    arguments = ["train", str(config), *(part for text in set_ for part in ("--set", text))]
    arguments += ["--resume", resume] if resume is not None else []
    arguments += ["--experiment-id", experiment_id] if experiment_id is not None else []
    arguments += ["--json"] if json else []
    result = launch(arguments, nproc=_processes(settings, nproc), threads=settings.launch.threads)
    return _answer(result, json=json)


def _processes(settings: TrainConfig, nproc: int | None) -> int | None:
    """Return how many processes are wanted; None leaves it to the machine."""
    wanted = settings.launch.nproc if nproc is None else nproc
    return 1 if wanted is None and settings.sharding.kind == "none" else wanted


def _rank(
    config: Path, overrides: tuple[str, ...], resume: str | None, experiment_id: str | None, *, json: bool
) -> Answer:
    """Be one rank: under lowtide's launcher it only reports, elsewhere rank 0 gives the answer itself."""
    from lowtide.training.mesh import read_place
    from lowtide.training.rank_status import run_rank, under_launcher

    # Before torch comes: its profiler, which measures peak bytes, else prints marks between the user's lines.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    done: list[Summary] = []

    def main() -> None:
        from lowtide.training.config import load_config
        from lowtide.training.entry import run

        done.append(run(load_config(config, overrides), experiment_id, resume=resume, json_output=json))

    exit_code = run_rank(main)
    if under_launcher() or read_place().rank != 0:
        return Answer(None, text="", exit_code=exit_code)
    summary = done[0].as_json() if done else None
    folder = done[0].folder if done else None
    document = {"exit_code": exit_code, "run_folder": folder, "summary": summary}
    return Answer(document, text="", json=json, exit_code=exit_code)


def _answer(result: LaunchResult, *, json: bool) -> Answer:
    from lowtide.errors import InputError
    from lowtide.system.run_state import read_run

    result.report(sys.stderr)
    summary: Any = None
    if result.run_folder is not None and result.exit_code == 0:
        with contextlib.suppress(InputError):
            summary = read_run(result.run_folder).record.get("summary")
    document = {
        "exit_code": result.exit_code,
        "status": result.verdict.status,
        "error": result.verdict.error,
        "run_folder": None if result.run_folder is None else str(result.run_folder),
        "summary": summary,
    }
    return Answer(document, text="", json=json, exit_code=result.exit_code)


def _quoted(text: str) -> str:
    """Write text so that YAML reads it as it is."""
    import json

    return json.dumps(text, ensure_ascii=False)
