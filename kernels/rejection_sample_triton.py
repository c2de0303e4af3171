"""Triton kernels of `kernels.rejection_sample`.

The grids depend on shapes alone. `_blocks_kernel` is the pass over all logits, split over blocks of the vocabulary. In
rows whose token is the target's own (plain, coupled, greedy) each block draws one: about 40 instructions a token, 13 of
them Philox's. Rows that a draft token is tested in are weighed, in half as many. Which row of such a sequence is drawn
from, only the tests tell: `_last_draw_kernel` counts them, in every block's program anew, which takes less than a
kernel of its own, and draws from that row alone; so K drafts cost K cheap rows and a dear one. `_emit_kernel` picks the
best of the blocks' tokens. Filters put two kernels ahead, which find each row's threshold; groups of tokens below it
are not visited again.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.acceptance_triton import count_accepted, load_candidates, tests_by_p_and_q
from kernels.block_draw_triton import CHUNK, smallest_of_blocks, visit_block
from kernels.block_statistics_triton import GROUP_SIZE, launch_block_statistics, row_of
from kernels.dependent_launch import has_dependent_launch
from kernels.integer_weights_triton import exponential_weights, finite_or_zero, load_logits
from kernels.random_triton import log2_of_exponentials
from kernels.shape_logits import PenalizedLogits
from kernels.thresholds_triton import Filters, launch_thresholds

# What q covers wholly stands this far behind everything else: drawn only where q leaves nothing of p at all.
_COVERED = tl.constexpr(256.0)


@triton.jit
def _load_threshold(row, thresholds_ptr):
    threshold = tl.full([], float("-inf"), tl.float32)
    if thresholds_ptr is not None:
        threshold = tl.load(thresholds_ptr + row)
    return threshold


@triton.jit
def _blocks_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    thresholds_ptr,  # [num_rows] float32, or None
    group_maxima_ptr,  # [num_rows, num_groups] float32, or None
    groups_ptr,  # [num_rows, num_groups] int32, room for lists, or None
    temperature_ptr,  # [batch] float32
    is_coupled_ptr,  # [batch] int32, or None
    cu_num_draft_ptr,  # [batch + 1] int32
    draft_token_ids_ptr,  # [total_draft] int32
    candidate_ids_ptr,  # [total_draft, num_candidates] int32
    candidate_weights_ptr,  # [total_draft, num_candidates] int32
    seeds_ptr,  # [batch] int64
    positions_ptr,  # [batch] int64
    maxima_ptr,  # [num_rows, num_blocks] float32; there already where there are thresholds
    keys_ptr,  # [num_rows, num_blocks] float32: of the token that each block draws
    tokens_ptr,  # [num_rows, num_blocks] int32: that token
    weights_ptr,  # [num_rows, num_blocks] int64
    draft_weights_ptr,  # [total_draft, 2] int64: of each draft token in its block, and of 65,536 in q
    vocab_size,
    num_blocks,
    num_candidates,
    num_groups,
    BLOCK: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    sequence = tl.program_id(0)
    step = tl.program_id(1)
    block = tl.program_id(2)
    row, is_row = row_of(sequence, step, cu_num_draft_ptr)
    if not is_row:
        return
    temperature = tl.load(temperature_ptr + sequence)
    first_draft = tl.load(cu_num_draft_ptr + sequence)
    num_draft = tl.load(cu_num_draft_ptr + sequence + 1) - first_draft
    is_tested = tests_by_p_and_q(sequence, temperature, num_draft, is_coupled_ptr)
    if is_tested & (step == num_draft):
        return
    seed = tl.load(seeds_ptr + sequence)
    position = tl.load(positions_ptr + sequence) + step
    threshold = _load_threshold(row, thresholds_ptr)
    maximum, key, token, weight = visit_block(
        row,
        block,
        temperature,
        is_tested,
        seed,
        position,
        threshold,
        None,
        0,
        logits_ptr,
        logits_stride,
        replacements_ptr,
        replacement_rows_ptr,
        group_maxima_ptr,
        groups_ptr,
        maxima_ptr,
        None,
        vocab_size,
        num_blocks,
        num_groups,
        BLOCK,
        GROUP,
        CHUNK,
    )
    if not is_tested:
        tl.store(keys_ptr + row * num_blocks + block, key)
        tl.store(tokens_ptr + row * num_blocks + block, token)
        return
    tl.store(weights_ptr + row * num_blocks + block, weight)

    # What the draft token's test compares: the program of its block knows it.
    draft = first_draft + step
    draft_token = tl.load(draft_token_ids_ptr + draft)
    is_valid = (draft_token >= 0) & (draft_token < vocab_size)
    if tl.where(is_valid, draft_token // BLOCK, 0) == block:
        _, _, q_weight = load_candidates(
            draft, draft_token, candidate_ids_ptr, candidate_weights_ptr, num_candidates, vocab_size, NUM_CANDIDATES
        )
        logit = load_logits(
            row, draft_token, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size
        )
        p_weight = tl.where(logit >= threshold, exponential_weights(logit, maximum, temperature), 0)
        tl.store(draft_weights_ptr + draft * 2, p_weight)
        tl.store(draft_weights_ptr + draft * 2 + 1, q_weight.to(tl.int64))


@triton.jit
def _last_draw_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    thresholds_ptr,  # [num_rows] float32, or None
    group_maxima_ptr,  # [num_rows, num_groups] float32, or None
    groups_ptr,  # [num_rows, num_groups] int32, room for lists, or None
    temperature_ptr,  # [batch] float32
    is_coupled_ptr,  # [batch] int32, or None
    cu_num_draft_ptr,  # [batch + 1] int32
    draft_token_ids_ptr,  # [total_draft] int32
    candidate_ids_ptr,  # [total_draft, num_candidates] int32
    candidate_weights_ptr,  # [total_draft, num_candidates] int32
    seeds_ptr,  # [batch] int64
    positions_ptr,  # [batch] int64
    maxima_ptr,  # [num_rows, num_blocks] float32
    keys_ptr,  # [num_rows, num_blocks] float32
    tokens_ptr,  # [num_rows, num_blocks] int32
    weights_ptr,  # [num_rows, num_blocks] int64
    draft_weights_ptr,  # [total_draft, 2] int64
    marks_ptr,  # [batch, num_blocks, BLOCK] int8, room for marks
    num_accepted_ptr,  # [batch] int32
    vocab_size,
    num_blocks,
    num_candidates,
    num_groups,
    BLOCK: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
    IS_FOLLOWING: tl.constexpr,
):
    sequence = tl.program_id(0)
    block = tl.program_id(1)
    if IS_FOLLOWING:
        gdc_wait()
    first_draft = tl.load(cu_num_draft_ptr + sequence)
    num_draft = tl.load(cu_num_draft_ptr + sequence + 1) - first_draft
    temperature = tl.load(temperature_ptr + sequence)
    is_tested = tests_by_p_and_q(sequence, temperature, num_draft, is_coupled_ptr)
    if (not is_tested) & (block > 0):
        return
    num_accepted, row_maximum, total = count_accepted(
        sequence,
        first_draft,
        num_draft,
        temperature,
        is_tested,
        draft_token_ids_ptr,
        seeds_ptr,
        positions_ptr,
        maxima_ptr,
        keys_ptr,
        tokens_ptr,
        weights_ptr,
        draft_weights_ptr,
        num_blocks,
        BLOCK,
        NUM_BLOCKS,
        STEPS,
    )
    if block == 0:
        tl.store(num_accepted_ptr + sequence, num_accepted)
    if not is_tested:
        return

    draft = first_draft + num_accepted
    row = (draft + sequence).to(tl.int64)
    seed = tl.load(seeds_ptr + sequence)
    position = tl.load(positions_ptr + sequence) + num_accepted
    threshold = _load_threshold(row, thresholds_ptr)
    # Candidates of the rejected draft token are drawn apart, by what q leaves of them: the block is drawn without them.
    recovers = num_accepted < num_draft
    ids, weights, _ = load_candidates(
        draft,
        tl.load(draft_token_ids_ptr + draft, mask=recovers, other=-1),
        candidate_ids_ptr,
        candidate_weights_ptr,
        tl.where(recovers, num_candidates, 0),
        vocab_size,
        NUM_CANDIDATES,
    )
    is_here = (weights > 0) & (ids // BLOCK == block)
    has_marks = tl.max(is_here.to(tl.int32), axis=0) > 0
    marks_ptr += (sequence.to(tl.int64) * num_blocks + block) * BLOCK
    if has_marks:
        tl.store(marks_ptr + tl.arange(0, BLOCK), tl.zeros([BLOCK], dtype=tl.int8))
        tl.debug_barrier()
        tl.store(marks_ptr + ids - block * BLOCK, tl.full([NUM_CANDIDATES], 1, tl.int8), mask=is_here)
        tl.debug_barrier()
    maximum, key, token, _ = visit_block(
        row,
        block,
        temperature,
        False,
        seed,
        position,
        threshold,
        marks_ptr,
        tl.where(has_marks, (block + 1) * BLOCK, 0),
        logits_ptr,
        logits_stride,
        replacements_ptr,
        replacement_rows_ptr,
        group_maxima_ptr,
        groups_ptr,
        maxima_ptr,
        None,
        vocab_size,
        num_blocks,
        num_groups,
        BLOCK,
        GROUP,
        CHUNK,
    )
    if has_marks:
        logits = load_logits(
            row, ids, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size, is_here
        )
        logits = tl.where(logits >= threshold, logits, float("-inf"))
        unit = tl.exp((maximum - row_maximum) / temperature).to(tl.float64)
        masses = exponential_weights(logits, maximum, temperature).to(tl.float64) * unit
        covers = weights.to(tl.float64) * total / 65536.0
        is_left = masses > covers
        shares = tl.where(is_left, 1.0 - covers / tl.where(is_left, masses, 1.0), 1.0).to(tl.float32)
        keys = log2_of_exponentials(seed, position, ids) - tl.where(is_left, tl.log2(shares), -_COVERED)
        keys -= (logits - finite_or_zero(maximum)) * (1.4426950408889634 / temperature)
        own_key = tl.min(keys, axis=0)
        own_token = tl.min(tl.where(is_here & (keys == own_key), ids, 2147483647), axis=0)
        if (own_key < key) | ((own_key == key) & (own_token < token)):
            key = own_key
            token = own_token
    tl.store(keys_ptr + row * num_blocks + block, key)
    tl.store(tokens_ptr + row * num_blocks + block, token)


@triton.jit
def _emit_kernel(
    temperature_ptr,  # [batch] float32
    cu_num_draft_ptr,  # [batch + 1] int32
    draft_token_ids_ptr,  # [total_draft] int32
    maxima_ptr,  # [num_rows, num_blocks] float32
    keys_ptr,  # [num_rows, num_blocks] float32
    tokens_ptr,  # [num_rows, num_blocks] int32
    num_accepted_ptr,  # [batch] int32
    token_ids_ptr,  # [batch, width] int32
    num_blocks,
    width,
    NUM_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_FOLLOWING: tl.constexpr,
):
    sequence = tl.program_id(0)
    if IS_FOLLOWING:
        gdc_wait()
    first_draft = tl.load(cu_num_draft_ptr + sequence)
    temperature = tl.load(temperature_ptr + sequence)
    num_accepted = tl.load(num_accepted_ptr + sequence)
    row = (first_draft + sequence + num_accepted).to(tl.int64) + tl.zeros([1], dtype=tl.int64)
    scale = 1.4426950408889634 / tl.where(temperature > 0.0, temperature, 1.0)
    token = smallest_of_blocks(row, scale, maxima_ptr, keys_ptr, tokens_ptr, num_blocks, NUM_BLOCKS)
    steps = tl.arange(0, WIDTH)
    drafts = tl.load(draft_token_ids_ptr + first_draft + steps, mask=steps < num_accepted, other=-1)
    outputs = tl.where(steps == num_accepted, token, drafts)
    tl.store(token_ids_ptr + sequence.to(tl.int64) * width + steps, outputs, mask=steps < width)


def launch_rejection_sample(
    logits: PenalizedLogits,  # [num_rows, vocab_size]
    cu_num_draft_tokens: torch.Tensor,  # [batch + 1] int32
    draft_token_ids: torch.Tensor,  # [total_draft] int32
    candidate_ids: torch.Tensor,  # [total_draft, m] int32
    candidate_weights: torch.Tensor,  # [total_draft, m] int32
    temperature: torch.Tensor,  # [batch] float32
    seeds: torch.Tensor,  # [batch] int64
    positions: torch.Tensor,  # [batch] int64
    is_coupled: torch.Tensor | None,  # [batch] int32
    filters: Filters,
    max_num_draft_tokens: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # [batch, max_num_draft_tokens + 1] int32, [batch] int32
    """Token ids and numbers of accepted tokens, as `RejectionSample` describes them."""
    device, batch_size, width = temperature.device, len(temperature), max_num_draft_tokens + 1
    num_rows, vocab_size = logits.logits.shape
    num_candidates = candidate_ids.shape[1]
    num_blocks = triton.cdiv(vocab_size, block_size)

    def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    token_ids = room(batch_size, width, dtype=torch.int32)
    # Where nothing can be accepted, no kernel counts.
    num_accepted = (torch.empty if max_num_draft_tokens else torch.zeros)(batch_size, dtype=torch.int32, device=device)
    if batch_size == 0:
        return token_ids, num_accepted

    temperature, cu_num_draft_tokens = temperature.contiguous(), cu_num_draft_tokens.contiguous()
    maxima, thresholds, group_maxima, groups = room(num_rows, num_blocks, dtype=torch.float32), None, None, None
    if any(values is not None for values in filters):
        statistics = launch_block_statistics(
            logits, temperature, cu_num_draft_tokens, width, block_size, has_weights=True
        )
        thresholds = launch_thresholds(logits, statistics, temperature, filters, cu_num_draft_tokens, width)
        maxima, group_maxima = statistics.maxima, statistics.group_maxima
        groups = torch.empty_like(group_maxima, dtype=torch.int32)
    keys, tokens = torch.empty_like(maxima), torch.empty_like(maxima, dtype=torch.int32)
    # What both kernels that read logits take.
    inputs = (
        logits.logits,
        logits.logits.stride(0),
        logits.replacements,
        logits.replacement_rows,
        thresholds,
        group_maxima,
        groups,
        temperature,
        None if is_coupled is None else is_coupled.contiguous(),
        cu_num_draft_tokens,
        *(tensor.contiguous() for tensor in (draft_token_ids, candidate_ids, candidate_weights, seeds, positions)),
        maxima,
        keys,
        tokens,
        torch.empty_like(maxima, dtype=torch.int64),
        room(len(draft_token_ids), 2, dtype=torch.int64),
    )
    group_size = min(GROUP_SIZE, block_size)
    sizes = {
        "vocab_size": vocab_size,
        "num_blocks": num_blocks,
        "num_candidates": num_candidates,
        "num_groups": num_blocks * block_size // group_size,
        "BLOCK": block_size,
        "NUM_CANDIDATES": triton.next_power_of_2(max(num_candidates, 1)),
        "GROUP": group_size,
        "CHUNK": min(CHUNK, block_size // group_size),
    }
    num_padded_blocks, is_following = triton.next_power_of_2(num_blocks), has_dependent_launch(device)
    # Sequences go on the grid's first axis, the only one that may pass 65,535.
    _blocks_kernel[(batch_size, width, num_blocks)](*inputs, **sizes, num_warps=4)
    if max_num_draft_tokens:
        _last_draw_kernel[(batch_size, num_blocks)](
            *inputs,
            room(batch_size, num_blocks, block_size, dtype=torch.int8),
            num_accepted,
            **sizes,
            NUM_BLOCKS=num_padded_blocks,
            STEPS=triton.next_power_of_2(max_num_draft_tokens),
            IS_FOLLOWING=is_following,
            num_warps=4,
            launch_pdl=is_following,
        )
    _emit_kernel[(batch_size,)](
        temperature,
        cu_num_draft_tokens,
        draft_token_ids,
        maxima,
        keys,
        tokens,
        num_accepted,
        token_ids,
        num_blocks,
        width,
        NUM_BLOCKS=num_padded_blocks,
        WIDTH=triton.next_power_of_2(width),
        IS_FOLLOWING=is_following,
        num_warps=1,
        launch_pdl=is_following,
    )
    return token_ids, num_accepted
