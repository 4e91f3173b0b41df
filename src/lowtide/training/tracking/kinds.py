"""The configs of the built-in trackers. Torch-free: what a tracker needs is imported when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from lowtide.training.events import Subscriber
from lowtide.training.registry import Component, register

__all__ = ["ConsoleConfig", "JsonlConfig", "TensorBoardConfig", "WandbConfig"]


@register("tracker", "console")
class ConsoleConfig(Component):
    """Progress for a person: a live view on a terminal, one plain line now and then elsewhere."""

    kind: Literal["console"] = "console"

    stream: Literal["stdout", "stderr"] = "stdout"
    """Where progress goes. With ``--json`` it is always stderr, since stdout then holds one document only."""

    every_s: float = Field(default=10.0, ge=0)
    """Seconds between two plain lines where the stream is no terminal; 0 writes a line for every step."""

    def build(self, run_folder: Path) -> Subscriber:
        """Make the subscriber."""
        from lowtide.training.tracking.console import Console

        return Console(self)


@register("tracker", "jsonl")
class JsonlConfig(Component):
    """One JSON record a line: metrics.jsonl and evaluation.jsonl in the run folder."""

    kind: Literal["jsonl"] = "jsonl"

    def build(self, run_folder: Path) -> Subscriber:
        """Make the subscriber."""
        from lowtide.training.tracking.jsonl import JsonLines

        return JsonLines(run_folder)


@register("tracker", "tensorboard")
class TensorBoardConfig(Component):
    """TensorBoard event files; needs ``pip install 'lowtide[tensorboard]'``."""

    kind: Literal["tensorboard"] = "tensorboard"

    directory: str = "tensorboard"
    """The folder of the event files, relative to the run folder."""

    def build(self, run_folder: Path) -> Subscriber:
        """Make the subscriber."""
        from lowtide.training.tracking.tensorboard import TensorBoard

        return TensorBoard(run_folder / self.directory)


@register("tracker", "wandb")
class WandbConfig(Component):
    """Weights & Biases; needs ``pip install 'lowtide[wandb]'``."""

    kind: Literal["wandb"] = "wandb"

    mode: Literal["offline", "online"] = "offline"
    """``offline`` writes into the run folder and needs no network or account (``wandb sync`` uploads later);
    ``online`` needs WANDB_API_KEY or a login made before, and never asks for one."""

    project: str = "lowtide"
    """The project that the run appears under."""

    entity: str | None = None
    """The user or team that owns the project; left out, the account's default."""

    group: str | None = None
    """Runs of one group are shown together."""

    tags: tuple[str, ...] = ()
    """Labels to search by."""

    wait_s: float = Field(default=60.0, gt=0)
    """The longest to wait for the service at the start, and again at the end for what is not uploaded yet."""

    def build(self, run_folder: Path) -> Subscriber:
        """Make the subscriber."""
        from lowtide.training.tracking.wandb import Wandb

        return Wandb(self, run_folder=run_folder)
