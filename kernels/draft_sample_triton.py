"""Triton kernel of `kernels.draft_sample`, behind the pass over all logits.

One program a row. The m largest of the groups' maxima are m tokens, so the m most likely tokens are in those groups:
first the groups are chosen, then the tokens in them, both the lowest ids first among equals, and the rest is done with
m tokens. Coupled rows have a pass of their own, which ranks tokens by log q + g, and no candidates.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.block_statistics_triton import launch_block_statistics
from kernels.draft_outcomes_triton import launch_group_keys, store_best_candidates, store_best_of_all
from kernels.draft_sample import DraftSample
from kernels.integer_weights import BLOCK_SIZE
from kernels.integer_weights_triton import exponential_weights, load_logits
from kernels.ordered_keys_triton import ABSENT, key_bits, ordered_keys, places_of_largest
from kernels.random import Purpose
from kernels.random_triton import philox_words
from kernels.shape_logits import PenalizedLogits
from kernels.thresholds_triton import Filters, launch_thresholds

_DRAFT = tl.constexpr(int(Purpose.DRAFT))


@triton.jit
def _list_most_likely(
    row,
    num_top,
    logits_ptr,
    logits_stride,
    group_maxima_ptr,
    groups_ptr,  # room for num_top, of this row
    ids_ptr,  # room for num_top, of this row
    vocab_size,
    num_groups,
    SLOTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """List the ids of the num_top most likely tokens in ascending order."""
    groups = tl.arange(0, NUM_GROUPS)
    num_filled = tl.cdiv(vocab_size, GROUP)
    is_filled = groups < num_filled
    maxima = tl.load(group_maxima_ptr + row * num_groups + groups, mask=is_filled, other=0.0)
    num_listed = tl.minimum(num_top, num_filled)
    is_taken, places = places_of_largest(tl.where(is_filled, ordered_keys(maxima, KEY_BITS), ABSENT), num_listed)
    tl.store(groups_ptr + places, groups, mask=is_taken)
    tl.debug_barrier()

    slots = tl.arange(0, SLOTS)
    groups = tl.load(groups_ptr + slots, mask=slots < num_listed, other=num_groups)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = load_logits(row, ids, logits_ptr, logits_stride, None, None, vocab_size)
    keys = tl.where(ids < vocab_size, ordered_keys(logits, KEY_BITS), ABSENT)
    is_taken, places = places_of_largest(tl.reshape(keys, [SLOTS * GROUP]), num_top)
    tl.store(ids_ptr + places, tl.reshape(ids, [SLOTS * GROUP]), mask=is_taken)
    tl.debug_barrier()


@triton.jit
def _num_larger(
    values_ptr,  # [num_values] int64
    num_values,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many of the values are larger than each of them. All pairs, by chunks."""
    slots = tl.arange(0, SLOTS)
    values = tl.load(values_ptr + slots, mask=slots < num_values, other=0)
    num_larger = tl.zeros([SLOTS], dtype=tl.int32)
    for start in range(0, SLOTS, CHUNK):
        others = start + tl.arange(0, CHUNK)
        # Values are not negative.
        other_values = tl.load(values_ptr + others, mask=others < num_values, other=-1)
        num_larger += tl.sum((other_values[None, :] > values[:, None]).to(tl.int32), axis=1)
    return num_larger


@triton.jit
def _draft_sample_kernel(
    logits_ptr,  # [batch, vocab_size]
    logits_stride,
    group_maxima_ptr,  # [batch, num_groups] float32
    thresholds_ptr,  # [batch] float32, or None
    max_candidates_ptr,  # [batch] int32, or None
    is_coupled_ptr,  # [batch] int32, or None
    maxima_ptr,  # [batch, num_blocks] float32
    group_keys_ptr,  # [batch, num_groups] float32, of coupled rows, or None
    temperature_ptr,  # [batch] float32
    seeds_ptr,  # [batch] int64
    positions_ptr,  # [batch] int64
    groups_ptr,  # [batch, num_candidates] int32, room for lists
    ids_ptr,  # [batch, num_candidates] int32, room for lists and for weights while they are rounded
    values_ptr,  # [batch, num_candidates] int64, room for what is ranked
    token_ids_ptr,  # [batch] int32
    candidate_ids_ptr,  # [batch, num_candidates] int32
    candidate_weights_ptr,  # [batch, num_candidates] int32, or int16 with the bits of a uint16
    outcome_ids_ptr,  # [batch, NUM_BEST] int32, or None
    outcome_scores_ptr,  # [batch, NUM_BEST] float32, or None
    vocab_size,
    num_blocks,
    num_groups,
    num_candidates,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_BEST: tl.constexpr,  # outcomes, at least 1
    BEST_SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    threshold = tl.full([], float("-inf"), tl.float32)
    if thresholds_ptr is not None:
        threshold = tl.load(thresholds_ptr + row)
    slots = tl.arange(0, SLOTS)
    if is_coupled_ptr is not None and (temperature > 0.0) & (tl.load(is_coupled_ptr + row) != 0):
        store_best_of_all(
            row,
            temperature,
            threshold,
            seed,
            position,
            logits_ptr,
            logits_stride,
            maxima_ptr,
            group_keys_ptr,
            token_ids_ptr,
            outcome_ids_ptr,
            outcome_scores_ptr,
            vocab_size,
            num_blocks,
            num_groups,
            NUM_BEST,
            BEST_SLOTS,
            NUM_GROUPS,
            BLOCK,
            GROUP,
        )
        is_slot = slots < num_candidates
        tl.store(candidate_ids_ptr + row * num_candidates + slots, 0, mask=is_slot)
        tl.store(candidate_weights_ptr + row * num_candidates + slots, 0, mask=is_slot)
        return
    ids_ptr += row * num_candidates
    values_ptr += row * num_candidates
    candidate_ids_ptr += row * num_candidates
    candidate_weights_ptr += row * num_candidates
    num_top = tl.minimum(num_candidates, vocab_size)
    _list_most_likely(
        row,
        num_top,
        logits_ptr,
        logits_stride,
        group_maxima_ptr,
        groups_ptr + row * num_candidates,
        ids_ptr,
        vocab_size,
        num_groups,
        SLOTS,
        NUM_GROUPS,
        GROUP,
        KEY_BITS,
    )
    # What is compared in pairs goes through memory: in registers every thread would work out its share of it anew.
    slots_left = SLOTS - 1 - slots  # makes the first among equals the largest
    mask = slots < num_top
    ids = tl.load(ids_ptr + slots, mask=mask, other=vocab_size)
    logits = load_logits(row, ids, logits_ptr, logits_stride, None, None, vocab_size)
    keys = ordered_keys(logits, 32).to(tl.int64) + 2147483648
    tl.store(values_ptr + slots, keys * SLOTS + slots_left, mask=mask)
    tl.debug_barrier()
    tl.store(candidate_ids_ptr + _num_larger(values_ptr, num_top, SLOTS, CHUNK), ids, mask=mask)
    tl.debug_barrier()

    # From here on the most likely one comes first.
    ids = tl.load(candidate_ids_ptr + slots, mask=mask, other=vocab_size)
    logits = load_logits(row, ids, logits_ptr, logits_stride, None, None, vocab_size)
    maximum = tl.max(logits, axis=0)
    is_random = (temperature > 0.0) & (maximum > float("-inf"))
    weights = exponential_weights(logits, maximum, tl.where(temperature > 0.0, temperature, 1.0))
    logits = tl.where(logits >= threshold, logits, float("-inf"))
    weights = tl.where(logits >= threshold, weights, 0)
    if max_candidates_ptr is not None:
        weights = tl.where(slots < tl.load(max_candidates_ptr + row), weights, 0)

    # Largest remainders, in exact integers.
    total = tl.maximum(tl.sum(weights, axis=0), 1)
    floors = weights * 65536 // total
    tl.store(values_ptr + slots, (weights * 65536 - floors * total) * SLOTS + slots_left, mask=mask)
    tl.store(ids_ptr + slots, floors.to(tl.int32), mask=mask)
    tl.debug_barrier()
    num_larger = _num_larger(values_ptr, num_top, SLOTS, CHUNK)
    rounded = tl.load(ids_ptr + slots, mask=mask, other=0)
    rounded += (mask & (num_larger < 65536 - tl.sum(rounded, axis=0))).to(tl.int32)
    # A token that takes everything is certain, which is written as no weight at all: 65,536 does not fit in 16 bits.
    is_random = is_random & (tl.max(rounded, axis=0) < 65536)
    rounded = tl.where(is_random, rounded, 0)

    word, _, _, _ = philox_words(seed, position, _DRAFT, 0)
    draw = (word >> 16).to(tl.int32)
    cumulative = tl.cumsum(rounded, axis=0)
    is_drawn = (cumulative - rounded <= draw) & (draw < cumulative)
    is_chosen = tl.where(is_random, is_drawn, slots == 0)
    tl.store(token_ids_ptr + row, tl.sum(tl.where(is_chosen, ids, 0), axis=0))

    is_slot = slots < num_candidates
    tl.store(candidate_ids_ptr + slots, tl.where(mask, ids, 0), mask=is_slot)
    tl.store(candidate_weights_ptr + slots, rounded, mask=is_slot)
    if outcome_ids_ptr is not None:
        store_best_candidates(
            row,
            temperature,
            seed,
            position,
            ids,
            logits,
            maximum,
            mask,
            is_chosen,
            outcome_ids_ptr,
            outcome_scores_ptr,
            NUM_BEST,
        )


def launch_draft_sample(
    out: DraftSample,
    logits: torch.Tensor,  # [batch, vocab_size]
    temperature: torch.Tensor,  # [batch] float32
    seeds: torch.Tensor,  # [batch] int64
    positions: torch.Tensor,  # [batch] int64
    filters: Filters,
    max_candidates: torch.Tensor | None,  # [batch] int32
    is_coupled: torch.Tensor | None,  # [batch] int32
) -> None:
    """Fill `out`."""
    batch_size, vocab_size = logits.shape
    num_candidates = out.candidate_ids.shape[1]
    num_best = 1 if out.outcome_ids is None else out.outcome_ids.shape[1]
    if batch_size == 0:
        return
    num_slots = triton.next_power_of_2(num_candidates)
    rows, temperature = PenalizedLogits(logits, None, None), temperature.contiguous()
    seeds, positions = seeds.contiguous(), positions.contiguous()
    is_coupled = None if is_coupled is None else is_coupled.contiguous()
    has_filters = any(values is not None for values in filters)
    # Coupled rows take part only where filters need it.
    statistics = launch_block_statistics(
        rows,
        temperature,
        None,
        1,
        BLOCK_SIZE,
        has_weights=has_filters,
        is_left_out=None if has_filters else is_coupled,
    )
    thresholds = launch_thresholds(rows, statistics, temperature, filters, None, 1) if has_filters else None
    group_keys = None
    if is_coupled is not None:
        group_keys = launch_group_keys(logits, statistics, thresholds, temperature, is_coupled, seeds, positions)
    _draft_sample_kernel[(batch_size,)](
        logits,
        logits.stride(0),
        statistics.group_maxima,
        thresholds,
        None if max_candidates is None else max_candidates.contiguous(),
        is_coupled,
        statistics.maxima,
        group_keys,
        temperature,
        seeds,
        positions,
        torch.empty_like(out.candidate_ids),
        torch.empty_like(out.candidate_ids),
        torch.empty_like(out.candidate_ids, dtype=torch.int64),
        out.token_ids,
        out.candidate_ids,
        out.candidate_weights,
        out.outcome_ids,
        out.outcome_scores,
        vocab_size,
        statistics.num_blocks,
        statistics.num_groups,
        num_candidates,
        SLOTS=num_slots,
        CHUNK=min(num_slots, max(8192 // num_slots, 1)),
        NUM_GROUPS=triton.next_power_of_2(statistics.num_groups),
        BLOCK=statistics.block_size,
        GROUP=statistics.group_size,
        KEY_BITS=key_bits(logits, None),
        NUM_BEST=num_best,
        BEST_SLOTS=triton.next_power_of_2(num_best),
        num_warps=8,
    )
