"""From the list of trackers in a config to a bus.

A tracker that the user cannot have meant (an extra that is not installed, a class that cannot be imported, a
file that another run writes) is an error before training starts. One that merely fails to start, such as a
service that cannot be reached, is reported like any other failing subscriber, and the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lowtide.errors import ConfigError, UserError
from lowtide.training.events import Bus, Subscriber
from lowtide.training.registry import Builder, Component
from lowtide.training.tracking.kinds import ConsoleConfig

__all__ = ["build_bus"]


def build_bus(
    trackers: Iterable[Component],
    *,
    run_folder: Path,
    json_output: bool = False,
    builder: Builder | None = None,
) -> Bus:
    """Build every tracker and subscribe it; with ``json_output`` the console writes to stderr.

    Call it on rank 0 only; the other ranks use a ``Bus()`` without subscribers.

    Raises:
        UserError: a tracker that cannot be built as configured.
    """
    maker = builder or Builder()
    bus = Bus()
    late: list[str] = []
    try:
        for component in trackers:
            used = component
            if json_output and isinstance(component, ConsoleConfig):
                used = component.model_copy(update={"stream": "stderr"})
            problem = _add(bus, maker, used, run_folder)
            if problem:
                late.append(problem)
    except BaseException:
        bus.close()
        raise
    for text in late:
        bus.warn(text)
    return bus


def _add(bus: Bus, maker: Builder, component: Component, run_folder: Path) -> str | None:
    """Subscribe one tracker, or say why it is left out."""
    name = _name(component)
    try:
        made = maker.build(component, run_folder=run_folder)
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:
        return f"the tracker {name} could not start and is left out: {type(error).__name__}: {error}"
    if not isinstance(made, Subscriber):
        raise ConfigError(
            f"the tracker {name} made a {type(made).__name__}, which has no handle(event) and close(); "
            f"lowtide.training.events.Subscriber says what a tracker must have"
        )
    bus.subscribe(made, name=name)
    return None


def _name(component: Component) -> str:
    target = getattr(component, "target", None)
    return str(target or getattr(component, "kind", type(component).__name__))
