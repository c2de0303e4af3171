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
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from verifier_service.verify import Verified

import verifier_service.engine
from benchmarks import goals
from benchmarks.records import Record, Recorder, of_kind, remarks, table
from benchmarks.sequences import speculating_sequence
from drafter_service.draft_graph import DraftGraph, DraftGraphs
from drafter_service.engine import DrafterEngine, EngineOutput, FrameArrived, SessionOpened, SessionOutput
from drafter_service.model_drafter import ModelDrafter
from engine.block_manager import BlockManager
from engine.static_tensors import StaticTensors
from kernels.limits import NUM_CANDIDATES
from outrider.protocol.fingerprint import TokenizerDigest
from outrider.v1 import drafter_pb2
from verifier_service.decode_graph import DecodeGraph, DecodeGraphs
from verifier_service.engine import VerifierEngine
from verifier_service.events import Event, LinkUp, ProposalsArrived, SequenceOpened, StepOutput
from verifier_service.proposals import parse_proposals
from verifier_service.scheduler import Scheduled
from verifier_service.speculation import LinkKey

K = 4
SPLIT_FROM = 16  # as the verifier's setting
LINK = LinkKey("drafter:1", 1)

# In the order of the way; those behind `launch` are done while the device works.
STAGES = {
    "collect": "verifier: results of the device",
    "commit": "verifier: commit, until the verdicts leave",
    "encode verdicts": "verifier",
    "decode verdicts": "drafter",
    "take verdicts": "drafter: compare with what was proposed",
    "draft": "drafter: plan, fill the graph's inputs, copy its results",
    "answer": "drafter: make the frame",
    "encode proposals": "drafter",
    "decode proposals": "verifier",
    "check proposals": "verifier: unpack and check q",
    "take proposals": "verifier: into the sequences",
    "schedule": "verifier",
    "launch": "verifier: fill the graph's inputs",
    "report": "verifier: the gateways' frame",
}
_ON_THE_WAY = [name for name in STAGES if name != "report"]
_VERIFIERS = [name for name in _ON_THE_WAY if STAGES[name].startswith("verifier")]


class Stopwatch:
    """CPU time of the thread by stage, without what is excluded."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._excluded = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens here."""
        start, excluded = time.thread_time(), self._excluded
        yield
        self.seconds[name].append(time.thread_time() - start - (self._excluded - excluded))

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Do not count it, whatever stage it belongs to."""
        start = time.thread_time()
        yield
        self._excluded += time.thread_time() - start

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted as a stage."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.stage(name):
                return function(*arguments, **options)

        return call

    def microseconds(self, name: str) -> float:
        """The median of a stage."""
        return 1e6 * statistics.median(self.seconds[name])


class _Runner:
    """As much of a model runner as graphs ask for that are never captured."""

    vocab_size, block_size, max_length, max_num_batched_tokens = 128_256, 16, 4096, 8192
    device = torch.device("cpu")
    eos_token_ids = ()

    def __init__(self, batch_size: int) -> None:
        self.num_blocks = 64 * batch_size + 64

    def warm_up(self) -> None:
        pass

    def execute(self, slices: Sequence[Any]) -> torch.Tensor:
        return torch.zeros(len(slices), self.vocab_size)


class _Target:
    def __init__(self, runner: Any, num_candidates: int) -> None:
        self.runner, self.vocabulary_size, self.max_length = runner, runner.vocab_size, runner.max_length
        self.max_num_batched_tokens, self.device = runner.max_num_batched_tokens, runner.device
        self.blocks = BlockManager(runner.num_blocks, runner.block_size)
        self.graphs = DecodeGraphs(runner, max_sequences=64, max_draft_tokens=K, num_candidates=num_candidates)

    def load(self) -> None:
        pass


class Tables:
    """Answers in place of the models: random candidates, four in five draft tokens accepted."""

    def __init__(self, watch: Stopwatch, num_candidates: int) -> None:
        self._watch = watch
        self._random = np.random.default_rng(0)
        rows = [self._random.choice(_Runner.vocab_size, num_candidates, replace=False) for _ in range(500)]
        self._candidates = torch.from_numpy(np.stack(rows).astype(np.int32))
        self._weight = (1 << 16) // num_candidates

    def draft(self, graph: Any) -> None:
        """Fill the results of a drafting round."""
        with self._watch.excluded():
            outputs = graph._outputs.device
            rows = torch.from_numpy(self._random.integers(0, len(self._candidates), outputs["token_ids"].shape))
            outputs["candidate_ids"].copy_(self._candidates[rows])
            outputs["candidate_weights"].fill_(self._weight)
            outputs["token_ids"].copy_(outputs["candidate_ids"][:, :, 0])

    def verify(self, graph: Any) -> None:
        """Fill the results of a step."""
        with self._watch.excluded():
            host, results = graph._inputs.host, graph._outputs.device["results"]
            starts, drafts = host["cu_num_drafts"], host["draft_token_ids"]
            for row in range(graph.shape.num_sequences):
                proposed = drafts[starts[row] : starts[row + 1]]
                num_accepted = min(int(self._random.geometric(0.2)) - 1, len(proposed))
                tokens = [*proposed[:num_accepted].tolist(), int(self._random.integers(_Runner.vocab_size))]
                results[row, 0] = num_accepted
                results[row, 1 : num_accepted + 2] = torch.tensor(tokens, dtype=torch.int32)


class Loop:
    """Verifier and drafter, and the frames between them; nothing waits for anything."""

    def __init__(self, batch_size: int, num_candidates: int, watch: Stopwatch) -> None:
        self._watch = watch
        runner: Any = _Runner(batch_size)
        drafter = ModelDrafter(
            lambda: runner,
            name="draft",
            revision="",
            tokenizer=TokenizerDigest(),
            max_num_batched_tokens=runner.max_num_batched_tokens,
            num_candidates=num_candidates,
        )
        drafter.load()
        drafter._graphs = DraftGraphs(runner, max_sequences=64, max_draft_tokens=K, num_candidates=num_candidates)
        drafter._run = _prompts  # type: ignore[method-assign]
        target: Any = _Target(runner, num_candidates)
        self._drafter = DrafterEngine(drafter, max_sequences=batch_size)
        self._limits = drafter.limits
        self._drafter.handle(SessionOpened(1, self._limits))
        self._verifier = VerifierEngine(
            target, max_running=batch_size, max_waiting=batch_size, split_from=SPLIT_FROM, draft_timeout=60.0
        )
        self._verifier.load()
        sequences = [
            speculating_sequence(
                number, LINK, num_prompt_tokens=128, length_limit=_Runner.max_length, num_draft_tokens=K
            )
            for number in range(1, batch_size + 1)
        ]
        self._inbox: list[Event] = [LinkUp(LINK, 0), *map(SequenceOpened, sequences)]
        for owner, method, name in (
            (drafter, "draft", "draft"),
            (self._verifier._scheduler, "schedule", "schedule"),
            (self._verifier._pipeline, "launch", "launch"),
            (self._verifier._pipeline, "collect", "collect"),
            (self._verifier, "_finish", "commit"),
            (self._verifier._reporter, "report", "report"),
        ):
            setattr(owner, method, watch.timed(name, getattr(owner, method)))

    def turn(self) -> None:
        """What has arrived, then a step of the verifier; its verdicts go to the drafter at once."""
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            with self._watch.stage("take proposals"):
                self._verifier.handle(event)
        outputs: list[StepOutput] = []
        self._verifier.step(outputs.append)
        for output in outputs:
            if LINK in output.link_frames:
                self._to_drafter(output.link_frames[LINK])

    def _to_drafter(self, frame: drafter_pb2.DraftRequest) -> None:
        with self._watch.stage("encode verdicts"):
            data = frame.SerializeToString()
        with self._watch.stage("decode verdicts"):
            frame = drafter_pb2.DraftRequest.FromString(data)
        with self._watch.stage("take verdicts"):
            self._drafter.handle(FrameArrived(1, frame))
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
        with self._watch.stage("encode proposals"):
            data = frame.SerializeToString()
        with self._watch.stage("decode proposals"):
            frame = drafter_pb2.DraftResponse.FromString(data)
        with self._watch.stage("check proposals"):
            drafts = parse_proposals(frame.proposals, _Runner.vocab_size, self._limits)
        self._inbox.append(ProposalsArrived(LINK, frame, drafts))


def _prompts(planned: Sequence[Any]) -> list[Any]:
    """The drafter's pass over prompts: all but the last token, which the graph computes in the next round."""
    for item in planned:
        item.sequence.num_computed = item.sequence.length - 1
    return []


def _prompt_step(target: Any, batch: Sequence[Scheduled]) -> list[Verified | None]:
    """The verifier's pass over prompts."""
    return [Verified([5], 0) if part.is_sampled else None for part in batch]


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
    tables = Tables(watch, num_candidates)
    with (
        mock.patch.object(DecodeGraph, "_compute", _as_method(tables.verify)),
        mock.patch.object(DraftGraph, "_compute", _as_method(tables.draft)),
        mock.patch.object(verifier_service.engine, "verify", _prompt_step),
        # The device's own work, beside the host's.
        mock.patch.object(StaticTensors, "upload", _excluding(watch, StaticTensors.upload)),
        mock.patch.object(StaticTensors, "download", _excluding(watch, StaticTensors.download)),
    ):
        loop = Loop(batch_size, num_candidates, watch)
        for turn in range(-min(num_turns, 50), num_turns):
            if turn == 0:
                watch.seconds.clear()
            loop.turn()
    return watch


def _as_method(function: Callable[[Any], None]) -> Callable[[Any], None]:
    # A bound method would not be given the instance.
    def method(graph: Any) -> None:
        function(graph)

    return method


def _excluding(watch: Stopwatch, method: Callable[..., None]) -> Callable[..., None]:
    def call(tensors: StaticTensors) -> None:
        with watch.excluded():
            method(tensors)

    return call


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
