"""The Triton kernels of `kernels.tree_attention`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import has_dependent_launch
from kernels.node_keys import NodeKeys
from kernels.split_attention_triton import SplitTiling, attend_to_tile, merge_splits, most_queries


def launch_tree_attention(
    query: torch.Tensor,  # [batch * num_queries, num_heads, head_dim], any strides with a dense last dimension
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # as key_cache
    prefix_lens: torch.Tensor,  # [batch] int32
    block_tables: torch.Tensor,  # [batch, max_blocks] int32
    node_keys: NodeKeys,
    positions: torch.Tensor,  # [batch * num_queries] int64
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_after_store: bool = False,
) -> torch.Tensor:  # [batch * num_queries, num_heads, head_dim]
    """`tree_attention` on the GPU.

    The keys of a sequence are those of its prefix and behind them those listed of its nodes, in tiles that take no
    notice of where the one ends and the other begins. A program owns a tile of one sequence's queries, one kv head and
    every so-many-th tile of keys. With several splits a second kernel merges what they found. The grid depends on
    shapes alone: a split beyond the end of its sequence's keys exits.
    """
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    batch, max_blocks = block_tables.shape
    num_queries, area_size = node_keys.num_queries, node_keys.slots.shape[1]
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if batch == 0:
        return output
    group_size = num_heads // num_kv_heads
    queries_each, num_tiles = query_tiles(num_queries, group_size, head_dim, query.dtype)
    tiling = SplitTiling.choose(
        queries_each,
        group_size,
        head_dim,
        query.dtype,
        num_pairs=batch * num_tiles * num_kv_heads,
        max_context_len=max_blocks * block_size + area_size,
    )
    num_splits = tiling.num_splits
    is_split = num_splits > 1
    partial = log_totals = output
    if is_split:
        partial = query.new_empty(batch, num_splits, num_queries, num_heads, head_dim, dtype=torch.float32)
        log_totals = query.new_empty(batch, num_splits, num_queries, num_heads, dtype=torch.float32)
    uses_dependent_launch = has_dependent_launch(query.device)
    is_following = uses_dependent_launch and is_after_store
    is_followed = uses_dependent_launch and is_split
    _tree_attention_kernel[(num_tiles * num_kv_heads, num_splits, batch)](
        output,
        partial,
        log_totals,
        query,
        key_cache,
        value_cache,
        prefix_lens,
        block_tables,
        node_keys.slots,
        node_keys.seen_by,
        node_keys.positions if sliding_window is not None else None,
        node_keys.counts,
        positions,
        num_splits,
        num_queries,
        block_tables.stride(0),
        area_size,
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
        QUERIES_EACH=queries_each,
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
        _merge_tree_splits_kernel[(num_heads, num_queries, batch)](
            output,
            partial,
            log_totals,
            prefix_lens,
            node_keys.counts,
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
    return output


def query_tiles(num_queries: int, group_size: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Queries a tile and the number of tiles: as few tiles as programs can hold, of even size."""
    num_tiles = triton.cdiv(num_queries, max(1, most_queries(group_size, head_dim, dtype)))
    return triton.cdiv(num_queries, num_tiles), num_tiles


@triton.jit
def _first_key(prefix_len, SLIDING_WINDOW: tl.constexpr, NUM_KEYS: tl.constexpr):
    """The first key that any query may see, down to a whole tile: no query stands before the end of the prefix."""
    first_key = 0
    if SLIDING_WINDOW is not None:
        first_key = tl.maximum(prefix_len - SLIDING_WINDOW + 1, 0) // NUM_KEYS * NUM_KEYS
    return first_key


@triton.jit
def _find_keys(
    index,  # [NUM_KEYS] counted from the sequence's first token
    prefix_len,
    num_keys,
    block_table_ptr,  # the sequence's
    node_slots_ptr,  # the sequence's
    seen_by_ptr,  # the sequence's
    BLOCK_SIZE: tl.constexpr,
):  # where the keys are: block of those in the prefix, slot of the others; and by which queries the others are seen
    is_key = index < num_keys
    node = index - prefix_len
    place_ptr = tl.where(node < 0, block_table_ptr + index // BLOCK_SIZE, node_slots_ptr + node)
    place = tl.load(place_ptr, mask=is_key, other=0)
    seen_by = tl.load(seen_by_ptr + node, mask=is_key & (node >= 0), other=0)
    return place, seen_by


# Not specialized on: numbers that change from step to step, which would compile again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_splits", "num_queries", "block_table_stride", "area_size"])
def _tree_attention_kernel(
    output_ptr,  # [batch * num_queries, num_heads, head_dim]
    partial_ptr,  # [batch, num_splits, num_queries, num_heads, head_dim] float32
    log_totals_ptr,  # [batch, num_splits, num_queries, num_heads] float32, log2 of the summed weights
    query_ptr,  # [batch * num_queries, num_heads, head_dim], strided
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache_ptr,  # as key_cache
    prefix_lens_ptr,  # [batch] int32
    block_tables_ptr,  # [batch, max_blocks] int32, strided
    node_slots_ptr,  # [batch, area_size] int32
    seen_by_ptr,  # [batch, area_size] int32
    node_positions_ptr,  # [batch, area_size] int32, or None
    node_counts_ptr,  # [batch] int32
    positions_ptr,  # [batch * num_queries] int64
    num_splits,
    num_queries,
    block_table_stride,
    area_size,
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
    QUERIES_EACH: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FOLLOWING: tl.constexpr,
    IS_FOLLOWED: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    first_query = tl.program_id(0) // NUM_KV_HEADS * QUERIES_EACH
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)

    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    step = num_splits * NUM_KEYS
    prefix_len = tl.load(prefix_lens_ptr + sequence)
    num_keys = prefix_len + tl.load(node_counts_ptr + sequence)
    block_table_ptr = block_tables_ptr + sequence * block_table_stride
    node_slots_ptr += sequence * area_size
    seen_by_ptr += sequence * area_size
    first_key = _first_key(prefix_len, SLIDING_WINDOW, NUM_KEYS)
    key_start = first_key + split * NUM_KEYS
    offset = tl.arange(0, NUM_KEYS)
    place, seen_by = _find_keys(
        key_start + offset, prefix_len, num_keys, block_table_ptr, node_slots_ptr, seen_by_ptr, BLOCK_SIZE
    )
    if IS_FOLLOWING:
        # What is read above was there before the kernel ahead, which stores this pass's keys, began. Programs that have
        # nothing to do wait as well.
        gdc_wait()
    # The first split leaves its part of a sequence without keys, so that something is there to be merged.
    if (split > 0) & (key_start >= num_keys):
        return

    row = tl.arange(0, NUM_ROWS)
    query_index = first_query + row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_row = (row < QUERIES_EACH * GROUP_SIZE) & (query_index < num_queries)
    is_dim = dim < HEAD_DIM
    token = sequence * num_queries + query_index
    query = tl.load(
        query_ptr + token[None, :] * query_stride_token + head[None, :] * query_stride_head + dim[:, None],
        mask=is_row[None, :] & is_dim[:, None],
        other=0.0,
    )
    # Rows beyond the last query may not shift by more than a word has bits.
    query_bit = 1 << tl.where(is_row, query_index, 0)
    if SLIDING_WINDOW is not None:
        first_seen = tl.load(positions_ptr + token, mask=is_row, other=0).to(tl.int32) - (SLIDING_WINDOW - 1)

    key_cache_ptr += kv_head * HEAD_DIM
    value_cache_ptr += kv_head * HEAD_DIM
    largest = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    totals = tl.zeros([NUM_KEYS, NUM_ROWS], tl.float32)
    attended = tl.zeros([HEAD_DIM_PADDED, NUM_ROWS], tl.float32)
    for start in range(key_start, num_keys, step):
        index = start + offset
        is_prefix = index < prefix_len
        # 64-bit: a large cache has more elements than 32 bits can count.
        slot = place.to(tl.int64)
        slot = tl.where(is_prefix, slot * BLOCK_SIZE + index % BLOCK_SIZE, slot)
        cached = (slot * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dim[None, :]
        # Masked and not merely weighted with zero: behind the last key may be NaN.
        is_cached = (index < num_keys)[:, None] & is_dim[None, :]
        key = tl.load(key_cache_ptr + cached, mask=is_cached, other=0.0)
        value = tl.load(value_cache_ptr + cached, mask=is_cached, other=0.0)
        is_seen = is_prefix[:, None] | ((seen_by[:, None] & query_bit[None, :]) != 0)
        if SLIDING_WINDOW is not None:
            if node_positions_ptr is not None:
                node = sequence * area_size + index - prefix_len
                is_node = (index >= prefix_len) & (index < num_keys)
                position = tl.where(is_node, tl.load(node_positions_ptr + node, mask=is_node, other=0), index)
                is_seen &= position[:, None] >= first_seen[None, :]
            else:
                is_seen &= (index[:, None] >= first_seen[None, :]) | (index >= prefix_len)[:, None]
        # One tile ahead, so that the next keys need not wait for their places.
        place, seen_by = _find_keys(
            index + step, prefix_len, num_keys, block_table_ptr, node_slots_ptr, seen_by_ptr, BLOCK_SIZE
        )
        largest, totals, attended = attend_to_tile(
            key, value, query, is_seen, largest, totals, attended, scale, SOFTCAP=SOFTCAP
        )

    if IS_FOLLOWED:
        # Now and not earlier: waiting programs would slow down those that still read a long prefix.
        gdc_launch_dependents()
    total = tl.sum(totals, axis=0)
    has_seen = total > 0.0
    attended *= (1.0 / tl.where(has_seen, total, 1.0))[None, :]
    if IS_SPLIT:
        partial_row = ((sequence * num_splits + split) * num_queries + query_index) * NUM_HEADS + head
        # Of a query that sees none of these keys, next to nothing: with -inf in all splits, it would come out as NaN.
        log_total = tl.where(has_seen, largest + tl.log2(total), -1e30)
        tl.store(log_totals_ptr + partial_row, log_total, mask=is_row)
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
def _merge_tree_splits_kernel(
    output_ptr,  # [batch * num_queries, NUM_HEADS, HEAD_DIM]
    partial_ptr,  # [batch, num_splits, num_queries, NUM_HEADS, HEAD_DIM] float32
    log_totals_ptr,  # [batch, num_splits, num_queries, NUM_HEADS] float32
    prefix_lens_ptr,  # [batch] int32
    node_counts_ptr,  # [batch] int32
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
    num_queries = tl.num_programs(1)
    sequence = tl.program_id(2).to(tl.int64)
    prefix_len = tl.load(prefix_lens_ptr + sequence)
    num_keys = prefix_len + tl.load(node_counts_ptr + sequence)
    if IS_FOLLOWING:
        # The lengths were there before the kernel ahead began.
        gdc_wait()
    split = tl.arange(0, NUM_SPLITS_PADDED)
    first_key = _first_key(prefix_len, SLIDING_WINDOW, NUM_KEYS)
    # The others exited and left their part unwritten.
    is_written = (split < num_splits) & ((split == 0) | (first_key + split * NUM_KEYS < num_keys))
    merge_splits(
        output_ptr + ((sequence * num_queries + query_index) * NUM_HEADS + head) * HEAD_DIM,
        partial_ptr,
        log_totals_ptr,
        ((sequence * num_splits + split) * num_queries + query_index) * NUM_HEADS + head,
        is_written,
        HEAD_DIM=HEAD_DIM,
        HEAD_DIM_PADDED=HEAD_DIM_PADDED,
    )
