"""What a gateway asks a verifier for, held against what comes back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import grpc
import torch

from outrider.protocol.errors import code_number
from outrider.protocol.wire import unpack_tokens
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.services.known_answers import Answer
from verifier_service.sequence import TargetSequence

INTERNAL = code_number(grpc.StatusCode.INTERNAL)
RESOURCE_EXHAUSTED = code_number(grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass
class Asked:
    """One sequence. `take` raises AssertionError for whatever is not as it should be."""

    sequence: TargetSequence
    answer: Answer
    start: int  # prompt and output that came with the sequence
    token_ids: list[int]  # what is to come, if nothing else happens
    finish_reason: generation_pb2.FinishReason
    got: list[int] = field(default_factory=list)
    ended: verifier_pb2.Ended | None = None
    is_closed: bool = False
    has_failed: bool = False  # a pass with it has
    has_fallen_back: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self.is_closed or self.ended is not None

    def take(self, update: verifier_pb2.SequenceUpdate, seen: Counter[str]) -> None:
        """Compare an update with what was to come."""
        assert self.ended is None, "an update after the end"
        tokens, position = unpack_tokens(update.token_ids), self.start + len(self.got)
        self.got += tokens
        assert self.got == self.token_ids[: len(self.got)], f"not {self.token_ids}"
        seen["tokens"] += len(tokens)
        self._check_logprobs(update, position)
        self._check_drafts(update, seen)
        for fallback in update.fallbacks:
            assert not self.has_fallen_back
            self.has_fallen_back = True
            assert position <= fallback.position <= position + len(tokens)
            seen[f"fallback {common_pb2.FallbackReason.Name(fallback.reason)}"] += 1
        if update.HasField("ended"):
            self.ended = update.ended
            self._check_end(seen)

    def _check_logprobs(self, update: verifier_pb2.SequenceUpdate, position: int) -> None:
        if self.sequence.num_logprobs is None:
            assert not update.logprobs
            return
        tokens = unpack_tokens(update.token_ids)
        assert len(update.logprobs) == len(tokens)
        for offset, (token_id, found) in enumerate(zip(tokens, update.logprobs, strict=True)):
            expected = self.answer.logprobs[position + offset - 1]
            assert found.chosen.token_id == token_id
            assert len(found.top) == self.sequence.num_logprobs
            top = [(top.token_id, top.logprob) for top in found.top]
            for other_id, logprob in [(token_id, found.chosen.logprob), *top]:
                assert abs(logprob - float(expected[other_id])) < 1e-3, f"log-probability at {position + offset}"
            most_likely = expected.topk(len(top)).values
            assert torch.allclose(torch.tensor([logprob for _, logprob in top]), most_likely, atol=1e-3)

    def _check_drafts(self, update: verifier_pb2.SequenceUpdate, seen: Counter[str]) -> None:
        drafted, accepted = update.num_draft_tokens, update.num_accepted_tokens
        num_tokens = len(update.origins)
        assert update.origins.count(common_pb2.TOKEN_ORIGIN_ACCEPTED) == accepted <= min(drafted, num_tokens)
        seen["accepted drafts"] += accepted
        seen["accepted drafts of coupled sequences"] += accepted * self.sequence.is_coupled
        seen["full acceptances"] += common_pb2.TOKEN_ORIGIN_BONUS in update.origins
        seen["rejections"] += common_pb2.TOKEN_ORIGIN_RECOVERED in update.origins
        seen["plain tokens"] += update.origins.count(common_pb2.TOKEN_ORIGIN_PLAIN)

    def _check_end(self, seen: Counter[str]) -> None:
        assert self.ended is not None
        if not self.ended.HasField("error"):
            assert not self.has_failed
            assert (self.got, self.ended.finish_reason) == (self.token_ids, self.finish_reason)
            seen[generation_pb2.FinishReason.Name(self.finish_reason)] += 1
        elif self.ended.error.code == RESOURCE_EXHAUSTED:
            assert not self.got
            seen["turned away"] += 1
        else:
            assert (self.ended.error.code, self.has_failed) == (INTERNAL, True), self.ended.error
            seen["failed"] += 1
