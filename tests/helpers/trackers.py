"""Trackers of one's own, as a config names them: ``target: tests.helpers.trackers:Listing``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from lowtide.training.events import Event


class Listing:
    """Writes the names of events into a file."""

    class Config(BaseModel):
        file: str = "events.txt"

    def __init__(self, config: Config, *, run_folder: Path) -> None:
        self._path = run_folder / config.file

    def handle(self, event: Event) -> None:
        with self._path.open("a") as file:
            file.write(type(event).__name__ + "\n")

    def close(self) -> None:
        with self._path.open("a") as file:
            file.write("closed\n")


class FailsToStart:
    def __init__(self, *, run_folder: Path) -> None:
        raise ConnectionError("the service is away")


class NoTracker:
    def __init__(self, *, run_folder: Path) -> None:
        pass
