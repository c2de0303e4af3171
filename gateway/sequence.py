"""One sequence as the gateway keeps it: prompt, committed tokens, text, statistics, times."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from gateway.output_text import OutputText
from gateway.validation import MAX_DRAFT_TOKENS
from outrider.protocol.errors import InternalError, OutriderError, from_code_number
from outrider.protocol.wire import unpack_tokens
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2


@dataclass
class SpeculationCounts:
    """What speculation did so far."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # By place in the chain, as long as the longest chain that was verified.
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_drafted_per_position: list[int] = field(default_factory=list)
    fallbacks: list[common_pb2.Fallback] = field(default_factory=list)
    # How draft tokens are verified; UNSPECIFIED until the first tokens have come.
    verification: common_pb2.Verification = common_pb2.VERIFICATION_UNSPECIFIED

    def add(self, update: verifier_pb2.SequenceUpdate) -> None:
        """Count one update of the verifier."""
        drafted, accepted = update.num_draft_tokens, update.num_accepted_tokens
        self.num_steps += bool(update.token_ids)
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_accepted_per_position += [0] * (drafted - len(self.num_accepted_per_position))
        self.num_drafted_per_position += [0] * (drafted - len(self.num_drafted_per_position))
        for place in range(drafted):
            self.num_drafted_per_position[place] += 1
        for place in range(accepted):
            self.num_accepted_per_position[place] += 1
        self.fallbacks.extend(update.fallbacks)
        self.verification = update.verification or self.verification

    def message(self) -> generation_pb2.SpeculationStatistics:
        """The counts for the client."""
        return generation_pb2.SpeculationStatistics(
            num_steps=self.num_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_accepted_per_position=self.num_accepted_per_position,
            fallbacks=self.fallbacks,
            verification=self.verification,
        )


@dataclass
class Sequence:
    """One running request. Times are seconds of `time.monotonic`."""

    sequence_id: int
    prompt_token_ids: list[int]
    output_text: OutputText
    arrived: float
    # Whether each token in a chunk shows its own text.
    has_token_texts: bool = False
    opened: float = 0.0
    # With the prompt, all that another verifier needs to go on from here.
    committed_token_ids: list[int] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    finish_reason: generation_pb2.FinishReason = generation_pb2.FINISH_REASON_UNSPECIFIED
    stop_string: str = ""
    # Set when the verifier could not go on; what came before it is still good.
    error: OutriderError | None = None
    _first_token: float = 0.0
    _prefill: verifier_pb2.PrefillReport = field(default_factory=verifier_pb2.PrefillReport)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED or self.error is not None

    def restart(self) -> None:
        """Forget how a verifier refused the sequence, before another one is asked."""
        self.counts, self.error = SpeculationCounts(), None

    def apply(self, updates: Iterable[verifier_pb2.SequenceUpdate]) -> generation_pb2.Chunk | None:
        """Take in what the verifier did; the chunk for the client, None when there is nothing to show.

        Raises InternalError for an update that contradicts itself. What follows the end is ignored.
        """
        chunk = generation_pb2.Chunk()
        texts: list[str] = []
        for update in updates:
            if self.is_over:
                break
            texts.append(self._apply(update, chunk))
        chunk.text = "".join(texts)
        return chunk if chunk.text or chunk.tokens else None

    def finished(self) -> generation_pb2.Finished:
        """The last message to the client."""
        opened_after = max(0.0, self.opened - self.arrived)
        first_token_after = max(0.0, self._first_token - self.arrived) if self._first_token else 0.0
        return generation_pb2.Finished(
            finish_reason=self.finish_reason,
            stop_string=self.stop_string,
            usage=generation_pb2.Usage(
                num_prompt_tokens=len(self.prompt_token_ids), num_output_tokens=len(self.committed_token_ids)
            ),
            speculation=self.counts.message(),
            timings=generation_pb2.Timings(
                queue_seconds=opened_after + self._prefill.queue_seconds,
                prefill_seconds=self._prefill.prefill_seconds,
                time_to_first_token_seconds=first_token_after,
                total_seconds=time.monotonic() - self.arrived,
            ),
        )

    def _apply(self, update: verifier_pb2.SequenceUpdate, chunk: generation_pb2.Chunk) -> str:
        """Add an update's tokens to `chunk` and return the text that they complete."""
        token_ids = _checked_token_ids(update)
        if token_ids and not self._first_token:
            self._first_token = time.monotonic()
        if update.HasField("prefill"):
            self._prefill = update.prefill
        self.counts.add(update)
        if update.HasField("ended"):
            self._end(update.ended)
        # The text of the token that ends a completion is left out; a stop string may still be complete before it.
        is_last_silent = (
            bool(token_ids)
            and not self.output_text.includes_stop
            and self.finish_reason in (generation_pb2.FINISH_REASON_EOS, generation_pb2.FINISH_REASON_STOP_TOKEN)
        )
        spoken = token_ids[:-1] if is_last_silent else token_ids
        token_texts: list[str] = []
        if self.has_token_texts:
            piece, token_texts = self.output_text.push_each(spoken)
        else:
            piece = self.output_text.push(spoken)
        text, num_tokens = piece.text, len(token_ids)
        if piece.stop_string is not None:
            num_tokens = piece.num_tokens
        elif self.is_over and self.error is None:
            piece = self.output_text.finish()
            text += piece.text
        if piece.stop_string is not None:
            self.finish_reason = generation_pb2.FINISH_REASON_STOP_STRING
            self.stop_string, self.error = piece.stop_string, None
        self.committed_token_ids += token_ids[:num_tokens]
        chunk.tokens.extend(
            generation_pb2.Token(
                id=token_ids[index],
                origin=_origin(update.origins[index]),
                logprobs=update.logprobs[index] if update.logprobs else None,
                text=token_texts[index] if index < len(token_texts) else "",
            )
            for index in range(num_tokens)
        )
        return text

    def _end(self, ended: verifier_pb2.Ended) -> None:
        if ended.WhichOneof("outcome") == "error":
            error = ended.error
            self.error = from_code_number(error.code, error.message, retry_delay_seconds=error.retry_delay_seconds)
        elif ended.finish_reason not in generation_pb2.FinishReason.values()[1:]:
            raise InternalError("the verifier ended the sequence without saying why")
        else:
            self.finish_reason = ended.finish_reason


def _origin(number: int) -> common_pb2.TokenOrigin:
    # Enums of the stubs are classes for the type checker and plain numbers at run time.
    return cast(common_pb2.TokenOrigin, number)


def _checked_token_ids(update: verifier_pb2.SequenceUpdate) -> list[int]:
    try:
        token_ids = unpack_tokens(update.token_ids)
    except ValueError as error:
        raise InternalError(f"the verifier sent a malformed update: {error}") from error
    if len(update.origins) != len(token_ids):
        raise InternalError(
            f"the verifier sent a malformed update: {len(update.origins)} origins of {len(token_ids)} tokens"
        )
    if update.logprobs and len(update.logprobs) != len(token_ids):
        raise InternalError(
            f"the verifier sent a malformed update: {len(update.logprobs)} log-probabilities of {len(token_ids)} tokens"
        )
    if update.num_draft_tokens > MAX_DRAFT_TOKENS:
        raise InternalError(
            f"the verifier sent a malformed update: {update.num_draft_tokens} draft tokens, "
            f"at most {MAX_DRAFT_TOKENS} are verified in a step"
        )
    if update.num_accepted_tokens > update.num_draft_tokens:
        raise InternalError(
            f"the verifier sent a malformed update: {update.num_accepted_tokens} tokens accepted "
            f"of {update.num_draft_tokens} drafted"
        )
    return token_ids
