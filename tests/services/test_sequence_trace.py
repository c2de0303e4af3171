"""The times that a sequence's trace is made of, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engine.slots import Slot
from engine.step import PassKind, Row
from outrider.service.step_spans import EventRecord, SpanRecord, Value
from tests.services.sequences import target_sequence
from verifier_service import sequence_trace
from verifier_service.sequence_trace import SequenceTrace
from verifier_service.step import Scheduled, Step

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def time_ns(self) -> int:
        return self.now * MS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sequence_trace, "time", clock)
    return clock


def part(num_new: int = 1, num_drafts: int = 0) -> Scheduled:
    sequence = target_sequence()
    row = Row(Slot(0), sequence.sampling, sequence.block_ids, 0, [0] * num_new)
    return Scheduled(sequence, row, num_new, num_drafts, True)


def step(start: int, end: int, *parts: Scheduled) -> Step:
    return Step(parts, PassKind.GRAPH, start * MS, end * MS)


def verified(
    trace: SequenceTrace, done: Step, mine: Scheduled, *, position: int = 9, accepted: int = 0, wait: float = 0.0
) -> Mapping[str, Value]:
    """The attributes of the span that the step led to."""
    trace.verified(
        done,
        mine,
        position=position,
        num_accepted=accepted,
        draft_wait_seconds=wait,
        draft_bytes=7 * mine.num_drafts,
    )
    span = trace.drain()[-1]
    assert isinstance(span, SpanRecord)
    assert (span.name, span.start_ns, span.end_ns) == ("verify_step", done.start_ns, done.end_ns)
    return {key.removeprefix("outrider."): value for key, value in span.attributes.items()}


def prefilled(trace: SequenceTrace, end: int = 100) -> None:
    prompt = part(4)
    trace.prefilled(step(end - 10, end, prompt), prompt, 0, 4)
    trace.drain()


def test_a_step_without_a_draft_waits_for_its_turn_from_the_end_of_the_last_one(clock: Clock) -> None:
    trace = SequenceTrace(8)
    prefilled(trace, 100)
    numbers = verified(trace, step(130, 150, part(), part(20)), part())
    assert numbers["turn_wait_seconds"] == pytest.approx(0.03)
    assert (numbers["draft_wait_seconds"], numbers["batch_size"], numbers["num_other_prefill_tokens"]) == (0, 2, 20)
    assert "draft_seconds" not in numbers
    assert verified(trace, step(155, 160, part()), part())["turn_wait_seconds"] == pytest.approx(0.005)


def test_a_step_with_a_draft_waits_for_its_turn_from_the_drafts_on(clock: Clock) -> None:
    trace = SequenceTrace(8)
    prefilled(trace, 100)
    clock.now = 140
    trace.drafted(0.025)
    numbers = verified(trace, step(145, 150, part(1, 4)), part(1, 4), accepted=2, wait=0.04)
    expected = {"draft_wait_seconds": 0.04, "draft_seconds": 0.025, "wire_seconds": 0.015, "turn_wait_seconds": 0.005}
    assert {key: numbers[key] for key in expected} == pytest.approx(expected)
    assert (numbers["rejected_position"], numbers["draft_bytes"]) == (11, 28)
    # What the drafter did for this step says nothing about the next.
    clock.now = 170
    trace.drafted(0.001)
    assert verified(trace, step(170, 180, part(1, 4)), part(1, 4), accepted=4, wait=0.02)["draft_seconds"] == 0.001


def test_a_drafter_that_began_early_is_not_counted_beyond_the_wait(clock: Clock) -> None:
    trace = SequenceTrace(8)
    prefilled(trace, 100)
    clock.now = 110
    trace.drafted(5.0)
    numbers = verified(trace, step(110, 120, part(1, 4)), part(1, 4), wait=0.01)
    assert (numbers["draft_seconds"], numbers["wire_seconds"]) == (0.01, 0.0)


def test_a_wait_that_was_given_up_is_an_event_and_no_turn(clock: Clock) -> None:
    trace = SequenceTrace(8)
    prefilled(trace, 100)
    clock.now = 600
    trace.draft_is_late(0.5, 9)
    trace.verified(step(603, 610, part()), part(), position=9, num_accepted=0, draft_wait_seconds=0.5, draft_bytes=0)
    late, span = trace.drain()
    assert isinstance(late, EventRecord)
    assert (late.name, late.time_ns) == ("outrider.draft_late", 600 * MS)
    assert span.attributes["outrider.turn_wait_seconds"] == pytest.approx(0.003)


def test_a_prompt_in_chunks_tells_what_it_waited_for() -> None:
    trace = SequenceTrace(8)
    mine = part(30)
    trace.computed_chunk(step(10, 20, mine, part(50)), mine)
    trace.prefilled(step(40, 55, mine, part()), mine, 5 * MS, 60)
    (span,) = trace.drain()
    assert isinstance(span, SpanRecord)
    assert (span.name, span.start_ns, span.end_ns) == ("prefill", 5 * MS, 55 * MS)
    assert span.attributes == {
        "outrider.num_prompt_tokens": 60,
        "outrider.num_chunks": 2,
        "outrider.busy_seconds": pytest.approx(0.025),
        "outrider.num_other_prefill_tokens": 50,
        "outrider.batch_size": 2,
    }


def test_a_preempted_sequence(clock: Clock) -> None:
    trace = SequenceTrace(8)
    prefilled(trace, 100)
    clock.now = 110
    trace.preempted(12, 13)
    clock.now = 150
    trace.resumed()
    mine = part(6)
    trace.computed_chunk(step(151, 160, mine), mine)
    trace.verified(step(170, 180, mine), mine, position=13, num_accepted=0, draft_wait_seconds=0.0, draft_bytes=0)
    event, away, again, span = trace.drain()
    assert (event.name, event.attributes["outrider.num_lost_tokens"]) == ("outrider.preempted", 12)
    assert isinstance(away, SpanRecord)
    assert isinstance(again, SpanRecord)
    assert (away.name, away.start_ns, away.end_ns) == ("preempted", 110 * MS, 150 * MS)
    assert (again.name, again.start_ns, again.end_ns) == ("recompute", 150 * MS, 170 * MS)
    assert span.attributes["outrider.turn_wait_seconds"] == 0.0, "that time is in the spans before"
    clock.now = 200
    assert verified(trace, step(190, 200, part()), part())["turn_wait_seconds"] == pytest.approx(0.01)
