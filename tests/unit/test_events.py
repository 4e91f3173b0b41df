"""The bus: a subscriber that fails is reported once and dropped, and training goes on."""

from __future__ import annotations

import logging

import pytest

from lowtide.training.events import Bus, Event, Message, RunEnded, StepDone, Subscriber


class Keeper:
    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.closed = 0

    def handle(self, event: Event) -> None:
        self.seen.append(event)

    def close(self) -> None:
        self.closed += 1

    @property
    def warnings(self) -> list[str]:
        return [e.text for e in self.seen if isinstance(e, Message) and e.level == "warning"]


class Failing(Keeper):
    def __init__(self, error: BaseException, *, also_closing: bool = False) -> None:
        super().__init__()
        self.error = error
        self.also_closing = also_closing

    def handle(self, event: Event) -> None:
        super().handle(event)
        raise self.error

    def close(self) -> None:
        super().close()
        if self.also_closing:
            raise self.error


class OddError(BaseException):
    def __str__(self) -> str:
        raise ValueError("no text either")


STEP = StepDone(step=1, loss=2.0)


def test_events_arrive_in_order_at_everyone():
    bus, one, two = Bus(), Keeper(), Keeper()
    bus.subscribe(one)
    bus.subscribe(two)
    events = [STEP, StepDone(step=2, loss=1.0), RunEnded(status="done", steps=2)]
    for event in events:
        bus.publish(event)
    assert one.seen == two.seen == events
    assert isinstance(one, Subscriber)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "error", [ValueError("full disk"), MemoryError(), GeneratorExit(), OddError()], ids=lambda e: type(e).__name__
)
def test_one_that_fails_is_reported_once_closed_and_dropped(place, error):
    bus, keepers, failing = Bus(), [Keeper(), Keeper()], Failing(error)
    order: list[Keeper] = list(keepers)
    order.insert(place, failing)
    for subscriber in order:
        bus.subscribe(subscriber, name="mine" if subscriber is failing else None)
    for _ in range(3):
        bus.publish(STEP)
    assert failing.seen == [STEP]
    assert failing.closed == 1
    for keeper in keepers:
        assert len(keeper.warnings) == 1
        assert "the tracker mine failed on StepDone" in keeper.warnings[0]
        assert type(error).__name__ in keeper.warnings[0]
        assert [e for e in keeper.seen if e is STEP] == [STEP] * 3
    assert bus.names == ("Keeper", "Keeper")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_meant_for_the_process_passes(kind):
    bus = Bus()
    bus.subscribe(Failing(kind()))
    with pytest.raises(kind):
        bus.publish(STEP)


def test_all_failing_at_once_ends_on_stderr_and_in_the_log(capsys, caplog):
    bus = Bus()
    bus.subscribe(Failing(ValueError("a"), also_closing=True), name="one")
    bus.subscribe(Failing(ValueError("b"), also_closing=True), name="two")
    with caplog.at_level(logging.WARNING, "lowtide"):
        bus.publish(STEP)
        bus.publish(STEP)
    assert bus.names == ()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert any("tracker one" in text for text in told)
    assert any("tracker two" in text for text in told)
    assert "tracker" in capsys.readouterr().err


def test_closing_closes_all_once_the_last_first_and_reports_failures():
    bus, keeper, failing = Bus(), Keeper(), Failing(OSError("no space"), also_closing=True)
    bus.subscribe(keeper)
    bus.subscribe(failing, name="mine")
    bus.close()
    bus.close()
    assert (keeper.closed, failing.closed) == (1, 1)
    assert keeper.warnings == ["the tracker mine failed while closing: OSError: no space"]


def test_a_bus_without_subscribers_takes_events(capsys):
    Bus().publish(STEP)
    Bus().close()
    assert capsys.readouterr().err == ""


def test_events_cannot_be_changed():
    with pytest.raises(AttributeError):
        STEP.step = 2  # type: ignore[misc]
