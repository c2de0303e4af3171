"""Steps that fail on the device: what the engine does next. A test decides what comes back in place of a model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import grpc

from engine.block_manager import BlockManager
from engine.step import PassKind, Row, Sampled
from outrider.protocol.errors import code_number
from outrider.v1 import generation_pb2
from tests.services.sequences import target_sequence
from verifier_service.engine import VerifierEngine
from verifier_service.events import SequenceOpened, StepOutput


class DecidedPass:
    """Samples token 1 everywhere, or fails."""

    kind = PassKind.GRAPH

    def __init__(self, num_rows: int, *, fails: bool) -> None:
        self.rows = range(num_rows)
        self.is_done = not fails  # a failure takes until the test says that it has happened
        self._fails = fails

    def collect(self) -> Sequence[Sampled]:
        if self._fails:
            raise RuntimeError("planted")
        return [Sampled([1], 0) for _ in self.rows]


class FailsFirst:
    """An executor whose first step fails."""

    max_in_flight = 2

    def __init__(self) -> None:
        self.passes: list[DecidedPass] = []

    def can_overlap(self, row: Row) -> bool:
        return False

    def submit(self, rows: Sequence[Row]) -> Sequence[DecidedPass]:
        self.passes.append(DecidedPass(len(rows), fails=not self.passes))
        return self.passes[-1:]


def test_a_failed_step_leaves_nobody_waiting() -> None:
    """Catches an engine that goes to sleep when a step has failed: nobody hears of it, and who is queued waits on."""
    executor = FailsFirst()
    target: Any = SimpleNamespace(
        load=lambda: None, blocks=BlockManager(8, 16), executor=executor, max_num_batched_tokens=40, costs=None
    )
    engine = VerifierEngine(target, max_running=1, max_waiting=4, split_from=8, draft_timeout=1.0, is_polling=True)
    engine.load()
    doomed, queued = target_sequence(drafter=None, length_limit=6), target_sequence(drafter=None, length_limit=6)
    for sequence in (doomed, queued):
        engine.handle(SequenceOpened(sequence))
    outputs: list[StepOutput] = []
    # The first step is on its way, and the engine looks for news beside it.
    assert engine.step(outputs.append) == 0.0
    assert engine.step(outputs.append) == 0.0
    executor.passes[0].is_done = True
    while engine.is_busy:
        seconds = engine.step(outputs.append)
        assert seconds == 0.0 or not engine.is_busy, "asleep with work left"
    updates = [update for output in outputs for frame in output.session_frames.values() for update in frame.updates]
    ended = {update.sequence_id: update.ended for update in updates if update.HasField("ended")}
    assert ended[doomed.sequence_id].error.code == code_number(grpc.StatusCode.INTERNAL)
    assert ended[queued.sequence_id].finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert queued.token_ids[-2:] == [1, 1]
