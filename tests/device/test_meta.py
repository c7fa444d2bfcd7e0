"""The meta device tells what a machine would take, and leaves out what only repeats."""

from __future__ import annotations

from dataclasses import dataclass

from harmony_ds.device.meta import MetaDevice


@dataclass
class FakeClock:
    """A clock that a test sets."""

    ms: float = 0.0
    issued_ms: float = 0.0


def test_equal_parts_take_the_time_of_the_second_and_are_not_run() -> None:
    clock = FakeClock()
    run = []
    for number in MetaDevice(clock).parts_to_run([8, 8, 8, 8, 7, 7, 5]):
        run.append(number)
        clock.ms += 10.0 if number == 0 else number
        clock.issued_ms += 1.0

    assert run == [0, 1, 4, 5, 6]
    assert clock.ms == 10 + 3 * 1 + 4 + 5 + 6
    assert clock.issued_ms == 7


def test_no_parts_take_no_time() -> None:
    clock = FakeClock()
    assert [*MetaDevice(clock).parts_to_run([])] == []
    assert clock == FakeClock()
