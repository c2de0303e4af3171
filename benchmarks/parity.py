"""Whether speculation changes what is decoded greedily, as far as the number format lets that be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load import Request
from benchmarks.records import RefusalError
from outrider.client import TokenOrigin

NUM_LOGPROBS = 8
# Two forward passes over the same tokens in batches of different shapes round differently: bfloat16 logits between 16
# and 32 are an eighth apart, and two candidates may each be off by a step or two.
NEAR_TIE = {"cuda": 0.5, "cpu": 1e-3}


@dataclass(frozen=True)
class Parity:
    """What a comparison found."""

    num_sequences: int
    num_tokens: int
    num_identical: int  # sequences that are the same to the end
    num_near_ties: int  # sequences that part where two tokens were as good as equally likely


def check_parity(plain: Sequence[Request], speculative: Sequence[Request], device_type: str) -> Parity:
    """Compare greedy outputs of the same prompts, both with log-probabilities.

    Each sequence must be the same up to a near tie, and in both runs each token must be its own row's most likely one.
    Raises RefusalError where that is not so, and where the speculative run had no rejection or no full acceptance: it
    would have proved nothing.
    """
    tolerance = NEAR_TIE[device_type]
    num_identical = num_near_ties = 0
    for number, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        for request in (one, other):
            _check_greedy(number, request, tolerance)
        place = _first_difference(one.token_ids, other.token_ids)
        if place is None:
            num_identical += 1
            continue
        gap = _gap(one, other, place)
        if not gap <= tolerance:
            raise RefusalError(
                f"greedy outputs of prompt {number} differ from token {place} on: {one.token_ids[place : place + 3]} "
                f"without and {other.token_ids[place : place + 3]} with speculation, {gap:.3f} nats apart"
            )
        num_near_ties += 1
    origins = {origin for request in speculative for origin in request.origins}
    missing = {TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS} - origins
    if missing:
        raise RefusalError(f"the speculative run had no {' and no '.join(sorted(missing))} token: it proves nothing")
    num_tokens = sum(len(request.token_ids) for request in plain)
    return Parity(len(plain), num_tokens, num_identical, num_near_ties)


def _check_greedy(number: int, request: Request, tolerance: float) -> None:
    for place, (logprob, top) in enumerate(zip(request.logprobs, request.top_logprobs, strict=True)):
        if not max(top.values(), default=0.0) - logprob <= tolerance:
            raise RefusalError(f"token {place} of prompt {number} is not the most likely one at temperature 0")


def _gap(one: Request, other: Request, place: int) -> float:
    """How much less likely the other run's token was, in the run that took the other."""
    if place >= min(len(one.token_ids), len(other.token_ids)):
        return float("inf")
    gaps = [
        request.logprobs[place] - request.top_logprobs[place].get(chosen, float("-inf"))
        for request, chosen in ((one, other.token_ids[place]), (other, one.token_ids[place]))
    ]
    return max(gaps)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))
