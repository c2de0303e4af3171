"""The Triton kernel of `kernels.paged_attention`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.paged_attention_split_triton import launch_split_attention
from kernels.split_attention_triton import SplitTiling, most_queries


def launch_paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], any strides with a dense last dimension
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # as key_cache
    cu_query_lens: torch.Tensor,  # [batch + 1] int32
    context_lens: torch.Tensor,  # [batch] int32
    block_tables: torch.Tensor,  # [batch, max_blocks] int32
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_after_store: bool = False,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """`paged_attention` on the GPU: online softmax over tiles of keys (Dao et al., arXiv 2205.14135).

    A program owns a tile of queries of one sequence and one kv head. Its rows are the tile's queries times the query
    heads of that kv head, so that even a single-token step fills the rows of a matrix product and reads each key once.
    The grid depends on shapes alone. float32 is computed exactly, without TF32.
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_sequences = context_lens.shape[0]
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return output
    group_size = num_heads // num_kv_heads
    if max_query_len <= most_queries(group_size, head_dim, query.dtype):
        launch_split_attention(
            output,
            query,
            key_cache,
            value_cache,
            cu_query_lens,
            context_lens,
            block_tables,
            scale=scale,
            max_query_len=max_query_len,
            sliding_window=sliding_window,
            softcap=softcap,
            is_after_store=is_after_store,
            tiling=SplitTiling.choose(
                max_query_len,
                group_size,
                head_dim,
                query.dtype,
                num_pairs=num_sequences * num_kv_heads,
                max_context_len=block_tables.shape[1] * block_size,
            ),
        )
        return output
    tiling = _Tiling.choose(max_query_len, group_size, head_dim, query.dtype)
    has_one_tile_each = max_query_len <= tiling.num_queries
    num_tiles = num_sequences if has_one_tile_each else num_tokens // tiling.num_queries + num_sequences
    _paged_attention_kernel[(num_tiles, num_kv_heads)](
        output,
        query,
        key_cache,
        value_cache,
        cu_query_lens,
        context_lens,
        block_tables,
        num_sequences,
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
        NUM_QUERIES=tiling.num_queries,
        NUM_KEYS=tiling.num_keys,
        HAS_ONE_TILE_EACH=has_one_tile_each,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return output


@dataclass(frozen=True)
class _Tiling:
    """How much of the problem one program holds."""

    num_rows: int  # queries times query heads of a kv head, padded to a power of two
    num_queries: int
    num_keys: int  # in one iteration
    num_warps: int
    num_stages: int

    @staticmethod
    def choose(max_query_len: int, group_size: int, head_dim: int, dtype: torch.dtype) -> _Tiling:
        # What a program holds has to fit its registers: float32 is multiplied without tensor cores, in a layout that
        # spills beyond 32 rows and 16 keys.
        if dtype.itemsize > 2:
            most_rows, num_keys = 32, 16
        else:
            most_rows, num_keys = 64, 32 if head_dim > 128 else 64
        most_rows = max(most_rows, triton.next_power_of_2(group_size))
        num_rows = min(max(16, triton.next_power_of_2(max_query_len * group_size)), most_rows)
        return _Tiling(
            num_rows=num_rows,
            num_queries=num_rows // group_size,
            num_keys=num_keys,
            num_warps=8 if num_rows > 64 or dtype.itemsize > 2 else 4,
            num_stages=2,
        )


# Not specialized on: numbers that change from step to step, which would compile again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_sequences", "block_table_stride"])
def _paged_attention_kernel(
    output_ptr,  # [num_tokens, num_heads, head_dim]
    query_ptr,  # [num_tokens, num_heads, head_dim], strided
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache_ptr,  # as key_cache
    cu_query_lens_ptr,  # [num_sequences + 1] int32
    context_lens_ptr,  # [num_sequences] int32
    block_tables_ptr,  # [num_sequences, max_blocks] int32, strided
    num_sequences,
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
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HAS_ONE_TILE_EACH: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    # Sequence i's tiles start at number cu_query_lens[i] // NUM_QUERIES + i: rounding down leaves room for a partly
    # filled tile each, and the last sequence that starts at or before this tile owns it.
    if HAS_ONE_TILE_EACH:
        sequence = tile
        first_query = 0
    else:
        sequence = 0
        end = num_sequences
        while end - sequence > 1:
            middle = (sequence + end) // 2
            starts_before = tl.load(cu_query_lens_ptr + middle) // NUM_QUERIES + middle <= tile
            sequence = tl.where(starts_before, middle, sequence)
            end = tl.where(starts_before, end, middle)
        first_query = (tile - tl.load(cu_query_lens_ptr + sequence) // NUM_QUERIES - sequence) * NUM_QUERIES
    first_token = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - first_token
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    first_position = context_len - query_len + first_query

    row = tl.arange(0, NUM_ROWS)
    query_in_tile = row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = dim < HEAD_DIM
    is_element = ((query_in_tile < NUM_QUERIES) & (first_query + query_in_tile < query_len))[:, None] & is_dim[None, :]
    query_position = first_position + query_in_tile
    token = (first_token + first_query + query_in_tile).to(tl.int64)
    query = tl.load(
        query_ptr + token[:, None] * query_stride_token + head[:, None] * query_stride_head + dim[None, :],
        mask=is_element,
        other=0.0,
    )

    key_end = tl.minimum(context_len, first_position + NUM_QUERIES)
    key_begin = 0
    # Up to here every query of the tile sees every key.
    full_end = (first_position + 1) // NUM_KEYS * NUM_KEYS
    if SLIDING_WINDOW is not None:
        key_begin = tl.maximum(first_position - SLIDING_WINDOW + 1, 0) // NUM_KEYS * NUM_KEYS
        full_end = key_begin

    block_table_ptr = block_tables_ptr + sequence.to(tl.int64) * block_table_stride
    key_cache_ptr += kv_head * HEAD_DIM
    value_cache_ptr += kv_head * HEAD_DIM
    key_position = key_begin + tl.arange(0, NUM_KEYS)
    block = tl.load(block_table_ptr + key_position // BLOCK_SIZE, mask=key_position < key_end, other=0)
    largest = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([NUM_ROWS], tl.float32)
    attended = tl.zeros([NUM_ROWS, HEAD_DIM_PADDED], tl.float32)
    for key_start in range(key_begin, full_end, NUM_KEYS):
        block, largest, total, attended = _attend_to_keys(
            key_start,
            key_end,
            block,
            largest,
            total,
            attended,
            query,
            query_position,
            key_cache_ptr,
            value_cache_ptr,
            block_table_ptr,
            scale,
            HAS_MASK=False,
            SLIDING_WINDOW=SLIDING_WINDOW,
            SOFTCAP=SOFTCAP,
            TOKEN_STRIDE=NUM_KV_HEADS * HEAD_DIM,
            HEAD_DIM=HEAD_DIM,
            HEAD_DIM_PADDED=HEAD_DIM_PADDED,
            BLOCK_SIZE=BLOCK_SIZE,
            NUM_KEYS=NUM_KEYS,
        )
    for key_start in range(full_end, key_end, NUM_KEYS):
        block, largest, total, attended = _attend_to_keys(
            key_start,
            key_end,
            block,
            largest,
            total,
            attended,
            query,
            query_position,
            key_cache_ptr,
            value_cache_ptr,
            block_table_ptr,
            scale,
            HAS_MASK=True,
            SLIDING_WINDOW=SLIDING_WINDOW,
            SOFTCAP=SOFTCAP,
            TOKEN_STRIDE=NUM_KV_HEADS * HEAD_DIM,
            HEAD_DIM=HEAD_DIM,
            HEAD_DIM_PADDED=HEAD_DIM_PADDED,
            BLOCK_SIZE=BLOCK_SIZE,
            NUM_KEYS=NUM_KEYS,
        )

    tl.store(
        output_ptr + (token[:, None] * (NUM_KV_HEADS * GROUP_SIZE) + head[:, None]) * HEAD_DIM + dim[None, :],
        attended / total[:, None],
        mask=is_element,
    )


@triton.jit
def _attend_to_keys(
    key_start,
    key_end,  # keys from here on may not be read
    block,  # [NUM_KEYS] int32, the blocks that hold these keys
    largest,  # [NUM_ROWS] the largest score so far, times log2(e)
    total,  # [NUM_ROWS] the sum of the weights so far, in units of exp2(largest)
    attended,  # [NUM_ROWS, HEAD_DIM_PADDED] the weighted values so far, in the same units
    query,  # [NUM_ROWS, HEAD_DIM_PADDED]
    query_position,  # [NUM_ROWS]
    key_cache_ptr,  # at the kv head of the first token
    value_cache_ptr,  # as key_cache
    block_table_ptr,  # the sequence's
    scale,
    HAS_MASK: tl.constexpr,  # False: every query sees all of these keys
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KEYS: tl.constexpr,
):  # the next tile's block, and the three sums with these keys in them
    LOG2_E: tl.constexpr = 1.4426950408889634
    dim = tl.arange(0, HEAD_DIM_PADDED)
    key_position = key_start + tl.arange(0, NUM_KEYS)
    is_cached = (dim < HEAD_DIM)[None, :]
    if HAS_MASK:
        # Masked and not merely weighted with zero: beyond the context may be NaN.
        is_cached &= (key_position < key_end)[:, None]
    # 64-bit: a large cache has more elements than 32 bits can count.
    cached = block.to(tl.int64) * (BLOCK_SIZE * TOKEN_STRIDE) + key_position % BLOCK_SIZE * TOKEN_STRIDE
    cached = cached[:, None] + dim[None, :]
    key = tl.load(key_cache_ptr + cached, mask=is_cached, other=0.0)
    value = tl.load(value_cache_ptr + cached, mask=is_cached, other=0.0)
    # One tile ahead, so that the next keys need not wait for their block.
    next_position = key_position + NUM_KEYS
    next_block = tl.load(block_table_ptr + next_position // BLOCK_SIZE, mask=next_position < key_end, other=0)

    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both ends, where exp is 0 or infinite.
        scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * (2.0 * LOG2_E / SOFTCAP))) + 1.0)
        factor = SOFTCAP * LOG2_E
    else:
        factor = scale * LOG2_E
    if HAS_MASK:
        is_seen = key_position[None, :] <= query_position[:, None]
        if SLIDING_WINDOW is not None:
            is_seen &= key_position[None, :] > query_position[:, None] - SLIDING_WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
    # A row that has seen no key yet, before its window begins: any finite number keeps inf - inf out.
    pivot = tl.where(new_largest == float("-inf"), 0.0, new_largest) if HAS_MASK else new_largest
    weights = tl.exp2(scores * factor - pivot[:, None])
    decay = tl.exp2(largest - pivot)
    attended = tl.dot(weights.to(value.dtype), value, attended * decay[:, None], input_precision="ieee")
    return next_block, new_largest, total * decay + tl.sum(weights, axis=1), attended
