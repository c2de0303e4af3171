"""Sampling of draft tokens, and ranking of what may follow in their place.

A token that the verifier tests by p and q comes from a distribution that fits on the wire exactly: the drafter's shaped
one is cut to its most likely candidates and rounded to integers, and the token is drawn from those, so that the test
knows q without error (`kernels.rejection_sample`). It is drawn with DRAFT noise, never with TARGET noise, which would
draw what is recovered when it is rejected. A coupled sequence's token is the one that the target would draw if it were
the drafter: certain, as it needs no test.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from kernels.arguments import check_logits, check_shaping, check_tensor
from kernels.dispatch import runs_triton
from kernels.integer_weights import exponential_weights, row_chunks, sanitized
from kernels.limits import MAX_OUTCOMES, NUM_CANDIDATES, WEIGHT_TOTAL
from kernels.random import Purpose, exponentials_of, keyed_words, target_exponentials
from kernels.shape_logits import logit_thresholds

MAX_CANDIDATES = 1024


@dataclass(frozen=True)
class DraftSample:
    """One draft token a sequence, the distribution that it was drawn from, and the likely outcomes there."""

    token_ids: torch.Tensor  # [batch] int32
    candidate_ids: torch.Tensor  # [batch, m] int32, most likely first, lower id first among equals; coupled: all 0
    candidate_weights: torch.Tensor  # [batch, m] below 65,536 and summing to it; all 0: the token was certain
    # int32, or int16 with the bits of a uint16
    outcome_ids: torch.Tensor | None = None  # [batch, num_outcomes] int32, distinct, the draft token first
    outcome_scores: torch.Tensor | None = None  # [batch, num_outcomes] float32, falling from the second on


def draft_sample(
    logits: torch.Tensor,  # [batch, vocab_size] float32, bfloat16 or float16
    temperature: torch.Tensor,  # [batch] float32, finite; 0: greedy
    seeds: torch.Tensor,  # [batch] int64, the bit pattern of a uint64
    positions: torch.Tensor,  # [batch] int64: of the token to be drawn
    *,
    top_k: torch.Tensor | None = None,  # [batch] int32; 0: off
    top_p: torch.Tensor | None = None,  # [batch] float32; 1: off
    min_p: torch.Tensor | None = None,  # [batch] float32; 0: off
    num_candidates: int = NUM_CANDIDATES,
    max_candidates: torch.Tensor | None = None,  # [batch] int32, at least 1; None: num_candidates
    is_coupled: torch.Tensor | None = None,  # [batch] int32; not 0: verified by coupling; None: no sequence is
    num_outcomes: int = 0,  # at most 8, and no more than candidates or tokens
    out: DraftSample | None = None,  # contiguous tensors to write to, weights in either type
) -> DraftSample:
    """Draw one token a sequence, with DRAFT noise, from the most likely num_candidates tokens, at most 1,024.

    A sequence with a lower `max_candidates` gets what it would get if that were num_candidates, and has no weight
    behind: unlike top-k, which keeps all ties at its edge, this bounds how many columns have any.

    The candidates' probabilities are rounded to integers that sum to 65,536 by largest remainders. Slots that the
    vocabulary cannot fill have id 0 and weight 0. At temperature 0, where no logit is finite and where one candidate
    would take all the weight, the token is the most likely candidate and all weights are 0. Of equal logits the one
    with the lower id counts as more likely. NaN logits count as impossible.

    A coupled sequence with a temperature gets the best token of log q + g over all that the filters keep, certain:
    g = -log E is TARGET noise of token and position (`kernels.random`), q the whole shaped distribution.

    Outcomes are the tokens that the target may choose there. The first is the draft token, the others the best that
    remain: of log q + g for coupled sequences; of the logits at temperature 0; else of log q + g among the candidates
    that the filters keep, those behind `max_candidates` included, as what follows a rejection is seldom what q likes
    most. Scores are these values in natural units, the draft token's own among them. They are relative to the row's
    largest logit, but among candidates q is normalised over them. Where fewer tokens are possible, others follow with
    a score of -inf.

    Raises ValueError, naming the argument, when shapes or types do not fit.
    """
    check_logits("logits", logits)
    batch_size = len(logits)
    check_shaping(batch_size, logits.device, temperature, top_k, top_p, min_p)
    check_tensor("seeds", seeds, (batch_size,), (torch.int64,), logits.device)
    check_tensor("positions", positions, (batch_size,), (torch.int64,), logits.device)
    if max_candidates is not None:
        check_tensor("max_candidates", max_candidates, (batch_size,), (torch.int32,), logits.device)
    if is_coupled is not None:
        check_tensor("is_coupled", is_coupled, (batch_size,), (torch.int32,), logits.device)
    if not 1 <= num_candidates <= MAX_CANDIDATES:
        raise ValueError(f"num_candidates is {num_candidates}, expected 1 to {MAX_CANDIDATES}")
    most = min(MAX_OUTCOMES, num_candidates, logits.shape[1])
    if not 0 <= num_outcomes <= most:
        raise ValueError(f"num_outcomes is {num_outcomes}, expected 0 to {most}")
    if out is None:
        out = _new_sample(batch_size, num_candidates, num_outcomes, logits.device)
    else:
        _check_out(out, batch_size, num_candidates, num_outcomes, logits.device)
    if runs_triton(logits):
        from kernels.draft_sample_triton import launch_draft_sample

        launch_draft_sample(
            out, logits, temperature, seeds, positions, (top_k, top_p, min_p), max_candidates, is_coupled
        )
        return out
    thresholds = logit_thresholds(logits, temperature, top_k, top_p, min_p)
    reference = reference_draft_sample(
        logits, thresholds, temperature, seeds, positions, num_candidates, max_candidates, is_coupled, num_outcomes
    )
    for name, values in _tensors(out):
        values.copy_(getattr(reference, name))
    return out


def _new_sample(batch_size: int, num_candidates: int, num_outcomes: int, device: torch.device) -> DraftSample:
    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DraftSample(
        new(batch_size),
        new(batch_size, num_candidates),
        new(batch_size, num_candidates),
        new(batch_size, num_outcomes) if num_outcomes else None,
        new(batch_size, num_outcomes, dtype=torch.float32) if num_outcomes else None,
    )


def _check_out(out: DraftSample, batch_size: int, num_candidates: int, num_outcomes: int, device: torch.device) -> None:
    i32, shape = (torch.int32,), (batch_size, num_candidates)
    check_tensor("out.token_ids", out.token_ids, shape[:1], i32, device)
    check_tensor("out.candidate_ids", out.candidate_ids, shape, i32, device)
    check_tensor("out.candidate_weights", out.candidate_weights, shape, (torch.int16, torch.int32), device)
    if (out.outcome_ids is None) != (num_outcomes == 0) or (out.outcome_scores is None) != (num_outcomes == 0):
        raise ValueError(f"out has no room for outcomes, or some although num_outcomes is {num_outcomes}")
    if out.outcome_ids is not None and out.outcome_scores is not None:
        check_tensor("out.outcome_ids", out.outcome_ids, (batch_size, num_outcomes), i32, device)
        check_tensor("out.outcome_scores", out.outcome_scores, (batch_size, num_outcomes), (torch.float32,), device)
    for name, values in _tensors(out):
        if not values.is_contiguous():
            raise ValueError(f"out.{name} must be contiguous")


def _tensors(sample: DraftSample) -> list[tuple[str, torch.Tensor]]:
    """What a sample consists of."""
    values = ((field.name, getattr(sample, field.name)) for field in fields(sample))
    return [(name, value) for name, value in values if value is not None]


def reference_draft_sample(
    logits: torch.Tensor,  # [batch, vocab_size]
    thresholds: torch.Tensor | None,  # [batch] float32
    temperature: torch.Tensor,  # [batch] float32
    seeds: torch.Tensor,  # [batch] int64
    positions: torch.Tensor,  # [batch] int64
    num_candidates: int,
    max_candidates: torch.Tensor | None,  # [batch] int32
    is_coupled: torch.Tensor | None,  # [batch] int32
    num_outcomes: int,
) -> DraftSample:
    """`draft_sample` in plain torch."""
    values, ids = _most_likely(logits, min(num_candidates, logits.shape[1]))
    maxima = values[:, :1]
    kept = values if thresholds is None else torch.where(values >= thresholds.unsqueeze(1), values, -torch.inf)
    divisors = torch.where(temperature > 0, temperature, 1.0)
    weights = exponential_weights(kept, maxima[:, 0], divisors).long()
    if max_candidates is not None:
        slots = torch.arange(weights.shape[1], device=weights.device)
        weights = torch.where(slots < max_candidates.unsqueeze(1), weights, 0)
    weights = _rounded(weights)
    # A token that takes everything is certain, which is written as no weight at all: 65,536 does not fit in 16 bits.
    is_random = (temperature > 0) & (maxima[:, 0] > -torch.inf) & (weights[:, 0] < WEIGHT_TOTAL)
    weights = torch.where(is_random.unsqueeze(1), weights, 0)
    draws = keyed_words(seeds, positions, Purpose.DRAFT)[:, :1] >> 16
    places = torch.where(is_random, (weights.cumsum(dim=1) <= draws).sum(dim=1), 0).unsqueeze(1)
    # Distances to the largest logit, in natural units.
    kept = (kept - torch.where(maxima == -torch.inf, 0.0, maxima)) / divisors.unsqueeze(1)
    outcome_ids, outcome_scores = ids[:, :num_outcomes], kept[:, :num_outcomes]
    if num_outcomes and bool((temperature > 0).any()):
        scores = kept - kept.logsumexp(dim=1, keepdim=True).nan_to_num(neginf=0.0)
        scores = scores - exponentials_of(seeds, positions, ids).log().float()
        # The draft token stands before all others, whatever its score.
        order = scores.scatter(1, places, torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :num_outcomes]
        is_drawn = (temperature > 0).unsqueeze(1)
        outcome_ids = torch.where(is_drawn, ids.gather(1, order), outcome_ids)
        outcome_scores = torch.where(is_drawn, scores.gather(1, order), outcome_scores)
    token_ids = ids.gather(1, places).squeeze(1)

    coupled = torch.nonzero((temperature > 0) & (is_coupled != 0)).squeeze(1) if is_coupled is not None else ids[:0, 0]
    for chunk in row_chunks(len(coupled), logits.shape[1]):
        rows = coupled[chunk]
        scores, best = _best_coupled(
            logits[rows],
            None if thresholds is None else thresholds[rows],
            temperature[rows],
            target_exponentials(seeds[rows], positions[rows], logits.shape[1]),
            max(num_outcomes, 1),
        )
        token_ids[rows] = best[:, 0]
        ids[rows] = weights[rows] = 0
        if num_outcomes:
            outcome_ids[rows], outcome_scores[rows] = best, scores

    padding = (0, num_candidates - ids.shape[1])
    pad = torch.nn.functional.pad
    return DraftSample(
        token_ids.int(), pad(ids.int(), padding), pad(weights.int(), padding), outcome_ids.int(), outcome_scores
    )


def _best_coupled(
    logits: torch.Tensor,  # [n, vocab_size]
    thresholds: torch.Tensor | None,  # [n] float32
    temperature: torch.Tensor,  # [n] float32
    noise: torch.Tensor,  # [n, vocab_size] float64, changed
    num_best: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [n, num_best] float32, [n, num_best] int64
    """The best scores log q + g and their tokens, lower ids first among equals."""
    values = sanitized(logits)
    maxima = values.amax(dim=1, keepdim=True)
    scores = (values - torch.where(maxima == -torch.inf, 0.0, maxima)) / temperature.unsqueeze(1)
    if thresholds is not None:
        scores[values < thresholds.unsqueeze(1)] = -torch.inf
    return _most_likely(scores.double().sub_(noise.log_()), num_best)


def _most_likely(
    logits: torch.Tensor,  # [batch, vocab_size]
    num_top: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [batch, num_top] float32, sanitized, and int64
    """The largest logits in descending order and their ids, lower ids first among equals."""
    values = sanitized(logits)
    top_values, top_ids = values.topk(num_top, dim=1)
    # Which of the tokens equal to the last one are among the largest, topk leaves open.
    bounds = top_values[:, -1:]
    num_from_bound = (values >= bounds).sum(dim=1)
    for row in torch.nonzero(num_from_bound > num_top).flatten().tolist():
        num_above = int((top_values[row] > bounds[row]).sum())
        top_ids[row, num_above:] = torch.nonzero(values[row] == bounds[row]).flatten()[: num_top - num_above]
    top_ids, _ = top_ids.sort(dim=1)
    top_values, order = values.gather(1, top_ids).sort(dim=1, descending=True, stable=True)
    return top_values, top_ids.gather(1, order)


def _rounded(
    weights: torch.Tensor,  # [batch, k] int64, at most 2**40
) -> torch.Tensor:  # [batch, k] int64
    """Integers in proportion to the weights that sum to WEIGHT_TOTAL: rounded down, and the units that are then missing
    go to the largest remainders, the first among equals. Integer division leaves the remainders exact."""
    totals = weights.sum(dim=1, keepdim=True).clamp_min_(1)
    scaled = weights * WEIGHT_TOTAL
    floors = scaled // totals
    order = (scaled - floors * totals).argsort(dim=1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(weights.shape[1]).expand_as(order))
    return floors + (ranks < WEIGHT_TOTAL - floors.sum(dim=1, keepdim=True))
