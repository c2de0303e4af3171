"""Turns a gateway's OpenDecoding into a sequence, refusing what cannot be decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.sampling_tensors import new_history
from kernels.limits import MAX_DRAFT_TOKENS
from kernels.penalties import TokenHistory
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.verification import Verification
from outrider.protocol.wire import unpack_tokens
from outrider.v1 import common_pb2, verifier_pb2
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import LinkKey, Speculation

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class TargetLimits:
    """What the target model and the settings allow."""

    vocabulary_size: int
    max_length: int
    eos_token_ids: frozenset[int]
    max_draft_tokens: int  # K: what a request gets that names none, and the most that one gets from its drafter


def parse_opening(
    message: verifier_pb2.OpenDecoding,
    *,
    limits: TargetLimits,
    session_id: int,
    link_sequence_id: int,
    drafter: LinkKey | None,
    unasked_verification: Verification,
    draft_limits: DraftLimits | None = None,
    arrived_ns: int,
) -> TargetSequence:
    """The sequence that a gateway asks for, before any fallback is noted; `draft_limits` hold on its drafter's stream.

    `unasked_verification` is for requests that neither name a rule nor give a seed. Raises InvalidArgumentError naming
    the field.
    """
    token_ids = _token_ids(message.token_ids, limits)
    num_prompt_tokens = message.num_prompt_tokens
    if not 1 <= num_prompt_tokens <= len(token_ids):
        raise InvalidArgumentError("num_prompt_tokens", f"must be from 1 to {len(token_ids)}, is {num_prompt_tokens}")
    length_limit = limits.max_length
    if message.max_tokens:
        length_limit = min(length_limit, num_prompt_tokens + message.max_tokens)
    if len(token_ids) >= length_limit:
        raise InvalidArgumentError(
            "token_ids", f"{len(token_ids)} tokens leave nothing to generate below the limit of {length_limit}"
        )
    if message.max_draft_tokens > MAX_DRAFT_TOKENS:
        raise InvalidArgumentError(
            "max_draft_tokens", f"must be from 1 to {MAX_DRAFT_TOKENS}, is {message.max_draft_tokens}"
        )
    if message.HasField("logprobs") and message.logprobs > MAX_LOGPROBS:
        raise InvalidArgumentError("logprobs", f"must be from 0 to {MAX_LOGPROBS}, is {message.logprobs}")
    if not message.sampling.HasField("seed"):
        # The default would give all sequences the same random numbers.
        raise InvalidArgumentError("sampling.seed", "must be set")
    sampling = SamplingParameters.from_message(message.sampling, vocabulary_size=limits.vocabulary_size)
    _check_enum("verification", message.verification, common_pb2.Verification)
    _check_enum("no_drafter_reason", message.no_drafter_reason, common_pb2.FallbackReason)
    eos_token_ids = frozenset[int]() if message.ignore_eos else limits.eos_token_ids
    ending_token_ids = eos_token_ids.union(message.stop_token_ids)
    has_minimum = message.min_tokens > len(token_ids) - num_prompt_tokens and bool(ending_token_ids)
    return TargetSequence(
        session_id=session_id,
        sequence_id=message.sequence_id,
        link_sequence_id=link_sequence_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        sampling=sampling,
        length_limit=length_limit,
        eos_token_ids=eos_token_ids,
        stop_token_ids=frozenset(message.stop_token_ids),
        num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        # More than the graphs hold would slow down everybody who shares a step with it.
        max_draft_tokens=min(message.max_draft_tokens or limits.max_draft_tokens, limits.max_draft_tokens),
        verification=_verification(message, sampling, unasked_verification),
        speculation=Speculation(drafter)
        if draft_limits is None
        else Speculation(drafter, takes_turns=draft_limits.takes_turns, max_expansions=draft_limits.max_expansions),
        traceparent=message.traceparent,
        request_id=message.request_id,
        arrived_ns=arrived_ns,
        history=TokenHistory(
            token_ids[:num_prompt_tokens],
            token_ids[num_prompt_tokens:],
            sampling.logit_bias,
            banned_token_ids=ending_token_ids,
            min_output=message.min_tokens,
        )
        if has_minimum
        else new_history(sampling, token_ids, num_prompt_tokens),
        min_length=num_prompt_tokens + message.min_tokens if has_minimum else 0,
    )


def _verification(
    message: verifier_pb2.OpenDecoding, sampling: SamplingParameters, unasked: Verification
) -> Verification:
    """The rule that holds from here on, whatever the request said or did not say."""
    named = Verification.from_message(message.verification)
    if sampling.is_greedy:
        return Verification.GREEDY
    if named is Verification.GREEDY:
        raise InvalidArgumentError("verification", "GREEDY needs temperature 0: above, it would change the output")
    # A seed asks for output that can be had again, which nothing else than coupling gives whatever the drafts are.
    return named or (Verification.COUPLED if message.is_seeded else unasked)


def _check_enum(field: str, value: int, enum: Any) -> None:
    if value not in enum.values():
        raise InvalidArgumentError(field, f"{value} is no value of {enum.DESCRIPTOR.name}")


def _token_ids(data: bytes, limits: TargetLimits) -> list[int]:
    try:
        token_ids = unpack_tokens(data)
    except ValueError as error:
        raise InvalidArgumentError("token_ids", str(error)) from error
    if not token_ids:
        raise InvalidArgumentError("token_ids", "is empty")
    if max(token_ids) >= limits.vocabulary_size:
        raise InvalidArgumentError(
            "token_ids", f"{max(token_ids)} is not below the vocabulary size {limits.vocabulary_size}"
        )
    return token_ids
