"""What a completion is made of: the events of a stream, and the completion that they add up to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from outrider.errors import ClientError
from outrider.protocol.verification import Verification
from outrider.protocol.words import ProtoEnum, word
from outrider.v1 import common_pb2, generation_pb2


class TokenOrigin(StrEnum):
    """Where an output token came from. Here and below the words are those of the protocol, logs and traces."""

    ACCEPTED = "ACCEPTED"
    """A draft token that the target accepted."""
    RECOVERED = "RECOVERED"
    """Sampled from the residual distribution at the first rejected draft token."""
    BONUS = "BONUS"
    """Sampled from the target after every draft token of the step was accepted."""
    PLAIN = "PLAIN"
    """Sampled from the target in a step without draft tokens."""
    UNKNOWN = "UNKNOWN"
    """A word that this client does not know; the gateway is newer."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    EOS = "EOS"
    STOP_TOKEN = "STOP_TOKEN"
    STOP_STRING = "STOP_STRING"
    LENGTH = "LENGTH"
    UNKNOWN = "UNKNOWN"


class FallbackReason(StrEnum):
    """Why a sequence, or the rest of it, was decoded without a drafter."""

    CLIENT_DISABLED = "CLIENT_DISABLED"
    DRAFTER_MAX_LENGTH = "DRAFTER_MAX_LENGTH"
    NO_DRAFTER = "NO_DRAFTER"
    INCOMPATIBLE_DRAFTER = "INCOMPATIBLE_DRAFTER"
    DRAFTER_LOST = "DRAFTER_LOST"
    DRAFTER_OVERLOADED = "DRAFTER_OVERLOADED"
    LOW_ACCEPTANCE = "LOW_ACCEPTANCE"
    TARGET_SATURATED = "TARGET_SATURATED"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of one token's probability under the target, before temperature and filters."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One output token."""

    id: int
    origin: TokenOrigin
    text: str = ""
    """With `token_texts`: its share of the text, empty while a character or a possible stop string is unfinished."""
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A field of the request that was taken otherwise than it said, and how."""

    field: str
    detail: str


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a place."""

    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    adjustments: tuple[Adjustment, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    """With `prompt_token_ids`: what the model was given."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens, and the text that they complete."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Fallback:
    """One change to plain decoding: why, and the first position (prompt included) decoded so."""

    reason: FallbackReason
    position: int


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """What speculation did in one completion."""

    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_per_position: tuple[int, ...]
    fallbacks: tuple[Fallback, ...]
    verification: Verification | None = None
    """How draft tokens were verified, or would have been; None for a rule that this client does not know."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds from the request's arrival at the gateway."""

    queue_seconds: float
    prefill_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The completion is complete."""

    finish_reason: FinishReason
    stop_string: str
    usage: Usage
    speculation: SpeculationStatistics
    timings: Timings


Event = Started | Chunk | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole completion."""

    request_id: str
    model: str
    seed: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    stop_string: str
    usage: Usage
    speculation: SpeculationStatistics
    timings: Timings
    adjustments: tuple[Adjustment, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens."""
        return tuple(token.id for token in self.tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target step; 1 without speculation."""
        return self.usage.num_output_tokens / self.speculation.num_steps if self.speculation.num_steps else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decoding, from the first token to the end; None for fewer than two tokens."""
        seconds = self.timings.total_seconds - self.timings.time_to_first_token_seconds
        return (self.usage.num_output_tokens - 1) / seconds if len(self.tokens) > 1 and seconds > 0 else None


@dataclass
class CompletionBuilder:
    """Adds the events of one stream up."""

    _started: Started | None = None
    _texts: list[str] = field(default_factory=list)
    _tokens: list[Token] = field(default_factory=list)
    _finished: Finished | None = None

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case Started():
                self._started = event
            case Chunk():
                self._texts.append(event.text)
                self._tokens.extend(event.tokens)
            case Finished():
                self._finished = event

    def build(self) -> Completion:
        """The completion. Raises ClientError when the stream ended before it was complete."""
        started, finished = self._started, self._finished
        if started is None or finished is None:
            raise ClientError("the stream ended before the completion did")
        return Completion(
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish_reason=finished.finish_reason,
            stop_string=finished.stop_string,
            usage=finished.usage,
            speculation=finished.speculation,
            timings=finished.timings,
            adjustments=started.adjustments,
            prompt_token_ids=started.prompt_token_ids,
        )


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A verifier or drafter that the gateway knows; `detail` says why it is not ready."""

    address: str
    is_ready: bool
    num_sequences: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model, and the pools behind it."""

    name: str
    revision: str
    context_length: int
    vocabulary_size: int
    has_tokenizer: bool
    verifiers: tuple[PoolMember, ...]
    drafters: tuple[PoolMember, ...]


def event_from_proto(response: generation_pb2.GenerateResponse) -> Event | None:
    """The event in a message; None for a kind that this client does not know."""
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return Started(
                started.request_id,
                started.model,
                started.num_prompt_tokens,
                started.seed,
                tuple(Adjustment(adjustment.field, adjustment.detail) for adjustment in started.adjustments),
                tuple(started.prompt_token_ids),
            )
        case "chunk":
            return Chunk(response.chunk.text, tuple(_token(token) for token in response.chunk.tokens))
        case "finished":
            return _finished(response.finished)
        case _:
            return None


def model_from_proto(response: generation_pb2.GetModelResponse) -> ModelInfo:
    """The answer of GetModel."""
    return ModelInfo(
        name=response.name,
        revision=response.revision,
        context_length=response.context_length,
        vocabulary_size=response.vocabulary_size,
        has_tokenizer=response.has_tokenizer,
        verifiers=tuple(PoolMember(v.address, v.is_ready, v.num_sequences) for v in response.verifiers),
        drafters=tuple(PoolMember(d.address, d.is_ready, d.num_sequences, d.detail) for d in response.drafters),
    )


def _token(token: generation_pb2.Token) -> Token:
    origin = _word(TokenOrigin, common_pb2.TokenOrigin, token.origin)
    if not token.HasField("logprobs"):
        return Token(token.id, origin, token.text)
    return Token(
        token.id,
        origin,
        token.text,
        logprob=token.logprobs.chosen.logprob,
        top_logprobs=tuple(TokenLogprob(top.token_id, top.logprob) for top in token.logprobs.top),
    )


def _finished(finished: generation_pb2.Finished) -> Finished:
    speculation, timings = finished.speculation, finished.timings
    return Finished(
        finish_reason=_word(FinishReason, generation_pb2.FinishReason, finished.finish_reason),
        stop_string=finished.stop_string,
        usage=Usage(finished.usage.num_prompt_tokens, finished.usage.num_output_tokens),
        speculation=SpeculationStatistics(
            num_steps=speculation.num_steps,
            num_draft_tokens=speculation.num_draft_tokens,
            num_accepted_tokens=speculation.num_accepted_tokens,
            num_accepted_per_position=tuple(speculation.num_accepted_per_position),
            fallbacks=tuple(
                Fallback(_word(FallbackReason, common_pb2.FallbackReason, item.reason), item.position)
                for item in speculation.fallbacks
            ),
            verification=Verification.from_message(speculation.verification),
        ),
        timings=Timings(
            queue_seconds=timings.queue_seconds,
            prefill_seconds=timings.prefill_seconds,
            time_to_first_token_seconds=timings.time_to_first_token_seconds,
            total_seconds=timings.total_seconds,
        ),
    )


_Word = TypeVar("_Word", bound=StrEnum)


def _word(words: type[_Word], proto: ProtoEnum, number: int) -> _Word:
    try:
        return words(word(proto, number))
    except ValueError:
        return words("UNKNOWN")
