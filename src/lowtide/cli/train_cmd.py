"""``lowtide train``: start the processes of a run, or be one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lowtide.cli._answer import Answer, Json, Overrides

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
    experiment_id: Annotated[str | None, Parameter(help="Name of the run's folder; default: made anew.")] = None,
    json: Json = False,
) -> Answer:
    """Train a model as a config says.

    Starts its own processes; under torchrun (torchrun ... -m lowtide train CONFIG) it is one of them.
    """
    from lowtide.training.config import load_config
    from lowtide.training.launch import launch, under_torchrun

    if under_torchrun():
        return _rank(config, set_, resume, experiment_id, json=json)
    loaded = load_config(config, set_)
    if experiment_id is not None:
        from lowtide.training.ids import check_experiment_id

        check_experiment_id(experiment_id)
    arguments = ["train", str(config), *(part for text in set_ for part in ("--set", text))]
    arguments += ["--resume", resume] if resume is not None else []
    arguments += ["--experiment-id", experiment_id] if experiment_id is not None else []
    arguments += ["--json"] if json else []
    wanted = loaded.config.launch.nproc if nproc is None else nproc
    if wanted is None and loaded.config.sharding.kind == "none":
        wanted = 1
    result = launch(arguments, nproc=wanted, threads=loaded.config.launch.threads)
    return _answer(result, json=json)


def _rank(
    config: Path, overrides: tuple[str, ...], resume: str | None, experiment_id: str | None, *, json: bool
) -> Answer:
    """Be one rank; what it has to say goes to the launcher, or to stderr where there is none."""
    from lowtide.training.rank_status import run_rank

    def main() -> None:
        from lowtide.training.config import load_config
        from lowtide.training.entry import run

        run(load_config(config, overrides), experiment_id, resume=resume, json_output=json)

    return Answer(None, text="", exit_code=run_rank(main))


def _answer(result: object, *, json: bool) -> Answer:
    import sys

    from lowtide.training.launch import LaunchResult
    from lowtide.training.run_state import read_run

    assert isinstance(result, LaunchResult)
    result.report(sys.stderr)
    record = {} if result.run_folder is None else dict(read_run(result.run_folder).record)
    document = {
        "exit_code": result.exit_code,
        "status": result.verdict.status,
        "error": result.verdict.error,
        "run_folder": None if result.run_folder is None else str(result.run_folder),
        "summary": record.get("summary"),
    }
    return Answer(document, text="", json=json, exit_code=result.exit_code)
