"""Sequences as a verifier's engine holds them, for benchmarks that need no gateway."""

from __future__ import annotations

import time

from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.verification import Verification
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import LinkKey, Speculation


def speculating_sequence(
    number: int,
    drafter: LinkKey,
    *,
    num_prompt_tokens: int,
    length_limit: int,  # prompt included
    num_draft_tokens: int,
    traceparent: str = "",
) -> TargetSequence:
    """A sequence of the first session, at temperature 1, that ends by its length alone."""
    return TargetSequence(
        session_id=1,
        sequence_id=number,
        link_sequence_id=number,
        token_ids=[3] * num_prompt_tokens,
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParameters(temperature=1.0, seed=number),
        length_limit=length_limit,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset(),
        num_logprobs=None,
        max_draft_tokens=num_draft_tokens,
        verification=Verification.REJECTION,
        speculation=Speculation(drafter),
        traceparent=traceparent,
        request_id=str(number),
        arrived_ns=time.time_ns(),
        history=None,
    )
