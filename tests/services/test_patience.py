"""How long a sequence waits for its drafter, on fast machines and on slow ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from verifier_service.patience import LEAST_SECONDS, MOST_SECONDS, WAITS_UNTIL_LOST, Patience, UsualTime


def patience(round_trips: Sequence[float], *, step: float | None = None, fixed: float | None = None) -> Patience:
    steps = UsualTime()
    if step is not None:
        steps.add(step)
    made = Patience(steps, fixed)
    for seconds in round_trips:
        made.answered(seconds)
    return made


@pytest.mark.parametrize(
    ("step", "round_trips", "least", "most"),
    [
        # A GPU: nothing that is measured there changes the half second.
        (0.01, [], LEAST_SECONDS, LEAST_SECONDS),
        (0.01, [0.01] * 20, LEAST_SECONDS, LEAST_SECONDS),
        # Nor does a drafter far slower than the target: more patience would cost more than it can bring.
        (0.01, [0.8] * 20, LEAST_SECONDS, LEAST_SECONDS),
        # A slow machine: until something was measured, as long as can be worth it.
        (0.3, [], 3.0, 3.0),
        (0.3, [0.2] * 50, LEAST_SECONDS, LEAST_SECONDS),
        # Round trips that are long, and steady or not.
        (0.4, [1.0] * 50, 1.0, 1.1),
        (0.4, [0.5, 1.5] * 25, 2.5, 3.5),
        (0.4, [1.0] * 50 + [3.0], 3.0, 3.5),
        # Never longer than the limits.
        (0.4, [30.0] * 20, 4.0, 4.0),
        (60.0, [60.0] * 20, MOST_SECONDS, MOST_SECONDS),
        (60.0, [], MOST_SECONDS, MOST_SECONDS),
        (None, [], LEAST_SECONDS, LEAST_SECONDS),
    ],
)
def test_how_long_a_sequence_waits(step: float | None, round_trips: list[float], least: float, most: float) -> None:
    assert least <= patience(round_trips, step=step).seconds <= most + 1e-9


def test_one_stall_is_forgotten() -> None:
    """Catches a single bad moment of the machine after which every lost answer costs seconds."""
    assert patience([0.2] * 20 + [5.0], step=1.0).seconds > 3.0
    assert patience([0.2] * 20 + [5.0] + [0.2] * 40, step=1.0).seconds < 2 * LEAST_SECONDS


def test_a_silence_is_a_loss_only_after_many_waits() -> None:
    """Catches one stall on a slow machine that takes the drafter away for the rest of every answer."""
    assert patience([0.02] * 20, step=0.01).seconds_until_lost == WAITS_UNTIL_LOST * LEAST_SECONDS


@pytest.mark.parametrize("round_trips", [[], [5.0] * 20])
def test_a_time_that_was_set_stands(round_trips: list[float]) -> None:
    fixed = patience(round_trips, step=3.0, fixed=0.2)
    assert fixed.seconds == fixed.seconds_until_lost == 0.2
