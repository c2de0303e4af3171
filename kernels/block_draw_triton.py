"""Device functions that visit the tokens of a vocabulary block to draw one by TARGET noise; see `kernels.random`.

A token's key is log2(E) - log2(weight), its weight relative to the block's most likely token; the smallest key of all
wins, the lowest token id among equals. What has no weight has the key inf. Keys of different blocks compare once the
blocks' maxima are told in terms of the row's (`smallest_of_blocks`). Four tokens share a call of Philox: tiles are
[n, 4].
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.integer_weights_triton import finite_or_zero, load_logits, weight_of
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
    marks_ptr,  # [BLOCK] int8: not 0 for tokens of the block that are not to be drawn; or None
    marks_end,  # marks of tokens from here on are not read
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    replacements_ptr,  # [num_replaced, vocab_size] float32, or None
    replacement_rows_ptr,  # [num_rows] int32, or None
    group_maxima_ptr,  # [num_rows, num_groups] float32; None: nothing is filtered
    groups_ptr,  # [num_rows, num_groups] int32, room for lists, or None
    maxima_ptr,  # [num_rows, num_blocks] float32; there already where there are groups' maxima
    group_keys_ptr,  # [num_rows, num_groups] float32: gets the smallest key of each group; or None
    vocab_size,
    num_blocks,
    num_groups,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The block's maximum, the smallest key and its token, and the weight of all: only of a row that is weighed, of
    which nothing is drawn. A row without temperature draws its most likely token, with key 0."""
    NUM_GROUPS: tl.constexpr = BLOCK // GROUP
    key = tl.full([], float("inf"), tl.float32)
    token = block * BLOCK
    weight = tl.full([], 0, tl.int64)
    groups = block * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
    if group_keys_ptr is not None:
        group_keys_ptr += row * num_groups
    if group_maxima_ptr is None:
        tokens = _tokens_of(groups, GROUP)
        logits = load_logits(row, tokens, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size)
        maximum = tl.max(tl.max(logits, axis=1), axis=0)
        tl.store(maxima_ptr + row * num_blocks + block, maximum)
        if is_weighed:
            weight = weight_of(logits, maximum, temperature)
        else:
            keys = _keys(logits, groups, maximum, temperature, seed, position, GROUP)
            if marks_ptr is not None:
                is_marked = tl.load(marks_ptr + tokens - block * BLOCK, mask=tokens < marks_end, other=0)
                keys = tl.where(is_marked != 0, float("inf"), keys)
            if group_keys_ptr is not None:
                tl.store(group_keys_ptr + groups, _smallest_of_groups(keys, GROUP))
            key, token = _smallest(keys, tokens)
    else:
        maximum = tl.load(maxima_ptr + row * num_blocks + block)
        if temperature == 0.0:
            threshold = maximum
        is_kept = tl.load(group_maxima_ptr + row * num_groups + groups) >= threshold
        if group_keys_ptr is not None:
            tl.store(group_keys_ptr + groups, tl.full([NUM_GROUPS], float("inf"), tl.float32), mask=is_kept == 0)
        groups_ptr += row * num_groups + block * NUM_GROUPS
        tl.store(groups_ptr + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1, groups, mask=is_kept)
        tl.debug_barrier()
        num_kept = tl.sum(is_kept.to(tl.int32), axis=0)
        for start in range(0, num_kept, CHUNK):
            places = start + tl.arange(0, CHUNK)
            # Behind the end of the list stands a group behind the vocabulary.
            listed = tl.load(groups_ptr + places, mask=places < num_kept, other=num_groups)
            tokens = _tokens_of(listed, GROUP)
            logits = load_logits(
                row, tokens, logits_ptr, logits_stride, replacements_ptr, replacement_rows_ptr, vocab_size
            )
            logits = tl.where(logits >= threshold, logits, float("-inf"))
            if is_weighed:
                weight += weight_of(logits, maximum, temperature)
            else:
                keys = _keys(logits, listed, maximum, temperature, seed, position, GROUP)
                if marks_ptr is not None:
                    is_marked = tl.load(marks_ptr + tokens - block * BLOCK, mask=tokens < marks_end, other=0)
                    keys = tl.where(is_marked != 0, float("inf"), keys)
                if group_keys_ptr is not None:
                    tl.store(group_keys_ptr + listed, _smallest_of_groups(keys, GROUP), mask=places < num_kept)
                own_key, own_token = _smallest(keys, tokens)
                if own_key < key:
                    key = own_key
                    token = own_token
    return maximum, key, token, weight


@triton.jit
def _fours_of(groups, GROUP: tl.constexpr):
    """The groups' tokens by fours: a quarter of the id of the first of them."""
    FOURS: tl.constexpr = GROUP // 4
    return tl.reshape(groups[:, None] * FOURS + tl.arange(0, FOURS)[None, :], [groups.shape[0] * FOURS])


@triton.jit
def _tokens_of(groups, GROUP: tl.constexpr):
    """The ids [n, 4] of the groups' tokens."""
    return _fours_of(groups, GROUP)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _keys(logits, groups, maximum, temperature, seed, position, GROUP: tl.constexpr):
    """The keys of a tile."""
    if temperature > 0.0:
        scale = 1.4426950408889634 / temperature
        noise = log2_of_four_exponentials(seed, position, _fours_of(groups, GROUP))
        keys = noise - (logits - finite_or_zero(maximum)) * scale
    else:
        keys = tl.where(logits == maximum, 0.0, float("inf"))
    return keys


@triton.jit
def _smallest(keys, tokens):
    """The smallest key of a tile and its token, the lowest among equals."""
    # In two steps: Triton 3.6 gives a minimum over a reshaped tile another's index.
    key = tl.min(tl.min(keys, axis=1), axis=0)
    return key, tl.min(tl.min(tl.where(keys == key, tokens, 2147483647), axis=1), axis=0)


@triton.jit
def _smallest_of_groups(keys, GROUP: tl.constexpr):
    """The smallest key of each group of a tile."""
    return tl.min(tl.reshape(tl.min(keys, axis=1), [keys.shape[0] * 4 // GROUP, GROUP // 4]), axis=1)


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
    is_smallest = (keys == tl.min(keys, axis=1)[:, None]) & (blocks < num_blocks)[None, :]
    chosen = tl.min(tl.where(is_smallest, blocks[None, :], NUM_BLOCKS - 1), axis=1)
    return tl.load(tokens_ptr + rows * num_blocks + chosen, mask=rows >= 0, other=-1)
