"""The command line: one thin file a verb, named ``<verb>_cmd.py`` and listed in ``VERBS``.

Nothing heavy is imported before the verb is known: ``lowtide --help`` stays under 0.3 s. Errors are told here and
nowhere else: one message on stderr, and the exit code of the error's class (2 for wrong input, see ``errors``).
Under ``--json`` stdout holds exactly one document, also when the verb fails; what else is printed goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.errors import LowtideError, UserError

if TYPE_CHECKING:
    from cyclopts import App

    from lowtide.cli._answer import Answer

__all__ = ["VERBS", "main"]

VERBS: dict[str, tuple[str, str]] = {
    "train": ("lowtide.cli.train_cmd:train", "Train a model as a config says."),
    "estimate": ("lowtide.cli.estimate_cmd:estimate", "Say what a training step will need, before it runs."),
    "inspect": ("lowtide.cli.inspect_cmd:inspect", "Say what a policy keeps for backward, tensor by tensor, and why."),
    "plan": ("lowtide.cli.plan_cmd:plan", "Choose what to keep and what to recompute under a memory limit."),
    "calibrate": ("lowtide.cli.calibrate_cmd:calibrate", "Measure how fast this machine's device is."),
    "profile": ("lowtide.cli.profile_cmd:profile", "Say where the time and the memory of a step go."),
    "sweep": ("lowtide.cli.sweep_cmd:sweep", "Run a grid of trainings; one that fails costs no other."),
    "report": ("lowtide.cli.report_cmd:report", "Make one page of what runs and sweeps left behind."),
    "config": ("lowtide.cli.config_cmd:app", "Check or show a config, or print what one may hold."),
    "doctor": ("lowtide.cli.doctor_cmd:doctor", "Say what is here, what is missing, and whether training can run."),
}
"""Each verb, the function or app that carries it out, and its line in the help."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    exit_code = run(sys.argv[1:] if arguments is None else arguments)
    if "RANK" in os.environ and "torch" in sys.modules:
        # One rank of several, and all is written: threads of the profiler and of gloo that still wait may abort the
        # process while Python takes itself apart ("terminate called", seen in torch 2.13), which fails the whole job.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line, print what it says, and return its exit code."""
    as_json = "--json" in arguments
    try:
        # What libraries print is not the document.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            answer = _call(arguments)
    except LowtideError as error:
        return _fail(error, as_json=as_json)
    except KeyboardInterrupt:
        return _fail(LowtideError("interrupted"), as_json=as_json)
    except Exception as error:
        traceback.print_exc()
        return _fail(LowtideError(f"a fault of lowtide's own: {type(error).__name__}: {error}"), as_json=as_json)
    _print(answer.printed())
    return answer.exit_code


def _call(arguments: Sequence[str]) -> Answer:
    from cyclopts import CycloptsError

    from lowtide.cli._answer import Answer

    try:
        answer = _app()(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise UserError(f"{error} See lowtide --help.") from None
    return answer if isinstance(answer, Answer) else Answer(None, text="")


def _app() -> App:
    from cyclopts import App

    from lowtide import __version__

    app = App(
        name="lowtide",
        help="Trains PyTorch models whose activations do not fit, and says what that costs.",
        version=f"lowtide {__version__}",
        suppress_keyboard_interrupt=False,
    )
    for verb, (where, line) in VERBS.items():
        app.command(where, name=verb, help=line)
    return app


def _fail(error: LowtideError, *, as_json: bool) -> int:
    print(f"lowtide: {error}", file=sys.stderr)  # noqa: T201 - the one place that tells errors
    if as_json:
        from lowtide.cli._answer import strict_json

        said = {"kind": type(error).__name__, "message": str(error)}
        _print(strict_json({"error": said, "exit_code": error.exit_code}))
    return error.exit_code


def _print(text: str) -> None:
    if not text:
        return
    try:
        print(text, flush=True)  # noqa: T201 - the one place that writes a verb's answer
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; without this Python complains once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
