"""Time of the host's work around a step: both engines and what travels between them, with models that take no time.

    python -m benchmarks.host --out FILE

Needs no GPU. Both engines run in this process with the layouts of their CUDA graphs; tables answer in place of models.
Counted is the CPU time of the one thread, stage by stage, on the way from the results of a step to the launch of the
next over the same sequences: what a GPU waits for when it has nothing else to do. From 16 sequences on, a step takes
half of them, and the other half's runs meanwhile. Left out are waiting, threads' hand-overs, gRPC, and copies to and
from the device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import goals
from benchmarks.records import Record, Recorder, of_kind, remarks, table
from benchmarks.sequences import speculating_sequence
from benchmarks.stopwatch import Stopwatch
from benchmarks.table_executors import DraftTable, StubRunner, TargetTable
from drafter_service.engine import DrafterEngine, EngineOutput, SessionOutput
from drafter_service.model_drafter import ModelDrafter
from drafter_service.session import FrameArrived, SessionOpened
from kernels.limits import NUM_CANDIDATES
from outrider.protocol.fingerprint import TokenizerDigest
from outrider.v1 import drafter_pb2
from verifier_service.engine import VerifierEngine
from verifier_service.events import Event, ExpansionsArrived, LinkUp, SequenceOpened, StepOutput
from verifier_service.frames import LinkFrame, read_expansions
from verifier_service.reporting import Reporter
from verifier_service.scheduler import Scheduler
from verifier_service.speculation import LinkKey
from verifier_service.steps_in_flight import StepsInFlight
from verifier_service.target import Target

K = 4
SPLIT_FROM = 16  # as the verifier's setting
MAX_GRAPH_ROWS = 64  # as both services' settings
LINK = LinkKey("drafter:1", 1)

# In the order of the way; those behind `launch` are done while the device works.
STAGES = {
    "collect": "verifier: results of the device",
    "commit": "verifier: commit, until the verdicts leave",
    "encode verdicts": "verifier",
    "decode verdicts": "drafter",
    "take verdicts": "drafter",
    "draft": "drafter: plan, fill the graph's inputs, copy its results",
    "answer": "drafter: make the frame",
    "encode drafts": "drafter",
    "decode drafts": "verifier",
    "check drafts": "verifier: unpack and check q",
    "take drafts": "verifier: into the sequences' trees",
    "schedule": "verifier",
    "launch": "verifier: fill the graph's inputs",
    "report": "verifier: the gateways' frame",
}
_ON_THE_WAY = [name for name in STAGES if name != "report"]
_VERIFIERS = [name for name in _ON_THE_WAY if STAGES[name].startswith("verifier")]


class Loop:
    """Verifier and drafter, and the frames between them; nothing waits for anything."""

    def __init__(self, batch_size: int, num_candidates: int, watch: Stopwatch) -> None:
        self._watch = watch
        runner: Any = StubRunner(batch_size)
        sizes = {"max_rows": MAX_GRAPH_ROWS, "max_draft_tokens": K, "num_candidates": num_candidates}
        drafter = ModelDrafter(
            lambda: runner,
            lambda runner: DraftTable(runner, watch, **sizes),
            name="draft",
            revision="",
            tokenizer=TokenizerDigest(),
            max_num_batched_tokens=runner.max_num_batched_tokens,
            num_slots=MAX_GRAPH_ROWS,
            takes_turns=True,
            has_graphs=False,
        )
        drafter.load()
        executor: Any = TargetTable(runner, watch, **sizes)
        target = Target(lambda: runner, lambda _: executor, has_graphs=False)
        self._drafter = DrafterEngine(drafter, max_sequences=batch_size)
        self._limits = replace(drafter.limits, takes_turns=True)
        self._drafter.handle(SessionOpened(1, self._limits))
        self._verifier = VerifierEngine(
            target, max_running=batch_size, max_waiting=batch_size, split_from=SPLIT_FROM, draft_timeout=60.0
        )
        self._verifier.load()
        sequences = [
            speculating_sequence(
                number, LINK, num_prompt_tokens=128, length_limit=StubRunner.max_length, num_draft_tokens=K
            )
            for number in range(1, batch_size + 1)
        ]
        self._inbox: list[Event] = [LinkUp(LINK, 0), *map(SequenceOpened, sequences)]

    def turn(self) -> None:
        """What has arrived, then a step of the verifier; its verdicts go to the drafter at once."""
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            with self._watch.stage("take drafts"):
                self._verifier.handle(event)
        outputs: list[StepOutput] = []
        self._verifier.step(outputs.append)
        for output in outputs:
            if LINK in output.link_frames:
                self._to_drafter(output.link_frames[LINK])

    def _to_drafter(self, frame: LinkFrame) -> None:
        with self._watch.stage("encode verdicts"):
            data = frame.to_message().SerializeToString()
        with self._watch.stage("decode verdicts"):
            arrived = FrameArrived.of(1, drafter_pb2.DraftRequest.FromString(data))
        with self._watch.stage("take verdicts"):
            self._drafter.handle(arrived)
        answers: list[EngineOutput] = []
        step = self._watch.timed("draft and answer", self._drafter.step)
        while step(answers.append) == 0.0:
            pass  # only prompts so far
        seconds = self._watch.seconds
        seconds["answer"].append(seconds["draft and answer"][-1] - seconds["draft"][-1])
        for answer in answers:
            assert isinstance(answer, SessionOutput)
            self._from_drafter(answer.frame)

    def _from_drafter(self, frame: drafter_pb2.DraftResponse) -> None:
        with self._watch.stage("encode drafts"):
            data = frame.SerializeToString()
        with self._watch.stage("decode drafts"):
            frame = drafter_pb2.DraftResponse.FromString(data)
        with self._watch.stage("check drafts"):
            expansions = read_expansions(frame.expansions, StubRunner.vocab_size, self._limits)
        self._inbox.append(ExpansionsArrived(LINK, expansions, frame.refusals, frame.step_seconds))


@contextmanager
def _timed_stages(watch: Stopwatch) -> Iterator[None]:
    """Count the stages that are methods of the services."""
    with ExitStack() as patches:
        for owner, method, name in (
            (ModelDrafter, "draft", "draft"),
            (Scheduler, "schedule", "schedule"),
            (StepsInFlight, "submit", "launch"),
            (StepsInFlight, "collect", "collect"),
            (VerifierEngine, "_finish", "commit"),
            (Reporter, "report", "report"),
        ):
            patches.enter_context(mock.patch.object(owner, method, watch.timed(name, getattr(owner, method))))
        yield


def summary(records: Sequence[Record]) -> str:
    """The table of what was recorded."""
    found = of_kind(records, "host")
    rows: list[list[object]] = [[name, *(record["microseconds"][name] for record in found)] for name in STAGES]
    for row, stages in (("verifier's, on the way", _VERIFIERS), ("all, on the way", _ON_THE_WAY)):
        rows.append([row, *(sum(record["microseconds"][stage] for stage in stages) for record in found)])
    headers = ("stage", *(f"batch {record['batch_size']}" for record in found))
    goal = 1e3 * goals.HOST_MS[64]
    return f"CPU time around a step, us (goal of the verifier's at batch 64: {goal:.0f})\n{table(headers, rows)}"


def measure(batch_size: int, *, num_candidates: int, num_turns: int) -> Stopwatch:
    """Time `num_turns` steps of the verifier, after as many that warm up, up to fifty."""
    watch = Stopwatch()
    with _timed_stages(watch):
        loop = Loop(batch_size, num_candidates, watch)
        for turn in range(-min(num_turns, 50), num_turns):
            if turn == 0:
                watch.seconds.clear()
            loop.turn()
    return watch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("host.jsonl"), help="JSON lines (default %(default)s)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--candidates", type=int, default=NUM_CANDIDATES, help="of a draft token (default %(default)s)")
    parser.add_argument("--turns", type=int, default=400, help="steps measured (default %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=60.0, help="begin no new batch size after this")
    parser.add_argument("--tiny", action="store_true", help="few steps, to see that it works")
    options = parser.parse_args(arguments)
    recorder = Recorder(options.out, "host", torch.device("cpu"))
    deadline = time.monotonic() + options.budget_seconds
    for batch_size in options.batch_sizes:
        if time.monotonic() > deadline:
            recorder.write("left_out", what=f"batch {batch_size}")
            continue
        num_turns = 20 if options.tiny else options.turns
        watch = measure(batch_size, num_candidates=options.candidates, num_turns=num_turns)
        found = {name: watch.microseconds(name) for name in STAGES}
        recorder.write("host", batch_size=batch_size, num_candidates=options.candidates, microseconds=found)
    print(f"{summary(recorder.records)}{remarks(recorder.records)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
