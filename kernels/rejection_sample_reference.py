"""`kernels.rejection_sample` in plain torch: what the Triton kernels are held to, and what CPU serving runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kernels.integer_weights import MASS_BITS, choose, exponential_weights, row_chunks
from kernels.limits import WEIGHT_TOTAL
from kernels.random import Purpose, keyed_words, uniforms
from kernels.shape_logits import PenalizedLogits


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
    max_num_draft_tokens: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [batch, max_num_draft_tokens + 1] int32, [batch] int32
    """Token ids and numbers of accepted tokens, as `RejectionSample` describes them."""
    batch_size, width = len(temperature), max_num_draft_tokens + 1
    sequences = torch.arange(batch_size)
    num_draft = cu_num_draft_tokens.diff().long()
    first_draft = cu_num_draft_tokens[:-1].long()
    draft_sequences = sequences.repeat_interleave(num_draft)
    total_draft = len(draft_sequences)
    draft_steps = torch.arange(total_draft) - first_draft[draft_sequences]
    draft_rows = torch.arange(total_draft) + draft_sequences
    drafts = draft_token_ids[:total_draft].long()

    row_sequences = sequences.repeat_interleave(num_draft + 1)
    target = _Target(logits, thresholds, temperature[row_sequences], block_size)
    accepted = drafts == target.argmax[draft_rows]
    is_random = temperature > 0
    candidates = _candidates(
        drafts, candidate_ids[:total_draft], candidate_weights[:total_draft], logits.logits.shape[1]
    )
    if is_random.any():
        noise, _ = uniforms(
            keyed_words(
                seeds[draft_sequences],
                positions[draft_sequences] + draft_steps,
                torch.full_like(draft_steps, Purpose.ACCEPT),
            )
        )
        draft_masses = target.token_masses(draft_rows, candidates.ids[:, :1]).squeeze(1) * candidates.is_valid
        # u < p(x) / q(x), multiplied out.
        passes = noise * candidates.draft_weights * target.totals[draft_rows] < draft_masses * WEIGHT_TOTAL
        accepted = torch.where(is_random[draft_sequences], passes, accepted)

    steps = torch.zeros(batch_size, width, dtype=torch.bool)
    steps[draft_sequences, draft_steps] = accepted
    num_accepted = steps.long().cumprod(dim=1).sum(dim=1)
    final_rows = first_draft + sequences + num_accepted
    final_tokens = target.argmax[final_rows]
    if is_random.any():
        recovers = num_accepted < num_draft
        noise_purposes = torch.where(recovers, Purpose.RECOVER, Purpose.BONUS)
        token_noise, block_noise = uniforms(keyed_words(seeds, positions + num_accepted, noise_purposes))
        rejected = torch.where(recovers, first_draft + num_accepted, 0)
        if total_draft:
            ids, weights = candidates.ids[rejected], candidates.weights[rejected] * recovers.unsqueeze(1)
        else:
            ids, weights = (torch.zeros(batch_size, 1, dtype=torch.int64) for _ in range(2))
        sampled = target.sample(final_rows, ids, weights, token_noise, block_noise)
        final_tokens = torch.where(is_random, sampled, final_tokens)

    token_ids = torch.full((batch_size, width), -1, dtype=torch.int32)
    token_ids[draft_sequences, draft_steps] = drafts.int()
    token_ids[torch.arange(width) > num_accepted.unsqueeze(1)] = -1
    token_ids[sequences, num_accepted] = final_tokens.int()
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
    """The target's distributions as integer weights in blocks; see `kernels.integer_weights`."""

    def __init__(
        self,
        logits: PenalizedLogits,  # [at least num_rows, vocab_size]
        thresholds: torch.Tensor | None,  # [at least num_rows] float32
        temperatures: torch.Tensor,  # [num_rows] float32
        block_size: int,
    ) -> None:
        num_rows, vocab_size = len(temperatures), logits.logits.shape[1]
        self._block_size = min(block_size, vocab_size)
        padding = -vocab_size % self._block_size
        num_blocks = (vocab_size + padding) // self._block_size
        # Each block's weights are in a unit of its own.
        self._weights = torch.empty(num_rows, num_blocks, self._block_size)
        # A block's unit in terms of the row's largest.
        self._units = torch.zeros(num_rows, num_blocks, dtype=torch.float64)
        self._block_weights = torch.zeros(num_rows, num_blocks, dtype=torch.float64)
        self.totals = torch.zeros(num_rows, dtype=torch.float64)
        self.argmax = torch.empty(num_rows, dtype=torch.int64)
        for chunk in row_chunks(num_rows, vocab_size):
            dense = logits.dense(chunk)
            self.argmax[chunk] = torch.from_numpy(dense.numpy().argmax(axis=1))  # several times faster than torch's
            if not (temperatures[chunk] > 0).any():
                self._weights[chunk] = 0
                continue
            divisors = torch.where(temperatures[chunk] > 0, temperatures[chunk], 1.0).unsqueeze(1)
            blocks = (pad(dense, (0, padding), value=-torch.inf) if padding else dense).view(
                -1, num_blocks, self._block_size
            )
            block_maxima = blocks.amax(dim=2)
            weights = exponential_weights(blocks, block_maxima, divisors)
            if thresholds is not None:
                # Below the threshold the difference is negative; -inf - -inf is NaN and its weight is 0 as it is.
                weights.mul_(blocks.sub_(thresholds[chunk, None, None]).ge_(0))
            maxima = block_maxima.amax(dim=1, keepdim=True)
            maxima = torch.where(maxima == -torch.inf, 0.0, maxima)
            self._weights[chunk] = weights
            self._units[chunk] = ((block_maxima - maxima) / divisors).exp()
            self._block_weights[chunk] = weights.double().sum(dim=2)
            self.totals[chunk] = (self._block_weights[chunk] * self._units[chunk]).sum(dim=1)

    def token_masses(
        self,
        rows: torch.Tensor,  # [n] int64
        token_ids: torch.Tensor,  # [n, k] int64
    ) -> torch.Tensor:  # [n, k] float64
        """p of tokens, times the row's total."""
        return self._token_weights(rows, token_ids) * self._token_units(rows, token_ids)

    def sample(
        self,
        rows: torch.Tensor,  # [n] int64
        candidate_ids: torch.Tensor,  # [n, m] int64
        candidate_weights: torch.Tensor,  # [n, m] int64: q, all 0 to sample from p
        token_noise: torch.Tensor,  # [n] float64
        block_noise: torch.Tensor,  # [n] float64
    ) -> torch.Tensor:  # [n] int64
        """Draw from the positive part of p - q: first a block, then a token within it."""
        candidate_blocks = candidate_ids // self._block_size
        covers = self._covers(rows, candidate_ids, candidate_weights)
        left = self._block_weights[rows].scatter_add_(1, candidate_blocks, -covers).clamp_min_(0)
        # p = q up to rounding leaves nothing behind: then p is as good as the residual.
        is_empty = left.sum(dim=1, keepdim=True) == 0
        left = torch.where(is_empty, self._block_weights[rows], left)
        covers = torch.where(is_empty, 0.0, covers)
        blocks = torch.zeros_like(rows)
        if left.shape[1] > 1:
            masses = left * self._units[rows]
            heaviest = masses.amax(dim=1, keepdim=True)
            heaviest = torch.where(heaviest > 0, heaviest, 1.0)
            blocks = choose((masses / heaviest * 2.0**MASS_BITS).floor_(), block_noise)
        covers.mul_(candidate_blocks == blocks.unsqueeze(1))
        weights = self._weights[rows, blocks].double()
        weights.scatter_add_(1, candidate_ids % self._block_size, -covers).clamp_min_(0)
        return blocks * self._block_size + choose(weights, token_noise)

    def _covers(
        self,
        rows: torch.Tensor,  # [n] int64
        candidate_ids: torch.Tensor,  # [n, m] int64
        candidate_weights: torch.Tensor,  # [n, m] int64
    ) -> torch.Tensor:  # [n, m] float64, integers
        """min(p, q) of candidates as integer weights in the units of their blocks."""
        shares = candidate_weights * self.totals[rows].unsqueeze(1) / WEIGHT_TOTAL
        units = self._token_units(rows, candidate_ids)
        # A unit of 0 is a block too unlikely to be drawn: whatever is covered there makes no difference.
        shares /= torch.where(units > 0, units, 1.0)
        return torch.minimum(self._token_weights(rows, candidate_ids), shares).floor_()

    def _token_weights(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        blocks = token_ids // self._block_size
        return self._weights[rows.unsqueeze(1), blocks, token_ids % self._block_size].double()

    def _token_units(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self._units[rows.unsqueeze(1), token_ids // self._block_size]
