"""The verifier's engine without its service: over a model that is loaded already, with a clock that a test moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from engine.block_manager import BlockManager
from engine.model_runner import ModelRunner
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.verification import Verification
from outrider.protocol.wire import pack_tokens
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.services.checked_executor import CheckedExecutor
from tests.services.known_answers import Answer
from tests.services.simulated_drafters import TURNS
from verifier_service import drafting, drafting_protocol, gathering, reporting, steps_in_flight
from verifier_service import engine as engine_module
from verifier_service.engine import VerifierEngine
from verifier_service.events import SequenceOpened
from verifier_service.executor import TargetExecutor
from verifier_service.opening import TargetLimits, parse_opening
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import LinkKey
from verifier_service.target import Target


class Clock:
    """Stands in for the module `time`: it moves when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        """Whoever sleeps lets others work; here they have their turn anyway."""

    @staticmethod
    def patched(monkeypatch: pytest.MonkeyPatch) -> Clock:
        """The clock of everything that the engine's thread runs."""
        clock = Clock()
        for module in (drafting, drafting_protocol, engine_module, gathering, reporting, steps_in_flight):
            monkeypatch.setattr(module, "time", clock)
        return clock


class LoadedTarget(Target):
    """A target whose model another one has loaded."""

    def __init__(
        self, runner: ModelRunner, executor: CheckedExecutor | TargetExecutor, max_batched_tokens: int
    ) -> None:
        self.blocks = BlockManager(runner.num_blocks, runner.block_size)
        self.vocabulary_size = runner.vocab_size
        self.max_length = runner.max_length
        self.max_num_batched_tokens = max_batched_tokens
        self.eos_token_ids = frozenset()
        self.device = runner.device
        self.executor = executor

    def load(self) -> None:
        """Nothing is left to do."""


def make_executor(runner: ModelRunner, max_rows: int) -> TargetExecutor:
    return TargetExecutor(
        runner, max_rows=max_rows, max_draft_tokens=TURNS.max_draft_tokens, num_candidates=TURNS.max_candidates
    )


def completion(
    answer: Answer, start: int, length_limit: int, eos: frozenset[int], stops: frozenset[int]
) -> tuple[list[int], generation_pb2.FinishReason]:
    """What follows the first `start` tokens, and why it ends there."""
    for end in range(start, length_limit):
        if (token := answer.text[end]) in eos:
            return answer.text[start : end + 1], generation_pb2.FINISH_REASON_EOS
        if token in stops:
            return answer.text[start : end + 1], generation_pb2.FINISH_REASON_STOP_TOKEN
    return answer.text[start:length_limit], generation_pb2.FINISH_REASON_LENGTH


class LinkIds(NamedTuple):
    """What the service knows of a sequence that its gateway does not."""

    session_id: int
    link_sequence_id: int
    drafter: LinkKey | None
    draft_limits: DraftLimits | None = None


def parse(
    message: verifier_pb2.OpenDecoding, runner: ModelRunner, ids: LinkIds, eos: frozenset[int] = frozenset()
) -> TargetSequence:
    """The sequence that the service would make of an opening."""
    limits = TargetLimits(runner.vocab_size, runner.max_length, eos, TURNS.max_draft_tokens)
    unasked = Verification.REJECTION
    return parse_opening(message, limits=limits, unasked_verification=unasked, arrived_ns=0, **ids._asdict())


def decode_alone(
    runner: ModelRunner, prompt: Sequence[int], sampling: common_pb2.SamplingParameters, num_tokens: int
) -> list[int]:
    """What an engine without graphs gives to a sequence that has it for itself."""
    target = LoadedTarget(runner, make_executor(runner, 1), runner.max_num_batched_tokens)
    engine = VerifierEngine(target, max_running=1, max_waiting=1, split_from=1, draft_timeout=1.0)
    engine.load()
    message = verifier_pb2.OpenDecoding(
        token_ids=pack_tokens(prompt), num_prompt_tokens=len(prompt), sampling=sampling, max_tokens=num_tokens
    )
    engine.handle(SequenceOpened(sequence := parse(message, runner, LinkIds(1, 1, None))))
    while engine.is_busy:
        engine.step(lambda output: None)
    return sequence.token_ids[len(prompt) :]
