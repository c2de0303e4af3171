"""What tracing costs the host: verifier's and drafter's engines at full batch, with models that take no time.

    python -m benchmarks.tracing_host

Both engines, their protocol between them and the making, encoding and serializing of spans run in this one process;
sending them is left out. The CPU time of a cycle (one verify step of the whole batch and the drafts for the next) is
compared between tracing off, a ratio of 1% and 100%. A cycle at batch 64 takes a GPU pair about 20 ms.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.sequences import speculating_sequence
from drafter_service.chain_drafter import ChainDrafter
from drafter_service.drafter import Drafts
from drafter_service.engine import DrafterEngine, DraftRecords, EngineOutput
from drafter_service.sequence import DraftSequence
from drafter_service.session import FrameArrived, SessionOpened
from engine.block_manager import BlockManager
from engine.step import Pass, PassKind, Row, Sampled
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.verification import Verification
from outrider.service.telemetry import Telemetry, context_of
from outrider.v1 import verifier_pb2
from verifier_service.engine import VerifierEngine
from verifier_service.events import ExpansionsArrived, LinkUp, SequenceOpened, StepOutput
from verifier_service.frames import read_expansions
from verifier_service.sequence_trace import SequenceTrace
from verifier_service.session import Session
from verifier_service.speculation import LinkKey

BATCH = 64
K = 4
OUTPUT_TOKENS = 512
PROMPT_TOKENS = 128
CYCLE_SECONDS = 0.020
LINK = LinkKey("drafter:1", 1)
LIMITS = DraftLimits(max_draft_tokens=K, max_candidates=64, takes_turns=True)
MODES = {"off": None, "1%": 0.01, "100%": 1.0}


class _Encoder(SpanExporter):
    """What the OTLP exporter does, up to the network."""

    num_spans = 0
    num_bytes = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_bytes += len(encode_spans(spans).SerializeToString())
        self.num_spans += len(spans)
        return SpanExportResult.SUCCESS


class _Pass:
    """A step that was over at once: two draft tokens accepted and one recovered, as far as there are so many."""

    kind = PassKind.GRAPH
    is_done = True

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = range(len(rows))
        self._rows = rows

    def collect(self) -> list[Sampled]:
        accepted = [min(2, len(row.drafts.token_ids)) for row in self._rows]
        return [Sampled([1] * num_accepted + [2], num_accepted) for num_accepted in accepted]


class _Executor:
    """Executes nothing."""

    max_in_flight = 1

    def can_overlap(self, row: Row) -> bool:
        return False

    def submit(self, rows: Sequence[Row]) -> list[Pass[Sampled]]:
        return [_Pass(rows)]


class _Target:
    """As much of a target model as the engine asks for."""

    vocabulary_size = 1000
    max_num_batched_tokens = 1 << 15
    costs = None

    def load(self) -> None:
        self.blocks = BlockManager(BATCH * 64, 16)
        self.executor = _Executor()


class _Drafter(ChainDrafter):
    """Drafts the same tokens again and again, with distributions as wide as a model's."""

    kind, name, limits = "model", "draft", LIMITS
    vocabulary_size = 1000

    def find(self, sequence: DraftSequence) -> Sequence[int]:
        return [1] * K

    def draft(self) -> Drafts:
        drafts = super().draft()
        for expanded in drafts.expanded:
            num_nodes = len(expanded.parents)
            expanded.candidate_ids = np.tile(np.arange(64, dtype=np.int32), (num_nodes, 1))
            expanded.candidate_weights = np.full((num_nodes, 64), 1024, np.uint16)
        return drafts


@dataclass(frozen=True)
class Cost:
    """CPU time of a cycle in microseconds, and spans of it."""

    microseconds: float
    num_spans: float
    num_bytes: float


class Pair:
    """The two engines, with one gateway's session."""

    def __init__(self, ratio: float | None, step_spans: int) -> None:
        self._ratio = ratio
        self._step_spans = step_spans
        self.encoder = _Encoder()
        self.telemetry = Telemetry()
        if ratio is not None:
            provider = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(self.encoder, max_queue_size=1 << 18))
            self.telemetry = Telemetry.from_provider(provider)
        self._session = Session(1, "target", self.telemetry)
        self._ids = itertools.count(1)
        target: Any = _Target()
        self._verifier = VerifierEngine(target, **_verifier_options())
        self._drafter = DrafterEngine(
            _Drafter(), max_sequences=BATCH, is_tracing=self.telemetry.is_enabled, step_spans=step_spans
        )
        self._verifier.load()
        self._drafter.handle(SessionOpened(1, LIMITS))
        self._verifier.handle(LinkUp(LINK, 0))
        self._num_open = 0

    def cycle(self) -> None:
        """One step of each engine, over a full batch."""
        while self._num_open < BATCH:
            self._open()
        self._verifier.step(self._from_verifier)
        self._drafter.step(self._from_drafter)

    def _open(self) -> None:
        number = next(self._ids)
        self._num_open += 1
        traceparent = ""
        if self._ratio is not None:
            # Every so many requests one that is sampled; the others say that they are not.
            flags = "01" if self._ratio and number % round(1 / self._ratio) == 0 else "00"
            traceparent = f"00-{number:032x}-{number:016x}-{flags}"
        opening = verifier_pb2.OpenDecoding(sequence_id=number, traceparent=traceparent, request_id=str(number))
        # The first requests end at different times, as they would.
        length = PROMPT_TOKENS + (OUTPUT_TOKENS * (number % BATCH + 1) // BATCH if number <= BATCH else OUTPUT_TOKENS)
        sequence = speculating_sequence(
            number,
            LINK,
            num_prompt_tokens=PROMPT_TOKENS,
            length_limit=length,
            num_draft_tokens=K,
            traceparent=self._session.start_span(opening, Verification.REJECTION),
        )
        if self._session.is_tracing(number):
            sequence.trace = SequenceTrace(self._step_spans)
        self._verifier.handle(SequenceOpened(sequence))

    def _from_verifier(self, output: StepOutput) -> None:
        for frame in output.link_frames.values():
            self._drafter.handle(FrameArrived.of(1, frame.to_message()))
        for records in output.records:
            self._session.record(records)
        for response in output.session_frames.values():
            self._num_open -= sum(update.HasField("ended") for update in response.updates)
            self._session.send(response)
            self._session.outbox.get_nowait()

    def _from_drafter(self, output: EngineOutput) -> None:
        if isinstance(output, DraftRecords):
            for traceparent, record in output.records:
                span = self.telemetry.tracer.start_span(
                    record.name,
                    context=context_of(traceparent),
                    start_time=record.start_ns,
                    attributes=record.attributes,
                )
                span.end(record.end_ns)
        else:
            frame = output.frame
            expansions = read_expansions(frame.expansions, _Target.vocabulary_size, LIMITS)
            self._verifier.handle(ExpansionsArrived(LINK, expansions, frame.refusals, frame.step_seconds))


def measure(ratio: float | None, *, num_cycles: int, step_spans: int) -> Cost:
    """The cost of a cycle, means over `num_cycles`."""
    pair = Pair(ratio, step_spans)
    for _ in range(20):
        pair.cycle()
    start = time.process_time()
    for _ in range(num_cycles):
        pair.cycle()
    # The last spans are encoded as well.
    pair.telemetry.shutdown()
    seconds = time.process_time() - start
    return Cost(1e6 * seconds / num_cycles, pair.encoder.num_spans / num_cycles, pair.encoder.num_bytes / num_cycles)


def _verifier_options() -> dict[str, Any]:
    return {"max_running": BATCH, "max_waiting": BATCH, "split_from": 1 << 30, "draft_timeout": 60.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000, help="of a measurement (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each mode (default %(default)s)")
    parser.add_argument("--step-spans", type=int, default=32, help="as the services' setting (default %(default)s)")
    options = parser.parse_args(arguments)
    costs: dict[str, list[Cost]] = {name: [] for name in MODES}
    for _ in range(options.rounds):
        # In turns, so that what else the machine does meets all of them.
        for name, ratio in MODES.items():
            costs[name].append(measure(ratio, num_cycles=options.cycles, step_spans=options.step_spans))
    base = statistics.median(cost.microseconds for cost in costs["off"])
    print(f"batch {BATCH}, K = {K}, medians of {options.rounds} x {options.cycles} cycles")
    for name, found in costs.items():
        middle = statistics.median(cost.microseconds for cost in found)
        share = (middle - base) * 1e-6 / CYCLE_SECONDS
        print(
            f"{name:>5}: {middle:8.0f} us a cycle, {middle - base:+7.0f} us for tracing "
            f"({share:+.2%} of a cycle of {1e3 * CYCLE_SECONDS:.0f} ms), {found[0].num_spans:.2f} spans, "
            f"{found[0].num_bytes:.0f} bytes"
        )
    print(f"  off: {guard_microseconds():8.2f} us a cycle for asking whether to trace")
    return 0


def guard_microseconds() -> float:
    """What is left of tracing where it is off: a few questions a sequence and step, timed by themselves."""
    sequence, num_questions, repeats = SimpleNamespace(trace=None), 0, 20_000
    start = time.perf_counter()
    for _ in range(repeats):
        # Drafts taken, step reported, drafts made: three places, and one for the batch.
        num_questions += sequence.trace is not None
        num_questions += sequence.trace is not None
        num_questions += sequence.trace is not None
        num_questions += sequence.trace is not None
    return 1e6 * (time.perf_counter() - start) / repeats * BATCH


if __name__ == "__main__":
    raise SystemExit(main())
