"""Weights & Biases, so that it can neither prompt nor hang a run.

Offline by default: everything goes into the run folder, nothing waits for a network. Online needs a key that
is there already (WANDB_API_KEY or a login's netrc entry); without one it is an error at once, where wandb
would ask on the terminal. Starting is bounded by ``init_timeout``; finishing by ``finish_timeout`` where
wandb has it, and anyway by doing it on a thread that is not waited for longer than ``wait_s``. Checked with
wandb 0.31.
"""

from __future__ import annotations

import netrc
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import ConfigError
from lowtide.training.events import EvaluationDone, Event, RunEnded, RunStarted, StepDone
from lowtide.training.tracking.scalars import STEP_SCALARS, as_number, strict

if TYPE_CHECKING:
    from lowtide.training.tracking.kinds import WandbConfig

__all__ = ["Wandb"]


class Wandb:
    """The subscriber.

    Raises:
        ConfigError: the package is not installed, or ``online`` without a key.
    """

    def __init__(self, config: WandbConfig, *, run_folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "the tracker wandb needs the package wandb, which is not installed: "
                "pip install 'lowtide[wandb]', or leave it out of logging.trackers"
            ) from error
        if config.mode == "online" and not _has_key(os.environ):
            raise ConfigError(
                "the tracker wandb is online but there is no key: set WANDB_API_KEY, run `wandb login` once, "
                "or use mode: offline"
            )
        self._wandb: Any = wandb
        self._config = config
        self._folder = run_folder
        self._run: Any = None
        self._failed = False

    def handle(self, event: Event) -> None:
        """Start the run, log steps and evaluations, note how it ended."""
        if isinstance(event, RunStarted):
            self._start(event)
        elif self._run is None:
            return
        elif isinstance(event, StepDone):
            self._log("train", event.step, {**{n: getattr(event, n) for n in STEP_SCALARS}, **event.extra})
        elif isinstance(event, EvaluationDone):
            self._log("evaluation", event.step, {"loss": event.loss, **event.extra})
        elif isinstance(event, RunEnded):
            self._failed = event.status != "done"
            self._run.summary.update({"status": event.status, **_numbers(event.summary)})

    def close(self) -> None:
        """Finish, waiting no longer than ``wait_s``."""
        if self._run is None:
            return
        run, self._run = self._run, None
        code = 1 if self._failed else 0
        done = threading.Event()

        def finish() -> None:
            try:
                run.finish(exit_code=code)
            finally:
                done.set()

        threading.Thread(target=finish, name="wandb-finish", daemon=True).start()
        if not done.wait(self._config.wait_s + 5):
            raise TimeoutError(
                f"not everything was uploaded within {self._config.wait_s:g} s; `wandb sync` sends the rest"
            )

    def _start(self, event: RunStarted) -> None:
        config = self._config
        self._run = self._wandb.init(
            mode=config.mode,
            dir=str(self._folder),
            id=event.experiment_id,
            name=event.experiment_id,
            # "allow" asks the service; offline there is nobody to ask and wandb would warn.
            resume="allow" if config.mode == "online" else None,
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=list(config.tags),
            config=strict(event.resolved)[0],
            settings=self._settings(),
        )
        # Steps come twice after a resume; wandb's own step must only grow, so ours is a metric like others.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _settings(self) -> Any:
        wanted = {
            "init_timeout": self._config.wait_s,
            "finish_timeout": self._config.wait_s,
            "login_timeout": self._config.wait_s,
            "console": "off",
            "silent": True,
            "disable_code": True,
            "disable_git": True,
        }
        known = getattr(self._wandb.Settings, "model_fields", wanted)
        return self._wandb.Settings(**{name: value for name, value in wanted.items() if name in known})

    def _log(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **{f"{group}/{n}": v for n, v in _numbers(values).items()}})


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: number for name, value in values.items() if (number := as_number(value)) is not None}


def _has_key(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    host = environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
