"""`kernels.rejection_sample` in plain torch: what the Triton kernels are held to, and what CPU serving runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kernels.integer_weights import exponential_weights, row_chunks
from kernels.limits import WEIGHT_TOTAL
from kernels.random import Purpose, keyed_words, target_exponentials, uniforms
from kernels.shape_logits import PenalizedLogits

# What q covers wholly stands this far behind everything else: drawn only where q leaves nothing of p at all.
_COVERED = 256.0


def reference_rejection_sample(
    logits: PenalizedLogits,  # [num_rows, vocab_size]
    thresholds: torch.Tensor | None,  # [num_rows] float32
    cu_num_draft_tokens: torch.Tensor,  # [batch + 1] int32
    draft_token_ids: torch.Tensor,  # [total_draft] int32
    candidate_ids: torch.Tensor,  # [total_draft, m] int32
    candidate_weights: torch.Tensor,  # [total_draft, m] int32
    temperature: torch.Tensor,  # [batch] float32
    seeds: torch.Tensor,  # [batch] int64
    positions: torch.Tensor,  # [batch] int64
    is_coupled: torch.Tensor | None,  # [batch] int32
    max_num_draft_tokens: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [batch, max_num_draft_tokens + 1] int32, [batch] int32
    """Token ids and numbers of accepted tokens, as `RejectionSample` describes them."""
    batch_size, width = len(temperature), max_num_draft_tokens + 1
    sequences = torch.arange(batch_size)
    num_draft = cu_num_draft_tokens.diff().long()
    first_rows = cu_num_draft_tokens[:-1].long() + sequences
    draft_sequences = sequences.repeat_interleave(num_draft)
    total_draft = len(draft_sequences)
    draft_rows = torch.arange(total_draft) + draft_sequences
    draft_steps = draft_rows - first_rows[draft_sequences]
    drafts = draft_token_ids[:total_draft].long()

    is_random = temperature > 0
    draws_all = torch.zeros_like(is_random) if is_coupled is None else is_random & (is_coupled != 0)
    is_tested = (is_random & ~draws_all)[draft_sequences]
    row_sequences = sequences.repeat_interleave(num_draft + 1)
    row_positions = positions[row_sequences] + torch.arange(total_draft + batch_size) - first_rows[row_sequences]
    target = _Target(logits, thresholds, temperature[row_sequences], seeds[row_sequences], row_positions, block_size)

    # The target's own tokens: of every row where they are compared with the drafts, of the rest when it is known which.
    own_tokens = torch.zeros(total_draft + batch_size, dtype=torch.int64)
    greedy_rows = torch.nonzero(~is_random[row_sequences]).squeeze(1)
    own_tokens[greedy_rows] = target.most_likely(greedy_rows)
    coupled_rows = torch.nonzero(draws_all[row_sequences]).squeeze(1)
    own_tokens[coupled_rows] = target.draw(coupled_rows)
    accepted = drafts == own_tokens[draft_rows]
    candidates = _candidates(
        drafts, candidate_ids[:total_draft], candidate_weights[:total_draft], logits.logits.shape[1]
    )
    tested = torch.nonzero(is_tested).squeeze(1)
    tested_rows = draft_rows[tested]
    target.weigh(tested_rows)
    if len(tested):
        noise = uniforms(keyed_words(seeds[row_sequences[tested_rows]], row_positions[tested_rows], Purpose.ACCEPT))
        masses = target.masses(tested_rows, candidates.ids[tested, :1]).squeeze(1) * candidates.is_valid[tested]
        # u < p(x) / q(x), multiplied out.
        accepted[tested] = noise * candidates.draft_weights[tested] * target.totals[tested_rows] < masses * WEIGHT_TOTAL

    steps = torch.zeros(batch_size, width, dtype=torch.bool)
    steps[draft_sequences, draft_steps] = accepted
    num_accepted = steps.long().cumprod(dim=1).sum(dim=1)
    final_rows = first_rows + num_accepted
    draws_last = is_random & ~draws_all
    is_recovered = draws_last & (num_accepted < num_draft)
    rows = final_rows[draws_last & ~is_recovered]
    own_tokens[rows] = target.draw(rows)
    rows = final_rows[is_recovered]
    rejected = rows - sequences[is_recovered]
    own_tokens[rows] = target.draw(rows, candidates.ids[rejected], candidates.weights[rejected])

    token_ids = torch.full((batch_size, width), -1, dtype=torch.int32)
    token_ids[draft_sequences, draft_steps] = drafts.int()
    token_ids[torch.arange(width) > num_accepted.unsqueeze(1)] = -1
    token_ids[sequences, num_accepted] = own_tokens[final_rows].int()
    return token_ids, num_accepted.int()


@dataclass(frozen=True)
class _Candidates:
    """q of each draft token. The draft token's own column comes first: weight 0, or all of it where q is one-hot.

    What is absent has id 0 and weight 0.
    """

    is_valid: torch.Tensor  # [total_draft] bool: the draft token is in the vocabulary
    ids: torch.Tensor  # [total_draft, m + 1] int64
    weights: torch.Tensor  # [total_draft, m + 1] int64
    draft_weights: torch.Tensor  # [total_draft] int64: q of the draft token


def _candidates(
    drafts: torch.Tensor,  # [total_draft] int64
    candidate_ids: torch.Tensor,  # [total_draft, m] int32
    candidate_weights: torch.Tensor,  # [total_draft, m] int32
    vocab_size: int,
) -> _Candidates:
    is_valid = (drafts >= 0) & (drafts < vocab_size)
    is_present = (candidate_ids >= 0) & (candidate_ids < vocab_size) & (candidate_weights > 0)
    weights = torch.where(is_present, candidate_weights, 0).long()
    draft_weights = torch.where(candidate_ids == drafts.unsqueeze(1), weights, 0).sum(dim=1)
    is_one_hot = draft_weights == 0
    own_weights = torch.where(is_one_hot & is_valid, WEIGHT_TOTAL, 0).unsqueeze(1)
    return _Candidates(
        is_valid,
        torch.cat([torch.where(is_valid, drafts, 0).unsqueeze(1), torch.where(is_present, candidate_ids, 0)], dim=1),
        torch.cat([own_weights, torch.where(is_one_hot.unsqueeze(1), 0, weights)], dim=1),
        torch.where(is_one_hot, WEIGHT_TOTAL, draft_weights),
    )


class _Target:
    """The target's distributions: tokens drawn from them, and probabilities as integer weights in blocks.

    See `kernels.integer_weights`. Work is done for the rows that a method names, and for no others.
    """

    def __init__(
        self,
        logits: PenalizedLogits,  # [at least num_rows, vocab_size]
        thresholds: torch.Tensor | None,  # [at least num_rows] float32
        temperatures: torch.Tensor,  # [num_rows] float32
        seeds: torch.Tensor,  # [num_rows] int64
        positions: torch.Tensor,  # [num_rows] int64
        block_size: int,
    ) -> None:
        self._logits = logits
        self._thresholds = thresholds
        self._temperatures = temperatures
        self._seeds = seeds
        self._positions = positions
        num_rows, vocab_size = len(temperatures), logits.logits.shape[1]
        self._block_size = min(block_size, vocab_size)
        num_blocks = -(-vocab_size // self._block_size)
        # Each block's weights are in a unit of its own.
        self._weights = torch.empty(num_rows, num_blocks, self._block_size)
        # A block's unit in terms of the row's largest.
        self._units = torch.empty(num_rows, num_blocks, dtype=torch.float64)
        self.totals = torch.empty(num_rows, dtype=torch.float64)

    def most_likely(self, rows: torch.Tensor) -> torch.Tensor:  # both [n] int64
        """Each row's most likely token, the lowest id among equals."""
        token_ids = torch.empty_like(rows)
        for chunk in self._chunks(rows):
            token_ids[chunk] = _first_largest(self._logits.dense(rows[chunk]))
        return token_ids

    def weigh(self, rows: torch.Tensor) -> None:  # [n] int64
        """Set the weights and totals of rows that `masses` or a residual is asked of."""
        for chunk in self._chunks(rows):
            places = rows[chunk]
            dense = self._logits.dense(places)
            padding = -dense.shape[1] % self._block_size
            blocks = pad(dense, (0, padding), value=-torch.inf) if padding else dense
            blocks = blocks.view(len(places), -1, self._block_size)
            temperatures = self._temperatures[places].unsqueeze(1)
            block_maxima = blocks.amax(dim=2)
            weights = exponential_weights(blocks, block_maxima, temperatures)
            if self._thresholds is not None:
                # Below the threshold the difference is negative; -inf - -inf is NaN and its weight is 0 as it is.
                weights.mul_(blocks.sub_(self._thresholds[places, None, None]).ge_(0))
            maxima = _finite_or_zero(block_maxima.amax(dim=1, keepdim=True))
            units = ((block_maxima - maxima) / temperatures).exp().double()
            self._weights[places] = weights
            self._units[places] = units
            self.totals[places] = (weights.double().sum(dim=2) * units).sum(dim=1)

    def masses(
        self,
        rows: torch.Tensor,  # [n] int64, weighed
        token_ids: torch.Tensor,  # [n, k] int64
    ) -> torch.Tensor:  # [n, k] float64
        """p of tokens, times the row's total."""
        blocks, places = token_ids // self._block_size, rows.unsqueeze(1)
        return self._weights[places, blocks, token_ids % self._block_size].double() * self._units[places, blocks]

    def draw(
        self,
        rows: torch.Tensor,  # [n] int64
        candidate_ids: torch.Tensor | None = None,  # [n, m] int64, of rows that are weighed
        candidate_weights: torch.Tensor | None = None,  # [n, m] int64
    ) -> torch.Tensor:  # [n] int64
        """Draw a token of each row with TARGET noise: from p, or from the positive part of p - q."""
        token_ids = torch.empty_like(rows)
        for chunk in self._chunks(rows):
            places = rows[chunk]
            dense = self._logits.dense(places)
            scores = (dense - _finite_or_zero(dense.amax(dim=1, keepdim=True))) / self._temperatures[places, None]
            if self._thresholds is not None:
                scores[dense < self._thresholds[places, None]] = -torch.inf
            noise = target_exponentials(self._seeds[places], self._positions[places], dense.shape[1])
            scores = scores.double().sub_(noise.log_())
            if candidate_ids is not None and candidate_weights is not None:
                ids, weights = candidate_ids[chunk], candidate_weights[chunk]
                scores.scatter_add_(1, ids, self._shares_left(places, ids, weights))
            token_ids[chunk] = _first_largest(scores)
        return token_ids

    def _shares_left(
        self,
        rows: torch.Tensor,  # [n] int64, weighed
        candidate_ids: torch.Tensor,  # [n, m] int64
        candidate_weights: torch.Tensor,  # [n, m] int64
    ) -> torch.Tensor:  # [n, m] float64
        """log((p - q) / p) of candidates, 0 where q is 0."""
        covers = candidate_weights * self.totals[rows].unsqueeze(1) / WEIGHT_TOTAL
        masses = self.masses(rows, candidate_ids)
        is_left = masses > covers
        shares = torch.where(is_left, 1 - covers / masses, 1.0).log()
        return torch.where(is_left | (candidate_weights == 0), shares, -_COVERED)

    def _chunks(self, rows: torch.Tensor) -> Iterator[slice]:
        return row_chunks(len(rows), self._logits.logits.shape[1])


def _finite_or_zero(maxima: torch.Tensor) -> torch.Tensor:
    return torch.where(maxima == -torch.inf, 0.0, maxima)


def _first_largest(values: torch.Tensor) -> torch.Tensor:  # [n, vocab_size] -> [n] int64
    """The place of each row's largest value, the first among equals. numpy is several times faster than torch."""
    return torch.from_numpy(values.numpy().argmax(axis=1))
