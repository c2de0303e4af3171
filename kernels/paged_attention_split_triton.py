"""The Triton kernels of `kernels.paged_attention` for few queries a sequence: decoding and verify steps."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import has_dependent_launch
from kernels.split_attention_triton import (
    MOST_KEYS,
    MOST_SPLITS,
    NUM_MULTIPROCESSORS,
    SplitTiling,
    attend_to_tile,
    merge_splits,
    most_queries,
)


def launch_split_attention(
    output: torch.Tensor,  # [num_tokens, num_heads, head_dim], written
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], any strides with a dense last dimension
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # as key_cache
    cu_query_lens: torch.Tensor,  # [batch + 1] int32
    context_lens: torch.Tensor,  # [batch] int32
    block_tables: torch.Tensor,  # [batch, max_blocks] int32
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None,
    softcap: float | None,
    is_after_store: bool,
    tiling: SplitTiling,
) -> None:
    """All queries of a sequence at once, its context dealt out to programs (Flash-Decoding).

    A program owns one sequence, one kv head and every so-many-th tile of keys, so that its first tile is known before
    the context length is, and that short and long contexts use all programs alike. With several splits a second kernel
    merges what they found. The grid depends on shapes alone: a split beyond the end of its context exits.
    """
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_sequences, max_blocks = block_tables.shape
    group_size = num_heads // num_kv_heads
    num_splits = tiling.num_splits
    is_split = num_splits > 1
    partial = log_totals = output
    if is_split:
        partial = query.new_empty(num_sequences, num_splits, max_query_len, num_heads, head_dim, dtype=torch.float32)
        log_totals = query.new_empty(num_sequences, num_splits, max_query_len, num_heads, dtype=torch.float32)
    uses_dependent_launch = has_dependent_launch(query.device)
    is_following = uses_dependent_launch and is_after_store
    is_followed = uses_dependent_launch and is_split
    _split_attention_kernel[(num_kv_heads, num_splits, num_sequences)](
        output,
        partial,
        log_totals,
        query,
        key_cache,
        value_cache,
        cu_query_lens,
        context_lens,
        block_tables,
        num_splits,
        max_query_len,
        max_blocks,
        block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        scale,
        SLIDING_WINDOW=sliding_window,
        SOFTCAP=softcap,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        NUM_ROWS=tiling.num_rows,
        NUM_KEYS=tiling.num_keys,
        IS_SPLIT=is_split,
        IS_FOLLOWING=is_following,
        IS_FOLLOWED=is_followed,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        launch_pdl=is_following,
    )
    if is_split:
        num_splits_padded = triton.next_power_of_2(num_splits)
        _merge_splits_kernel[(num_heads, max_query_len, num_sequences)](
            output,
            partial,
            log_totals,
            cu_query_lens,
            context_lens,
            num_splits,
            SLIDING_WINDOW=sliding_window,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
            NUM_KEYS=tiling.num_keys,
            NUM_SPLITS_PADDED=num_splits_padded,
            IS_FOLLOWING=is_followed,
            num_warps=min(4, max(1, num_splits_padded // 4)),
            launch_pdl=is_followed,
        )


def distinct_batches(
    query_len: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int,
    most_sequences: int,
    most_context: int,
) -> list[tuple[int, int]]:  # (number of sequences, tokens of context of each)
    """Batches that between them need each variant that these kernels have for queries of this length."""
    # However many heads share a kv head: that decides only about the rows.
    if query_len > most_queries(1, head_dim, dtype):
        return []  # too many rows, whatever the batch
    found: dict[tuple[int, int], tuple[int, int]] = {}
    # Larger batches are not split, and longer contexts not into more parts.
    most_sequences = min(most_sequences, 2 * NUM_MULTIPROCESSORS // num_kv_heads + 1)
    most_context = min(most_context, MOST_SPLITS * MOST_KEYS)
    for num_sequences in range(1, most_sequences + 1):
        for context_len in range(-(-query_len // block_size) * block_size, most_context + 1, block_size):
            pairs = num_sequences * num_kv_heads
            tiling = SplitTiling.choose(query_len, 1, head_dim, dtype, num_pairs=pairs, max_context_len=context_len)
            variant = (tiling.num_keys, triton.next_power_of_2(tiling.num_splits))
            found.setdefault(variant, (num_sequences, context_len))
    return list(found.values())


# Not specialized on: numbers that change from step to step, which would compile again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_splits", "max_query_len", "max_blocks", "block_table_stride"])
def _split_attention_kernel(
    output_ptr,  # [num_tokens, num_heads, head_dim]
    partial_ptr,  # [num_sequences, num_splits, max_query_len, num_heads, head_dim] float32
    log_totals_ptr,  # [num_sequences, num_splits, max_query_len, num_heads] float32, log2 of the summed weights
    query_ptr,  # [num_tokens, num_heads, head_dim], strided
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache_ptr,  # as key_cache
    cu_query_lens_ptr,  # [num_sequences + 1] int32
    context_lens_ptr,  # [num_sequences] int32
    block_tables_ptr,  # [num_sequences, max_blocks] int32, strided
    num_splits,
    max_query_len,
    max_blocks,
    block_table_stride,
    query_stride_token,
    query_stride_head,
    scale,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FOLLOWING: tl.constexpr,
    IS_FOLLOWED: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)

    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    step = num_splits * NUM_KEYS
    first_token = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - first_token
    context_len = tl.load(context_lens_ptr + sequence)
    block_table_ptr = block_tables_ptr + sequence * block_table_stride
    offset = tl.arange(0, NUM_KEYS)
    key_start = split * NUM_KEYS
    if SLIDING_WINDOW is not None:
        key_start += tl.maximum(context_len - query_len - SLIDING_WINDOW + 1, 0) // NUM_KEYS * NUM_KEYS
    # Without a window this load waits for no other; a block beyond the context is read here and never followed.
    column = (key_start + offset) // BLOCK_SIZE
    block = tl.load(block_table_ptr + column, mask=column < max_blocks, other=0)
    if IS_FOLLOWING:
        # What is read above was there before the kernel ahead, which stores this step's keys, began. Programs that have
        # nothing to do wait as well.
        gdc_wait()
    if (query_len == 0) | (key_start >= context_len):
        return

    row = tl.arange(0, NUM_ROWS)
    query_index = row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_row = query_index < query_len
    is_dim = dim < HEAD_DIM
    token = (first_token + query_index).to(tl.int64)
    query = tl.load(
        query_ptr + token[None, :] * query_stride_token + head[None, :] * query_stride_head + dim[:, None],
        mask=is_row[None, :] & is_dim[:, None],
        other=0.0,
    )
    query_position = context_len - query_len + query_index

    key_cache_ptr += kv_head * HEAD_DIM
    value_cache_ptr += kv_head * HEAD_DIM
    largest = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    totals = tl.zeros([NUM_KEYS, NUM_ROWS], tl.float32)
    attended = tl.zeros([HEAD_DIM_PADDED, NUM_ROWS], tl.float32)
    for start in range(key_start, context_len, step):
        key_position = start + offset
        # Masked and not merely weighted with zero: beyond the context may be NaN.
        is_key = key_position < context_len
        # 64-bit: a large cache has more elements than 32 bits can count.
        cached = block.to(tl.int64) * (BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM) + key_position % BLOCK_SIZE * (
            NUM_KV_HEADS * HEAD_DIM
        )
        cached = cached[:, None] + dim[None, :]
        is_cached = is_key[:, None] & is_dim[None, :]
        key = tl.load(key_cache_ptr + cached, mask=is_cached, other=0.0)
        value = tl.load(value_cache_ptr + cached, mask=is_cached, other=0.0)
        # One tile ahead, so that the next keys need not wait for their block.
        next_position = key_position + step
        block = tl.load(block_table_ptr + next_position // BLOCK_SIZE, mask=next_position < context_len, other=0)

        is_seen = key_position[:, None] <= query_position[None, :]
        if SLIDING_WINDOW is not None:
            is_seen &= key_position[:, None] > query_position[None, :] - SLIDING_WINDOW
        largest, totals, attended = attend_to_tile(
            key, value, query, is_seen, largest, totals, attended, scale, SOFTCAP=SOFTCAP
        )

    if IS_FOLLOWED:
        # Now and not earlier: waiting programs would slow down those that still read a long context.
        gdc_launch_dependents()
    total = tl.sum(totals, axis=0)
    # A split may hold no key that a query sees: nothing, with weight 0, is its part.
    attended *= (1.0 / tl.where(total == 0.0, 1.0, total))[None, :]
    if IS_SPLIT:
        partial_row = ((sequence * num_splits + split) * max_query_len + query_index) * NUM_HEADS + head
        tl.store(log_totals_ptr + partial_row, largest + tl.log2(total), mask=is_row)
        tl.store(
            partial_ptr + partial_row[None, :] * HEAD_DIM + dim[:, None],
            attended,
            mask=is_row[None, :] & is_dim[:, None],
        )
    else:
        tl.store(
            output_ptr + (token[None, :] * NUM_HEADS + head[None, :]) * HEAD_DIM + dim[:, None],
            attended,
            mask=is_row[None, :] & is_dim[:, None],
        )


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    output_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    partial_ptr,  # [num_sequences, num_splits, max_query_len, NUM_HEADS, HEAD_DIM] float32
    log_totals_ptr,  # [num_sequences, num_splits, max_query_len, NUM_HEADS] float32
    cu_query_lens_ptr,  # [num_sequences + 1] int32
    context_lens_ptr,  # [num_sequences] int32
    num_splits,
    SLIDING_WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_SPLITS_PADDED: tl.constexpr,
    IS_FOLLOWING: tl.constexpr,
):
    head = tl.program_id(0)
    query_index = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    first_token = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - first_token
    context_len = tl.load(context_lens_ptr + sequence)
    if IS_FOLLOWING:
        # The lengths were there before the kernel ahead began.
        gdc_wait()
    if query_index >= query_len:
        return
    key_start = 0
    if SLIDING_WINDOW is not None:
        key_start = tl.maximum(context_len - query_len - SLIDING_WINDOW + 1, 0) // NUM_KEYS * NUM_KEYS

    split = tl.arange(0, NUM_SPLITS_PADDED)
    # The others exited and left their part unwritten.
    is_written = (split < num_splits) & (key_start + split * NUM_KEYS < context_len)
    row = ((sequence * num_splits + split) * tl.num_programs(1) + query_index) * NUM_HEADS + head
    token = (first_token + query_index).to(tl.int64)
    merge_splits(
        output_ptr + (token * NUM_HEADS + head) * HEAD_DIM,
        partial_ptr,
        log_totals_ptr,
        row,
        is_written,
        HEAD_DIM=HEAD_DIM,
        HEAD_DIM_PADDED=HEAD_DIM_PADDED,
    )
