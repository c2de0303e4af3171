"""The project's drafter in a steady state: the K-token loop as the drafter service runs it, without the network."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import torch

from benchmarks.timing import queued_milliseconds
from drafter_service.drafter import Draft, Drafter
from drafter_service.factory import make_drafter
from drafter_service.model_drafter import ModelDrafter
from drafter_service.sequence import DraftSequence
from drafter_service.settings import DrafterSettings
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.v1 import common_pb2

_NUM_ACCEPTED = 2


class DrafterLoop:
    """Rounds of drafting in which the target accepts two draft tokens and replaces the third."""

    def __init__(
        self, model: Path, device: torch.device, *, vocab_size: int, num_draft_tokens: int, num_blocks: int
    ) -> None:
        settings = DrafterSettings(model=model, device=str(device), num_blocks=num_blocks)
        self._drafter: Drafter = make_drafter(settings)
        self._drafter.load()
        self._vocab_size = vocab_size
        self._num_draft_tokens = num_draft_tokens
        self._random = random.Random(11)

    def milliseconds(self, batch_size: int, context: int, *, num_rounds: int = 24, num_warm_up: int = 6) -> float:
        """Median time of one round, from verdicts taken in to draft tokens on the host, at about so much context.

        Raises RuntimeError when the drafter does not draft K tokens for each sequence.
        """
        # Sequences grow from round to round: the mean of the contexts is what was asked for.
        grown = (num_rounds // 2 + num_warm_up) * (_NUM_ACCEPTED + 1)
        sequences = [self._sequence(index, max(context - grown, 8)) for index in range(batch_size)]
        try:
            drafts = self._draft_prompts(sequences)
            times = []
            for number in range(num_warm_up + num_rounds):
                for sequence in sequences:
                    self._commit(sequence, drafts[sequence.sequence_id])
                start = time.perf_counter()
                answers = self._drafter.draft(sequences)
                if number >= num_warm_up:
                    times.append(time.perf_counter() - start)
                drafts = {answer.sequence.sequence_id: self._tokens(answer) for answer in answers}
            return statistics.median(times) * 1e3
        finally:
            for sequence in sequences:
                self._drafter.release(sequence)

    def device_milliseconds(self, batch_size: int) -> float | None:
        """Time of the device's part, over what the last round of so many sequences left; None without CUDA graphs."""
        graphs = self._drafter._graphs if isinstance(self._drafter, ModelDrafter) else None
        if graphs is None or self._drafter.device is None:
            return None
        return queued_milliseconds(graphs.graph_of(batch_size, is_filtered=False).replay, self._drafter.device)

    def _sequence(self, index: int, num_tokens: int) -> DraftSequence:
        sampling = common_pb2.SamplingParameters(temperature=1.0, seed=index)
        return DraftSequence(
            sequence_id=index,
            token_ids=[self._random.randrange(self._vocab_size) for _ in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            sampling=SamplingParameters.from_message(sampling, vocabulary_size=self._vocab_size),
            max_draft_tokens=self._num_draft_tokens,
            wants_candidates=True,
        )

    def _draft_prompts(self, sequences: list[DraftSequence]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {}
        # Prompts are computed in chunks: a sequence is passed again until it has its draft.
        for _ in range(10_000):
            waiting = [sequence for sequence in sequences if sequence.sequence_id not in drafts]
            if not waiting:
                return drafts
            for answer in self._drafter.draft(waiting):
                drafts[answer.sequence.sequence_id] = self._tokens(answer)
        raise RuntimeError("the drafter never finished the prompts")

    def _tokens(self, answer: object) -> list[int]:
        if not isinstance(answer, Draft) or len(answer.token_ids) != self._num_draft_tokens:
            raise RuntimeError(f"expected {self._num_draft_tokens} draft tokens, got {answer}")
        return list(answer.token_ids)

    def _commit(self, sequence: DraftSequence, draft: list[int]) -> None:
        sequence.proposing.propose(draft)
        num_accepted = min(_NUM_ACCEPTED, len(draft) - 1)
        recovered = (draft[num_accepted] + 1 + self._random.randrange(self._vocab_size - 1)) % self._vocab_size
        tokens = [*draft[:num_accepted], recovered]
        sequence.commit(tokens, sequence.length + len(tokens), sequence.proposing.epoch + 1)
