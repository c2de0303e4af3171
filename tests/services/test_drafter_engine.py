"""The drafter's engine with stand-ins for drafters: which verifier is told what, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from drafter_service.chain_drafter import ChainDrafter, chains
from drafter_service.drafter import Drafts
from drafter_service.engine import MAX_FAILURES_IN_A_ROW, DrafterEngine, DraftRecords, EngineOutput, SessionOutput
from drafter_service.metrics import DrafterMetrics
from drafter_service.scripted_drafter import ScriptedDrafter
from drafter_service.sequence import DraftSequence
from drafter_service.session import FrameArrived, SessionClosed, SessionOpened
from outrider.protocol.expansions import unpack_expansions
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.verdicts import Verdict, pack_verdicts
from outrider.protocol.wire import pack_tokens
from outrider.v1 import common_pb2, drafter_pb2

LIMITS = DraftLimits(max_draft_tokens=4, max_candidates=3, num_children=2, max_expansions=64)
REJECTION, COUPLED = common_pb2.VERIFICATION_REJECTION, common_pb2.VERIFICATION_COUPLED
SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def opening(sequence_id: int, tokens: Sequence[int] = (1, 2, 3), **fields: Any) -> drafter_pb2.OpenSequence:
    defaults: dict[str, Any] = {
        "token_ids": pack_tokens(tokens),
        "num_prompt_tokens": len(tokens),
        "sampling": common_pb2.SamplingParameters(temperature=1.0, seed=1),
        "verification": COUPLED,
        "max_draft_tokens": 4,
    }
    return drafter_pb2.OpenSequence(sequence_id=sequence_id, **(defaults | fields))


class Bench:
    """An engine, and what it has said to each session."""

    def __init__(
        self, drafter: ChainDrafter, num_sessions: int = 1, limits: DraftLimits = LIMITS, **fields: Any
    ) -> None:
        self.engine = DrafterEngine(drafter, **({"max_sequences": 16} | fields))
        self.records: list[Any] = []
        for session_id in range(1, num_sessions + 1):
            self.engine.handle(SessionOpened(session_id, limits))

    def tell(self, session_id: int, *verdicts: Verdict, **fields: Any) -> None:
        frame = drafter_pb2.DraftRequest(verdicts=pack_verdicts(verdicts), **fields)
        self.engine.handle(FrameArrived.of(session_id, frame))

    def step(self) -> dict[int, drafter_pb2.DraftResponse]:
        """The frames of one step, by session."""
        found: dict[int, drafter_pb2.DraftResponse] = {}

        def emit(output: EngineOutput) -> None:
            if isinstance(output, SessionOutput):
                assert output.session_id not in found, "two frames for one pass"
                found[output.session_id] = output.frame
            else:
                assert isinstance(output, DraftRecords)
                self.records += output.records

        self.pause = self.engine.step(emit)
        return found


def told(frame: drafter_pb2.DraftResponse, limits: DraftLimits = LIMITS) -> dict[int, list[list[int]]]:
    """By sequence, the children of its expansions."""
    found = {}
    for message in frame.expansions:
        expansions, errors = unpack_expansions(message, vocabulary_size=1000, limits=limits)
        assert not errors
        starts = (expansions.ends - expansions.num_expansions).tolist()
        for sequence_id, start, end in zip(expansions.sequence_ids, starts, expansions.ends.tolist(), strict=True):
            found[int(sequence_id)] = expansions.child_ids[start:end].tolist()
    return found


def count_up(token_ids: Sequence[int], most: int) -> Sequence[int]:
    """As many tokens as the first one says, each one above the one before."""
    return range(token_ids[-1] + 1, token_ids[-1] + 1 + min(token_ids[0], most))


def test_each_verifier_is_told_of_its_own_sequences_alone() -> None:
    """Catches expansions that reach another verifier, whose sequences may have the same ids."""
    bench = Bench(ScriptedDrafter(count_up), num_sessions=3)
    bench.tell(1, opens=[opening(7, [1, 10]), opening(8, [3, 20])])
    bench.tell(2, opens=[opening(7, [2, 30])])
    frames = bench.step()
    assert {session_id: told(frame) for session_id, frame in frames.items()} == {
        1: {7: [[11]], 8: [[21], [22], [23]]},
        2: {7: [[31], [32]]},
    }
    assert bench.pause is None
    bench.tell(2, Verdict(7, 3, [40]))
    frames = bench.step()
    assert {session_id: told(frame) for session_id, frame in frames.items()} == {2: {7: [[41], [42]]}}
    assert frames[2].step_seconds > 0
    assert bench.step() == {}, "nobody wants anything"


class WideDrafter(ChainDrafter):
    """A root with three children and four candidates each, of which the last ones have no weight."""

    kind = name = "wide"

    def draft(self) -> Drafts:
        sequences, self._wanting = list(self._wanting), {}
        found = []
        for wants_candidates in (False, True):
            chosen = [sequence for sequence in sequences if sequence.wants_candidates is wants_candidates]
            if not chosen:
                continue
            num = len(chosen)
            expanded = chains(chosen, np.zeros(num, np.int64), np.ones(num, np.int64), np.zeros(num, np.int32))
            expanded.child_ids = np.tile(np.array([[5, 6, 7]], np.int32), (num, 1))
            expanded.probabilities = np.tile(np.array([[9, 8, 7]], np.uint16), (num, 1))
            if wants_candidates:
                expanded.candidate_ids = np.tile(np.array([[5, 6, 1, 2]], np.int32), (num, 1))
                expanded.candidate_weights = np.tile(np.array([[40000, 25536, 0, 0]], np.uint16), (num, 1))
            found.append(expanded)
        return Drafts(found)


def test_what_a_verifier_does_not_take_is_cut() -> None:
    """Catches children and candidates beyond what was agreed upon, which would cost each sequence its drafter."""
    bench = Bench(WideDrafter(), num_sessions=0)
    all_limits = [DraftLimits(4, 4, 3, 64), DraftLimits(4, 2, 1, 64)]
    for session_id, limits in enumerate(all_limits):
        bench.engine.handle(SessionOpened(session_id, limits))
        bench.tell(session_id, opens=[opening(1, verification=REJECTION), opening(2)])
    frames = bench.step()
    for session_id, limits in enumerate(all_limits):
        expected = [[5, 6, 7][: limits.num_children]]
        assert told(frames[session_id], limits) == {1: expected, 2: expected}
        without, with_q = frames[session_id].expansions
        assert without.candidate_ids == without.candidate_weights == b""
        assert len(with_q.candidate_weights) == 2 * limits.max_candidates


class FailingDrafter(ScriptedDrafter):
    """Fails as often as it is told to, and computes prompts for as long."""

    def __init__(self) -> None:
        super().__init__(count_up)
        self.num_failures = 0
        self.is_computing = False

    def draft(self) -> Drafts:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("planted")
        return Drafts(computing=list(self._wanting)) if self.is_computing else super().draft()


def test_a_failure_costs_the_sequences_their_drafter_and_a_dead_device_ends_the_process() -> None:
    """Catches a sequence that is kept at a drafter which has forgotten it, and one that waits for an answer."""
    drafter = FailingDrafter()
    bench = Bench(drafter, num_sessions=2)
    for attempt in range(3):
        for session_id in (1, 2):
            bench.tell(session_id, opens=[opening(attempt)])
        drafter.num_failures = 1 if attempt < 2 else 0
        frames = bench.step()
        if attempt == 2:
            assert all(frame.expansions and not frame.refusals for frame in frames.values())
            continue
        for session_id in (1, 2):
            (refusal,) = frames[session_id].refusals
            assert (refusal.sequence_id, refusal.reason) == (attempt, drafter_pb2.REFUSAL_REASON_INTERNAL)
            assert refusal.detail == "the drafter failed: RuntimeError"
        assert bench.engine.num_sequences == 0
        assert not drafter.has_work
    drafter.num_failures = MAX_FAILURES_IN_A_ROW
    for attempt in range(MAX_FAILURES_IN_A_ROW - 1):
        bench.tell(1, opens=[opening(100 + attempt)])
        bench.step()
    bench.tell(1, opens=[opening(200)])
    with pytest.raises(RuntimeError, match="planted"):
        bench.step()


def test_who_waits_for_a_prompt_hears_that_the_drafter_is_alive() -> None:
    """Catches a silence for which a verifier gives its drafter up, and frames for those who wait for nothing."""
    drafter = FailingDrafter()
    bench = Bench(drafter, num_sessions=2)
    bench.tell(1, opens=[opening(1), opening(2)])
    drafter.is_computing = True
    for _ in range(2):
        frames = bench.step()
        assert frames.keys() == {1}
        assert not frames[1].expansions
        assert not frames[1].refusals
        assert bench.pause == 0.0
    drafter.is_computing = False
    assert told(bench.step()[1]).keys() == {1, 2}


def refusals(frame: drafter_pb2.DraftResponse) -> dict[int, str]:
    """Why, by sequence."""
    names = drafter_pb2.RefusalReason
    return {
        refusal.sequence_id: names.Name(refusal.reason).removeprefix("REFUSAL_REASON_") for refusal in frame.refusals
    }


def test_a_full_or_draining_drafter_refuses_and_goes_on_with_what_it_has() -> None:
    bench = Bench(ScriptedDrafter(count_up), num_sessions=2, max_sequences=2)
    bench.tell(1, opens=[opening(1), opening(2), opening(3)])
    frame = bench.step()[1]
    assert (refusals(frame), set(told(frame))) == ({3: "OVERLOADED"}, {1, 2})
    # What is closed makes room in the same frame.
    bench.tell(1, closes=[drafter_pb2.CloseSequence(sequence_id=1)], opens=[opening(4)])
    assert told(bench.step()[1]).keys() == {4}
    bench.engine.handle(SessionClosed(1))
    assert bench.engine.num_sequences == 0
    bench.tell(2, opens=[opening(1)])
    bench.engine.refuse_openings()
    bench.tell(2, Verdict(1, 4, [9]), opens=[opening(2)])
    frame = bench.step()[2]
    assert (refusals(frame), set(told(frame))) == ({2: "OVERLOADED"}, {1})
    assert frame.refusals[0].detail == "the drafter is draining"


def test_what_was_made_for_a_sequence_that_is_gone_reaches_nobody() -> None:
    """As of a pass that was under way when the verifier closed it, or left altogether."""

    class Late(ScriptedDrafter):
        """Hands back what it made before."""

        made = Drafts()

        @property
        def has_work(self) -> bool:
            return True

        def draft(self) -> Drafts:
            made, self.made = self.made, super().draft()
            return made

    late = Late(count_up)
    bench = Bench(late, num_sessions=2)
    bench.tell(1, opens=[opening(1)])
    bench.tell(2, opens=[opening(1)])
    assert bench.step() == {}
    bench.engine.handle(SessionClosed(1))
    assert bench.step().keys() == {2}


@pytest.mark.parametrize("change", [lambda m: setattr(m, "num_tokens", b"\1"), lambda m: setattr(m, "token_ids", b"")])
def test_a_frame_is_checked_before_anything_of_it_is_taken_in(change: Callable[[drafter_pb2.Verdicts], None]) -> None:
    verdicts = pack_verdicts([Verdict(1, 4, [9])])
    change(verdicts)
    with pytest.raises(Exception, match=r"verdicts\."):
        FrameArrived.of(1, drafter_pb2.DraftRequest(verdicts=verdicts, opens=[opening(1)]))


def test_what_is_measured_and_traced() -> None:
    metrics = DrafterMetrics()
    bench = Bench(ScriptedDrafter(count_up), metrics=metrics, is_tracing=True, step_spans=1)
    bench.tell(1, opens=[opening(1, [3, 4], traceparent=SAMPLED), opening(2, [2, 4])])
    bench.step()
    bench.tell(1, Verdict(1, 3, [0]), Verdict(2, 3, [1]), Verdict(9, 3, [1]))
    bench.step()
    values = {
        made.instrument.name: sum(made.values().values())
        for made in (metrics.expansions, metrics.roots, metrics.children, metrics.refusals)
    }
    assert values == {
        "outrider.drafter.expansions": 10,
        "outrider.drafter.roots": 4,
        "outrider.drafter.children": 10,
        "outrider.drafter.refusals": 1,
    }
    bench.tell(1, closes=[drafter_pb2.CloseSequence(sequence_id=1)])
    bench.step()
    assert [(traceparent, record.name) for traceparent, record in bench.records] == [
        (SAMPLED, "draft scripted"),
        (SAMPLED, "drafts scripted"),
    ]
    assert [record.attributes["outrider.num_expansions"] for _, record in bench.records] == [3, 3]
    assert bench.records[0][1].attributes["outrider.position"] == 2


def sequences_of(engine: DrafterEngine) -> list[DraftSequence]:
    """All that are open."""
    return [sequence for session in engine._sessions.values() for sequence in session.sequences.values()]


def test_a_bad_message_for_one_sequence_is_nobody_elses() -> None:
    bench = Bench(ScriptedDrafter(count_up))
    bench.tell(1, opens=[opening(1), opening(2), opening(3), opening(4, verification=0), opening(1)])
    assert refusals(bench.step()[1]) == {4: "BAD_MESSAGE", 1: "BAD_MESSAGE"}
    bench.tell(1, Verdict(2, 9, [1]), Verdict(3, 4, [1]), Verdict(5, 4, [1]))
    frame = bench.step()[1]
    assert refusals(frame) == {2: "BAD_MESSAGE", 5: "UNKNOWN_SEQUENCE"}
    assert told(frame).keys() == {3}
    assert [sequence.token_ids for sequence in sequences_of(bench.engine)] == [[1, 2, 3, 1]]
