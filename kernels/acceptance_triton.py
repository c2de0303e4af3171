"""Device functions that test the draft tokens of a sequence; see `kernels.rejection_sample`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.block_draw_triton import smallest_of_blocks
from kernels.integer_weights_triton import finite_or_zero
from kernels.random import Purpose
from kernels.random_triton import philox_words, uniform

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))


@triton.jit
def tests_by_p_and_q(sequence, temperature, num_draft, is_coupled_ptr):
    """Whether the sequence's draft tokens are tested by p and q, not compared with the target's own tokens."""
    is_tested = (temperature > 0.0) & (num_draft > 0)
    if is_coupled_ptr is not None:
        is_tested = is_tested & (tl.load(is_coupled_ptr + sequence) == 0)
    return is_tested


@triton.jit
def load_candidates(
    draft,
    draft_token,
    candidate_ids_ptr,
    candidate_weights_ptr,
    num_candidates,
    vocab_size,
    NUM_CANDIDATES: tl.constexpr,
):
    """Ids and weights of q, weight 0 for what is absent, and q of the draft token; one-hot where it is not named."""
    slots = tl.arange(0, NUM_CANDIDATES)
    mask = slots < num_candidates
    place = draft.to(tl.int64) * num_candidates + slots
    ids = tl.load(candidate_ids_ptr + place, mask=mask, other=0)
    weights = tl.load(candidate_weights_ptr + place, mask=mask, other=0)
    is_present = (ids >= 0) & (ids < vocab_size) & (weights > 0)
    ids = tl.where(is_present, ids, 0)
    weights = tl.where(is_present, weights, 0)
    draft_weight = tl.sum(tl.where(ids == draft_token, weights, 0), axis=0)
    if draft_weight == 0:
        is_valid = (draft_token >= 0) & (draft_token < vocab_size)
        ids = tl.where((slots == 0) & is_valid, draft_token, 0)
        weights = tl.where((slots == 0) & is_valid, 65536, 0)
        draft_weight = 65536
    return ids, weights, draft_weight


@triton.jit
def count_accepted(
    sequence,
    first_draft,
    num_draft,
    temperature,
    is_tested,
    draft_token_ids_ptr,  # [total_draft] int32
    seeds_ptr,  # [batch] int64
    positions_ptr,  # [batch] int64
    maxima_ptr,  # [num_rows, num_blocks] float32
    keys_ptr,  # [num_rows, num_blocks] float32: of the token that each block draws
    tokens_ptr,  # [num_rows, num_blocks] int32: that token
    weights_ptr,  # [num_rows, num_blocks] int64
    draft_weights_ptr,  # [total_draft, 2] int64: of each draft token in its block, and of 65,536 in q
    num_blocks,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """How many draft tokens are accepted; of the row behind them, if it is tested, its maximum and its total weight."""
    steps = tl.arange(0, STEPS)
    is_step = steps < num_draft
    drafts = first_draft + steps
    rows = tl.where(is_step, drafts + sequence, -1).to(tl.int64)
    draft_tokens = tl.load(draft_token_ids_ptr + drafts, mask=is_step, other=-1)
    maxima_of_rows = tl.zeros([STEPS], dtype=tl.float32)
    totals = tl.zeros([STEPS], dtype=tl.float64)
    if is_tested:
        blocks = tl.arange(0, NUM_BLOCKS)
        places = rows[:, None] * num_blocks + blocks[None, :]
        mask = is_step[:, None] & (blocks < num_blocks)[None, :]
        maxima = tl.load(maxima_ptr + places, mask=mask, other=float("-inf"))
        weights = tl.load(weights_ptr + places, mask=mask, other=0)
        maxima_of_rows = finite_or_zero(tl.max(maxima, axis=1))
        units = tl.exp((maxima - maxima_of_rows[:, None]) / temperature).to(tl.float64)
        totals = tl.sum(weights.to(tl.float64) * units, axis=1)
        p_weights = tl.load(draft_weights_ptr + drafts * 2, mask=is_step, other=0).to(tl.float64)
        q_weights = tl.load(draft_weights_ptr + drafts * 2 + 1, mask=is_step, other=0).to(tl.float64)
        is_own = blocks[None, :] == (draft_tokens // BLOCK)[:, None]
        masses = p_weights * tl.sum(tl.where(is_own, units, 0.0), axis=1)
        position = tl.load(positions_ptr + sequence) + steps
        w0, w1, _, _ = philox_words(tl.load(seeds_ptr + sequence), position, _ACCEPT, 0)
        # u < p(x) / q(x), multiplied out.
        is_accepted = uniform(w0, w1) * q_weights * totals < masses * 65536.0
    else:
        scale = 1.4426950408889634 / tl.where(temperature > 0.0, temperature, 1.0)
        own_tokens = smallest_of_blocks(rows, scale, maxima_ptr, keys_ptr, tokens_ptr, num_blocks, NUM_BLOCKS)
        is_accepted = draft_tokens == own_tokens
    num_accepted = tl.min(tl.where(is_step & (is_accepted == 0), steps, num_draft), axis=0)
    is_next = steps == num_accepted
    maximum = tl.sum(tl.where(is_next, maxima_of_rows, 0.0), axis=0)
    return num_accepted, maximum, tl.sum(tl.where(is_next, totals, 0.0), axis=0)
