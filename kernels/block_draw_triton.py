"""Device functions that visit the tokens of a vocabulary block to draw one by TARGET noise; see `kernels.random`.

Tokens are taken in fours, which share a call of Philox: tiles are [n, 4], and `fours` [n] says which. A token's key is
log2(E) - log2(weight), its weight relative to the block's most likely token; the smallest key of all wins, the lowest
token id among equals. What has no weight has the key inf. Keys of different blocks compare once the blocks' maxima are
told in terms of the row's (`smallest_of_blocks`).
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.integer_weights_triton import finite_or_zero, load_logits, weight_parts
from kernels.random_triton import log2_of_four_exponentials

CHUNK = 16
"""Groups of a filtered block that are visited together: few are kept."""


@triton.jit
def visit_block(
    row,
    block,
    temperature,
    is_weighed,
    seed,
    position,
    threshold,
    has_marks,
    marks_ptr,  # [BLOCK] int8: not 0 for tokens of the block that are not to be drawn, read if has_marks; or None
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    group_maxima_ptr,  # [num_rows, num_groups] float32; None: nothing is filtered
    groups_ptr,  # [num_rows, num_groups] int32, room for lists, or None
    maxima_ptr,  # [num_rows, num_blocks] float32; there already where there are groups' maxima
    vocab_size,
    num_blocks,
    num_groups,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The block's maximum, the smallest key and its token, and the weight of all: only of a row that is weighed, of
    which nothing is drawn. A row without temperature draws its most likely token, with key 0."""
    if group_maxima_ptr is None:
        fours = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        logits = load_logits(
            row, _tokens_of(fours), logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size
        )
        maximum = tl.max(tl.max(logits, axis=1), axis=0)
        tl.store(maxima_ptr + row * num_blocks + block, maximum)
        is_drawn = _are_drawn(_tokens_of(fours) - block * BLOCK, has_marks, marks_ptr, BLOCK)
        key, place, weight = _visit(logits, is_drawn, fours, maximum, temperature, is_weighed, seed, position)
        token = block * BLOCK + place
    else:
        maximum = tl.load(maxima_ptr + row * num_blocks + block)
        if temperature == 0.0:
            threshold = maximum
        groups_ptr += row * num_groups + block * (BLOCK // GROUP)
        num_kept = _list_kept_groups(row, block, threshold, group_maxima_ptr, groups_ptr, num_groups, BLOCK // GROUP)
        key = tl.full([], float("inf"), tl.float32)
        token = block * BLOCK
        weight = tl.full([], 0, tl.int64)
        for start in range(0, num_kept, CHUNK):
            fours = _fours_of_groups(groups_ptr, start, num_kept, num_groups, GROUP, CHUNK)
            tokens = _tokens_of(fours)
            logits = load_logits(
                row, tokens, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size
            )
            logits = tl.where(logits >= threshold, logits, float("-inf"))
            is_drawn = _are_drawn(tokens - block * BLOCK, has_marks, marks_ptr, BLOCK)
            own_key, place, own_weight = _visit(
                logits, is_drawn, fours, maximum, temperature, is_weighed, seed, position
            )
            if own_key < key:
                key = own_key
                token = tl.load(groups_ptr + start + place // GROUP) * GROUP + place % GROUP
            weight += own_weight
    return maximum, key, token, weight


@triton.jit
def _are_drawn(places, has_marks, marks_ptr, BLOCK: tl.constexpr):
    """Which tokens of a block may be drawn."""
    if marks_ptr is None:
        return True
    else:
        return tl.load(marks_ptr + places, mask=has_marks & (places < BLOCK), other=0) == 0


@triton.jit
def _visit(logits, is_drawn, fours, maximum, temperature, is_weighed, seed, position):
    """Of a tile [n, 4] the smallest key and its place, or the weight."""
    key = tl.full([], float("inf"), tl.float32)
    place = tl.full([], 0, tl.int32)
    weight = tl.full([], 0, tl.int64)
    if is_weighed:
        coarse, fine = weight_parts(logits, maximum, temperature)
        # 32 bits hold the parts' sums within a thread.
        weight = tl.sum((tl.sum(coarse, axis=1).to(tl.int64) << 20) + tl.sum(fine, axis=1), axis=0)
    else:
        if temperature > 0.0:
            scale = 1.4426950408889634 / temperature
            keys = log2_of_four_exponentials(seed, position, fours) - (logits - finite_or_zero(maximum)) * scale
        else:
            keys = tl.where(logits == maximum, 0.0, float("inf"))
        keys = tl.where(is_drawn, keys, float("inf"))
        key, place = tl.min(
            tl.reshape(keys, [fours.shape[0] * 4]), axis=0, return_indices=True, return_indices_tie_break_left=True
        )
    return key, place, weight


@triton.jit
def _tokens_of(fours):
    """The token ids [n, 4]."""
    return fours[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _list_kept_groups(
    row,
    block,
    threshold,
    group_maxima_ptr,  # [num_rows, num_groups] float32
    groups_ptr,  # [NUM_GROUPS] int32, room for the block's list
    num_groups,
    NUM_GROUPS: tl.constexpr,  # of a block
):
    """List a block's groups that have logits at or above the threshold, in ascending order; returns how many."""
    groups = block * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
    is_kept = tl.load(group_maxima_ptr + row * num_groups + groups) >= threshold
    places = tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
    tl.store(groups_ptr + places, groups, mask=is_kept)
    tl.debug_barrier()
    return tl.sum(is_kept.to(tl.int32), axis=0)


@triton.jit
def _fours_of_groups(
    groups_ptr,  # a list of groups
    start,
    num_listed,
    num_groups,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The fours of CHUNK groups of a list from `start` on; behind its end they lie behind the vocabulary."""
    FOURS: tl.constexpr = GROUP // 4
    places = start + tl.arange(0, CHUNK)
    groups = tl.load(groups_ptr + places, mask=places < num_listed, other=num_groups)
    return tl.reshape(groups[:, None] * FOURS + tl.arange(0, FOURS)[None, :], [CHUNK * FOURS])


@triton.jit
def smallest_of_blocks(
    rows,  # [n] int64; below 0: none
    scale,  # log2(e) / temperature; any for greedy rows
    maxima_ptr,  # [num_rows, num_blocks] float32
    keys_ptr,  # [num_rows, num_blocks] float32
    tokens_ptr,  # [num_rows, num_blocks] int32
    num_blocks,
    NUM_BLOCKS: tl.constexpr,
):
    """The tokens that rows draw, from what each of their blocks drew; -1 where there is no row."""
    blocks = tl.arange(0, NUM_BLOCKS)
    places = rows[:, None] * num_blocks + blocks[None, :]
    mask = (rows >= 0)[:, None] & (blocks < num_blocks)[None, :]
    maxima = tl.load(maxima_ptr + places, mask=mask, other=float("-inf"))
    keys = tl.load(keys_ptr + places, mask=mask, other=float("inf"))
    keys -= (maxima - finite_or_zero(tl.max(maxima, axis=1))[:, None]) * scale
    _, chosen = tl.min(keys, axis=1, return_indices=True, return_indices_tie_break_left=True)
    return tl.load(tokens_ptr + rows * num_blocks + chosen, mask=rows >= 0, other=-1)
