"""The project's drafter in a steady state, host included: its answers in turns, and its replays when it runs ahead."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.timing import queued_milliseconds
from drafter_service.drafter import Drafts
from drafter_service.factory import make_drafter
from drafter_service.model_drafter import ModelDrafter
from drafter_service.sequence import DraftSequence
from drafter_service.settings import DrafterSettings
from outrider.protocol.expansions import ROOT
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.v1 import common_pb2

_NUM_ACCEPTED = 2


@dataclass(frozen=True)
class ReplayTime:
    """A replay that runs ahead, one of several behind each other."""

    milliseconds: float
    num_expansions: float  # that verifiers are told of


class DrafterLoop:
    """A drafter with its settings' defaults, and sequences whose target accepts two draft tokens of each chain."""

    def __init__(
        self,
        model: Path,
        device: torch.device,
        *,
        num_draft_tokens: int,
        num_blocks: int,
        max_batch_size: int,
        takes_turns: bool,
    ) -> None:
        """`num_blocks` of the cache, of which graphs for at most `max_batch_size` sequences are made."""
        settings = DrafterSettings(
            model=model,
            device=str(device),
            num_blocks=num_blocks,
            graph_draft_tokens=num_draft_tokens,
            max_sequences=max_batch_size,
            graph_max_sequences=max_batch_size,
            takes_turns=takes_turns,
            # As long as there is anything to expand, it is expanded.
            min_path_probability=0.0,
        )
        drafter = make_drafter(settings)
        assert isinstance(drafter, ModelDrafter)
        drafter.load()
        self._drafter = drafter
        self._limits = drafter.limits.with_offer(
            DraftLimits(
                max_draft_tokens=num_draft_tokens,
                max_candidates=settings.num_candidates,
                num_children=settings.num_children,
                max_expansions=drafter.limits.max_expansions,
                takes_turns=takes_turns,
            ).to_message()
        )
        self._num_draft_tokens = num_draft_tokens
        self._num_accepted = min(_NUM_ACCEPTED, num_draft_tokens - 1)
        self._random = random.Random(11)

    def milliseconds(self, batch_size: int, context: int, *, num_rounds: int = 24, num_warm_up: int = 6) -> float:
        """Median time, taking turns, from a verdict to K draft tokens on the host, at about so much context.

        Raises RuntimeError when K tokens are not drafted for each sequence.
        """
        # Sequences grow from round to round: the mean of the contexts is what was asked for.
        grown = (num_rounds // 2 + num_warm_up) * (self._num_accepted + 1)
        with self._opened(batch_size, max(context - grown, 8)) as sequences:
            # Behind a prompt the target commits one token, and nothing was drafted.
            chains: dict[DraftSequence, list[int]] = {}
            times = []
            for number in range(num_warm_up + num_rounds):
                for sequence in sequences:
                    accepted = chains.get(sequence, [])[: self._num_accepted]
                    rejected = chains[sequence][self._num_accepted] if sequence in chains else 0
                    self._commit(sequence, [*accepted, self._other_than(rejected)])
                start = time.perf_counter()
                answers = [self._drafter.draft()]
                while self._drafter.has_work:
                    answers.append(self._drafter.draft())
                if number >= num_warm_up:
                    times.append(time.perf_counter() - start)
                chains = self._chains(answers)
                counts = [len(chains.get(sequence, ())) for sequence in sequences]
                if counts != [self._num_draft_tokens] * batch_size:
                    raise RuntimeError(
                        f"expected {self._num_draft_tokens} draft tokens for {batch_size} sequences, got {counts}"
                    )
            return statistics.median(times) * 1e3

    def replay(self, batch_size: int, context: int, *, num_runs: int = 8, num_replays: int = 8) -> ReplayTime:
        """Median time of a replay that runs ahead: of `num_replays` behind each other, after a verdict that misses.

        Raises RuntimeError when nothing is expanded.
        """
        with self._opened(batch_size, max(context - num_runs, 8)) as sequences:
            times, counts = [], []
            for _ in range(num_runs):
                for sequence in sequences:
                    self._commit(sequence, [self._random.randrange(self._drafter.vocabulary_size)])
                # New roots, and as many replays under way as there can be.
                for _ in range(3):
                    self._drafter.draft()
                start = time.perf_counter()
                drafts = [self._drafter.draft() for _ in range(num_replays)]
                times.append((time.perf_counter() - start) / num_replays)
                expanded = [part for draft in drafts for part in draft.expanded]
                counts.append(sum(len(part.parents) for part in expanded) / num_replays)
            if not all(counts):
                raise RuntimeError(f"expected expansions in each run, got {counts} a replay")
            return ReplayTime(statistics.median(times) * 1e3, statistics.median(counts))

    def device_milliseconds(self, batch_size: int) -> float | None:
        """Time of the device's part of a replay, over what the last one of so many left; None without CUDA graphs."""
        graph = self._drafter._executor.graph_of(
            batch_size, num_draft_tokens=self._num_draft_tokens if self._limits.takes_turns else 0, is_filtered=False
        )
        if not graph.is_captured:
            return None
        assert self._drafter.device is not None
        return queued_milliseconds(graph.replay, self._drafter.device)

    @contextmanager
    def _opened(self, batch_size: int, num_tokens: int) -> Iterator[list[DraftSequence]]:
        """Sequences with random prompts that are computed."""
        sequences = [
            DraftSequence(
                sequence_id=index,
                token_ids=[self._random.randrange(self._drafter.vocabulary_size) for _ in range(num_tokens)],
                num_prompt_tokens=num_tokens,
                sampling=SamplingParameters(temperature=1.0, seed=index),
                verification=common_pb2.VERIFICATION_REJECTION,
                max_draft_tokens=self._num_draft_tokens,
                limits=self._limits,
            )
            for index in range(batch_size)
        ]
        for sequence in sequences:
            self._drafter.open(sequence)
        while self._drafter.draft().computing:
            pass
        try:
            yield sequences
        finally:
            for sequence in sequences:
                self._drafter.release(sequence)
            while self._drafter.has_work:
                self._drafter.draft()

    def _commit(self, sequence: DraftSequence, token_ids: list[int]) -> None:
        sequence.token_ids += token_ids
        self._drafter.commit(sequence, token_ids)

    def _chains(self, answers: Sequence[Drafts]) -> dict[DraftSequence, list[int]]:
        """First children from each new root on."""
        found: dict[DraftSequence, list[int]] = {}
        for expanded in (part for drafts in answers for part in drafts.expanded):
            first_children, start = expanded.child_ids[:, 0].tolist(), 0
            for sequence, count in zip(expanded.sequences, expanded.num_expansions.tolist(), strict=True):
                if expanded.parents[start] == ROOT:
                    found[sequence] = first_children[start : start + count]
                start += count
        return found

    def _other_than(self, token_id: int) -> int:
        vocab_size = self._drafter.vocabulary_size
        return (token_id + 1 + self._random.randrange(vocab_size - 1)) % vocab_size
