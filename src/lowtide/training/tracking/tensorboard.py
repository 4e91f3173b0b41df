"""TensorBoard event files. Importing the writer takes seconds: only a run that wants it pays for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowtide.errors import ConfigError
from lowtide.training.events import EvaluationDone, Event, RunEnded, RunStarted, StepDone
from lowtide.training.tracking.scalars import STEP_SCALARS, as_number

__all__ = ["TensorBoard"]


class TensorBoard:
    """The subscriber.

    Raises:
        ConfigError: the package ``tensorboard`` is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "the tracker tensorboard needs the package tensorboard, which is not installed: "
                "pip install 'lowtide[tensorboard]', or leave it out of logging.trackers"
            ) from error
        self._directory = directory
        self._make = SummaryWriter
        self._writer: Any = None

    def handle(self, event: Event) -> None:
        """Write the scalars of steps under train/ and of evaluations under evaluation/."""
        if isinstance(event, RunStarted):
            # Steps that are about to be done again are hidden by the viewer.
            purge = event.start_step + 1 if event.start_step else None
            self._writer = self._make(str(self._directory), purge_step=purge)
            self._writer.add_text("experiment_id", event.experiment_id)
        elif isinstance(event, StepDone):
            self._write("train", event.step, {**{n: getattr(event, n) for n in STEP_SCALARS}, **event.extra})
        elif isinstance(event, EvaluationDone):
            self._write("evaluation", event.step, {"loss": event.loss, **event.extra})
            self._writer.flush()
        elif isinstance(event, RunEnded) and self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write out what is buffered and close."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, group: str, step: int, values: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = self._make(str(self._directory))
        for name, value in values.items():
            number = as_number(value)
            if number is not None:
                self._writer.add_scalar(f"{group}/{name}", number, step)
