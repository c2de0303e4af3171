"""Triton kernels of `kernels.rejection_sample`.

The grids depend on shapes alone. The pass over all logits, split over blocks of the vocabulary, leaves statistics of
the blocks behind; filters turn these into a threshold a row and cut the blocks' weights by it; `_accept_kernel` tests
each draft token; `_emit_kernel` counts the accepted ones and draws the token behind them, for which it reads one more
block of one row.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.block_statistics_triton import (
    kept_weights,
    launch_block_statistics,
    launch_kept_weights,
    row_argmax,
    row_statistics,
)
from kernels.integer_weights_triton import choose, choose_at, load_logits, target_of
from kernels.random import Purpose
from kernels.random_triton import philox_words, uniform
from kernels.shape_logits import PenalizedLogits
from kernels.thresholds_triton import Filters, launch_thresholds

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_RECOVER = tl.constexpr(int(Purpose.RECOVER))
_BONUS = tl.constexpr(int(Purpose.BONUS))


@triton.jit
def _load_candidates(
    draft,
    draft_token,
    candidate_ids_ptr,
    candidate_weights_ptr,
    num_candidates,
    num_read,  # how many of them to read
    vocab_size,
    NUM_CANDIDATES: tl.constexpr,
):
    """Ids and weights of q, weight 0 for what is absent, and q of the draft token; one-hot where it is not named."""
    slots = tl.arange(0, NUM_CANDIDATES)
    mask = slots < num_read
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
def _load_threshold(row, thresholds_ptr):
    threshold = tl.full([], float("-inf"), tl.float32)
    if thresholds_ptr is not None:
        threshold = tl.load(thresholds_ptr + row)
    return threshold


@triton.jit
def _token_weights(
    token_ids,
    row,
    temperature,
    logits_ptr,
    logits_stride,
    replacements_ptr,
    replacement_rows_ptr,
    thresholds_ptr,
    block_maxima_ptr,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Integer weights of single tokens, each in the unit of its block, and the maxima of their blocks.

    Ids outside the vocabulary have weight 0.
    """
    logits = load_logits(row, token_ids, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size)
    mask = (token_ids >= 0) & (token_ids < vocab_size)
    maxima = tl.load(block_maxima_ptr + row * num_blocks + token_ids // BLOCK, mask=mask, other=0.0)
    return kept_weights(logits, maxima, temperature, _load_threshold(row, thresholds_ptr)), maxima


@triton.jit
def _sums_at(places, amounts, SIZE: tl.constexpr):
    """Sums of the amounts at each place from 0 to SIZE."""
    is_at = places[:, None] == tl.arange(0, SIZE)[None, :]
    return tl.sum(tl.where(is_at, amounts[:, None], 0), axis=0)


@triton.jit
def _choose_token(
    block,
    noise,
    ids,  # of the candidates
    covers,  # int64: what is taken from their weights
    row,
    temperature,
    logits_ptr,
    logits_stride,
    replacements_ptr,
    replacement_rows_ptr,
    thresholds_ptr,
    block_maxima_ptr,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Choose among a block's tokens by what the candidates leave of their weights.

    First a span, then a token in it: the one at which the cumulative weight of all the block's tokens passes the
    target, while candidates need only be matched with spans and with one span's tokens.
    """
    SPAN: tl.constexpr = BLOCK if BLOCK < 64 else 64
    SPANS: tl.constexpr = BLOCK // SPAN
    maximum = tl.load(block_maxima_ptr + row * num_blocks + block)
    threshold = _load_threshold(row, thresholds_ptr)
    starts = block * BLOCK + tl.arange(0, SPANS) * SPAN
    offsets = tl.arange(0, SPAN)
    logits = load_logits(
        row,
        starts[:, None] + offsets[None, :],
        logits_ptr,
        logits_stride,
        replacements_ptr,
        replacement_rows_ptr,
        vocab_size,
    )
    places = ids - block * BLOCK
    covers = tl.where((places >= 0) & (places < BLOCK), covers, 0)
    weights = tl.sum(kept_weights(logits, maximum, temperature, threshold), axis=1)
    weights = tl.maximum(weights - _sums_at(places // SPAN, covers, SPANS), 0)
    span, target = choose_at(weights, target_of(noise, tl.sum(weights, axis=0)))

    columns = block * BLOCK + span * SPAN + offsets
    logits = load_logits(row, columns, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size)
    covers = tl.where(places // SPAN == span, covers, 0)
    weights = kept_weights(logits, maximum, temperature, threshold) - _sums_at(places % SPAN, covers, SPAN)
    offset, _ = choose_at(tl.maximum(weights, 0), target)
    return block * BLOCK + span * SPAN + offset


@triton.jit
def _accept_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    thresholds_ptr,  # [num_rows] float32, or None
    temperature_ptr,  # [batch] float32
    cu_num_draft_ptr,  # [batch + 1] int32
    draft_token_ids_ptr,  # [total_draft] int32
    candidate_ids_ptr,  # [total_draft, num_candidates] int32
    candidate_weights_ptr,  # [total_draft, num_candidates] int32
    seeds_ptr,  # [batch] int64
    positions_ptr,  # [batch] int64
    block_maxima_ptr,  # [num_rows, num_blocks] float32
    block_argmax_ptr,  # [num_rows, num_blocks] int32
    block_weights_ptr,  # [num_rows, num_blocks] int64
    accepted_ptr,  # [total_draft] int32
    vocab_size,
    num_blocks,
    num_candidates,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
):
    sequence = tl.program_id(0)
    step = tl.program_id(1)
    first_draft = tl.load(cu_num_draft_ptr + sequence)
    if step >= tl.load(cu_num_draft_ptr + sequence + 1) - first_draft:
        return
    draft = first_draft + step
    row = (draft + sequence).to(tl.int64)
    draft_token = tl.load(draft_token_ids_ptr + draft)
    temperature = tl.load(temperature_ptr + sequence)
    if temperature > 0.0:
        _, _, draft_weight = _load_candidates(
            draft,
            draft_token,
            candidate_ids_ptr,
            candidate_weights_ptr,
            num_candidates,
            num_candidates,
            vocab_size,
            NUM_CANDIDATES,
        )
        maximum, _, _, total = row_statistics(
            row, temperature, block_maxima_ptr, block_weights_ptr, num_blocks, NUM_BLOCKS
        )
        weight, block_maximum = _token_weights(
            draft_token,
            row,
            temperature,
            logits_ptr,
            logits_stride,
            replacements_ptr,
            replacement_rows_ptr,
            thresholds_ptr,
            block_maxima_ptr,
            vocab_size,
            num_blocks,
            BLOCK,
        )
        mass = weight.to(tl.float64) * tl.exp((block_maximum - maximum) / temperature).to(tl.float64)
        w0, w1, _, _ = philox_words(tl.load(seeds_ptr + sequence), tl.load(positions_ptr + sequence) + step, _ACCEPT)
        # u < p(x) / q(x), multiplied out.
        is_accepted = uniform(w0, w1) * draft_weight.to(tl.float64) * total < mass * 65536.0
    else:
        is_accepted = draft_token == row_argmax(row, block_maxima_ptr, block_argmax_ptr, num_blocks, NUM_BLOCKS)
    tl.store(accepted_ptr + draft, is_accepted.to(tl.int32))


@triton.jit
def _emit_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    thresholds_ptr,  # [num_rows] float32, or None
    temperature_ptr,  # [batch] float32
    cu_num_draft_ptr,  # [batch + 1] int32
    draft_token_ids_ptr,  # [total_draft] int32
    candidate_ids_ptr,  # [total_draft, num_candidates] int32
    candidate_weights_ptr,  # [total_draft, num_candidates] int32
    seeds_ptr,  # [batch] int64
    positions_ptr,  # [batch] int64
    block_maxima_ptr,  # [num_rows, num_blocks] float32
    block_argmax_ptr,  # [num_rows, num_blocks] int32
    block_weights_ptr,  # [num_rows, num_blocks] int64
    accepted_ptr,  # [total_draft] int32
    covers_ptr,  # [batch, NUM_CANDIDATES] int64, room for what is taken from the candidates' weights
    token_ids_ptr,  # [batch, width] int32
    num_accepted_ptr,  # [batch] int32
    vocab_size,
    num_blocks,
    num_candidates,
    width,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    sequence = tl.program_id(0)
    first_draft = tl.load(cu_num_draft_ptr + sequence)
    num_draft = tl.load(cu_num_draft_ptr + sequence + 1) - first_draft
    steps = tl.arange(0, WIDTH)
    accepted = tl.load(accepted_ptr + first_draft + steps, mask=steps < num_draft, other=1)
    num_accepted = tl.min(tl.where((steps < num_draft) & (accepted == 0), steps, num_draft), axis=0)
    row = (first_draft + sequence + num_accepted).to(tl.int64)
    temperature = tl.load(temperature_ptr + sequence)
    if temperature > 0.0:
        recovers = num_accepted < num_draft
        rejected = first_draft + num_accepted
        rejected_token = tl.load(draft_token_ids_ptr + rejected, mask=recovers, other=-1)
        ids, weights, _ = _load_candidates(
            rejected,
            rejected_token,
            candidate_ids_ptr,
            candidate_weights_ptr,
            num_candidates,
            tl.where(recovers, num_candidates, 0),
            vocab_size,
            NUM_CANDIDATES,
        )
        maximum, block_weights, units, total = row_statistics(
            row, temperature, block_maxima_ptr, block_weights_ptr, num_blocks, NUM_BLOCKS
        )
        p_weights, maxima = _token_weights(
            ids,
            row,
            temperature,
            logits_ptr,
            logits_stride,
            replacements_ptr,
            replacement_rows_ptr,
            thresholds_ptr,
            block_maxima_ptr,
            vocab_size,
            num_blocks,
            BLOCK,
        )
        # min(p, q) of the candidates in the units of their blocks. A unit of 0 is a block too unlikely to be drawn.
        own_units = tl.exp((maxima - maximum) / temperature).to(tl.float64)
        shares = weights.to(tl.float64) * total / 65536.0 / tl.where(own_units > 0.0, own_units, 1.0)
        covers = tl.minimum(p_weights.to(tl.float64), shares).to(tl.int64)
        # Through memory: the tiles below would have every thread work out its share of the covers anew.
        places = sequence.to(tl.int64) * NUM_CANDIDATES + tl.arange(0, NUM_CANDIDATES)
        tl.store(covers_ptr + places, tl.where(weights > 0, covers, 0))
        tl.debug_barrier()
        covers = tl.load(covers_ptr + places)
        left = tl.maximum(block_weights - _sums_at(ids // BLOCK, covers, NUM_BLOCKS), 0)
        if tl.max(left, axis=0) == 0:
            # p = q up to rounding leaves nothing behind: then p is as good as the residual.
            left = block_weights
            covers = covers * 0
        masses = left.to(tl.float64) * units
        heaviest = tl.max(masses, axis=0)
        masses = (masses / tl.where(heaviest > 0.0, heaviest, 1.0) * 17592186044416.0).to(tl.int64)

        purpose = tl.where(recovers, _RECOVER, _BONUS)
        w0, w1, w2, w3 = philox_words(
            tl.load(seeds_ptr + sequence), tl.load(positions_ptr + sequence) + num_accepted, purpose
        )
        token = _choose_token(
            choose(masses, uniform(w2, w3)),
            uniform(w0, w1),
            ids,
            covers,
            row,
            temperature,
            logits_ptr,
            logits_stride,
            replacements_ptr,
            replacement_rows_ptr,
            thresholds_ptr,
            block_maxima_ptr,
            vocab_size,
            num_blocks,
            BLOCK,
        )
    else:
        token = row_argmax(row, block_maxima_ptr, block_argmax_ptr, num_blocks, NUM_BLOCKS)
    drafts = tl.load(draft_token_ids_ptr + first_draft + steps, mask=steps < num_accepted, other=-1)
    outputs = tl.where(steps == num_accepted, token, drafts)
    tl.store(token_ids_ptr + sequence.to(tl.int64) * width + steps, outputs, mask=steps < width)
    tl.store(num_accepted_ptr + sequence, num_accepted)


def launch_rejection_sample(
    logits: PenalizedLogits,  # [num_rows, vocab_size]
    cu_num_draft_tokens: torch.Tensor,  # [batch + 1] int32
    draft_token_ids: torch.Tensor,  # [total_draft] int32
    candidate_ids: torch.Tensor,  # [total_draft, m] int32
    candidate_weights: torch.Tensor,  # [total_draft, m] int32
    temperature: torch.Tensor,  # [batch] float32
    seeds: torch.Tensor,  # [batch] int64
    positions: torch.Tensor,  # [batch] int64
    filters: Filters,
    max_num_draft_tokens: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [batch, max_num_draft_tokens + 1] int32, [batch] int32
    """Token ids and numbers of accepted tokens, as `RejectionSample` describes them."""
    device, batch_size, width = temperature.device, len(temperature), max_num_draft_tokens + 1
    vocab_size, num_candidates = logits.logits.shape[1], candidate_ids.shape[1]
    token_ids = torch.empty((batch_size, width), dtype=torch.int32, device=device)
    num_accepted = torch.empty(batch_size, dtype=torch.int32, device=device)
    if batch_size == 0:
        return token_ids, num_accepted

    temperature, cu_num_draft_tokens = temperature.contiguous(), cu_num_draft_tokens.contiguous()
    has_filters = any(values is not None for values in filters)
    statistics = launch_block_statistics(
        logits, temperature, cu_num_draft_tokens, width, block_size, has_weights=True, has_groups=has_filters
    )
    thresholds = None
    if has_filters:
        thresholds = launch_thresholds(logits, statistics, temperature, filters, cu_num_draft_tokens, width)
        launch_kept_weights(statistics, logits, thresholds, temperature, cu_num_draft_tokens, width)

    # What both kernels read.
    accepted = torch.empty(len(draft_token_ids), dtype=torch.int32, device=device)
    inputs = (
        logits.logits,
        logits.logits.stride(0),
        logits.replacements,
        logits.replacement_rows,
        thresholds,
        temperature,
        cu_num_draft_tokens,
        *(tensor.contiguous() for tensor in (draft_token_ids, candidate_ids, candidate_weights, seeds, positions)),
        statistics.maxima,
        statistics.argmax,
        statistics.weights,
        accepted,
    )
    sizes = {"vocab_size": vocab_size, "num_blocks": statistics.num_blocks, "num_candidates": num_candidates}
    shapes = {
        "BLOCK": block_size,
        "NUM_BLOCKS": triton.next_power_of_2(statistics.num_blocks),
        "NUM_CANDIDATES": triton.next_power_of_2(max(num_candidates, 1)),
    }
    # Sequences go on the grid's first axis, the only one that may pass 65,535.
    if max_num_draft_tokens:
        _accept_kernel[(batch_size, max_num_draft_tokens)](*inputs, **sizes, **shapes, num_warps=1)
    _emit_kernel[(batch_size,)](
        *inputs,
        torch.empty((batch_size, shapes["NUM_CANDIDATES"]), dtype=torch.int64, device=device),
        token_ids,
        num_accepted,
        width=width,
        WIDTH=triton.next_power_of_2(width),
        **sizes,
        **shapes,
        num_warps=8,
    )
    return token_ids, num_accepted
