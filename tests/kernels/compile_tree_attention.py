"""Compile the kernels of trees for sm_90 without a GPU; prints the shared memory of each in bytes, as JSON.

A program of its own, because Triton either interprets or compiles in one process.
"""

from __future__ import annotations

import json

import triton

from kernels.copy_kv_triton import _copy_kv_kernel
from kernels.node_keys import MAX_QUERIES
from kernels.node_keys_triton import _collect_node_keys_kernel
from kernels.split_attention_triton import SplitTiling
from kernels.tree_attention_triton import _merge_tree_splits_kernel, _tree_attention_kernel, query_tiles
from tests.kernels.compile_paged_attention import DTYPES, GROUP_SIZE, NUM_KV_HEADS, compile_kernel


def compile_attention(
    dtype: str,
    head_dim: int,
    batch: int,
    num_queries: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    has_positions: bool = False,
) -> int:
    """The larger of the two kernels' shared memory in bytes."""
    queries_each, num_tiles = query_tiles(num_queries, GROUP_SIZE, head_dim, DTYPES[dtype])
    tiling = SplitTiling.choose(
        queries_each,
        GROUP_SIZE,
        head_dim,
        DTYPES[dtype],
        num_pairs=batch * num_tiles * NUM_KV_HEADS,
        max_context_len=4096,
    )
    is_split = tiling.num_splits > 1
    pointers = {
        "output_ptr": f"*{dtype}",
        "partial_ptr": "*fp32",
        "log_totals_ptr": "*fp32",
        "query_ptr": f"*{dtype}",
        "key_cache_ptr": f"*{dtype}",
        "value_cache_ptr": f"*{dtype}",
        "prefix_lens_ptr": "*i32",
        "block_tables_ptr": "*i32",
        "node_slots_ptr": "*i32",
        "seen_by_ptr": "*i32",
    }
    pointers |= {"node_positions_ptr": "*i32"} if has_positions else {}
    pointers |= {"node_counts_ptr": "*i32", "positions_ptr": "*i64"}
    numbers = (
        "num_splits",
        "num_queries",
        "block_table_stride",
        "area_size",
        "query_stride_token",
        "query_stride_head",
    )
    constants = {
        "SLIDING_WINDOW": sliding_window,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
        "NUM_KEYS": tiling.num_keys,
    }
    attention_bytes = compile_kernel(
        _tree_attention_kernel,
        pointers | dict.fromkeys(numbers, "i32") | {"scale": "fp32"},
        constants
        | ({} if has_positions else {"node_positions_ptr": None})
        | {
            "SOFTCAP": softcap,
            "NUM_KV_HEADS": NUM_KV_HEADS,
            "GROUP_SIZE": GROUP_SIZE,
            "BLOCK_SIZE": 16,
            "QUERIES_EACH": queries_each,
            "NUM_ROWS": tiling.num_rows,
            "IS_SPLIT": is_split,
            "IS_FOLLOWING": True,
            "IS_FOLLOWED": is_split,
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if not is_split:
        return attention_bytes
    merge_bytes = compile_kernel(
        _merge_tree_splits_kernel,
        {name: pointers[name] for name in _merge_tree_splits_kernel.arg_names if name in pointers}
        | {"num_splits": "i32"},
        constants
        | {
            "NUM_HEADS": NUM_KV_HEADS * GROUP_SIZE,
            "NUM_SPLITS_PADDED": triton.next_power_of_2(tiling.num_splits),
            "IS_FOLLOWING": True,
        },
        num_warps=4,
    )
    return max(attention_bytes, merge_bytes)


def compile_node_keys(num_queries: int, area_size: int, *, has_positions: bool) -> int:
    """The kernel's shared memory in bytes."""
    types = {"is_ancestor_ptr": "*i8", "node_starts_ptr": "*i64", "slots_ptr": "*i32", "seen_by_ptr": "*i32"}
    types |= {"counts_ptr": "*i32", "num_queries": "i32", "area_size": "i32"}
    constants: dict[str, int | None] = {
        "NUM_QUERIES_PADDED": triton.next_power_of_2(num_queries),
        "NUM_PLACES": triton.next_power_of_2(area_size),
    }
    if has_positions:
        types |= {"node_positions_ptr": "*i64", "positions_ptr": "*i32"}
    else:
        constants |= {"node_positions_ptr": None, "positions_ptr": None}
    return compile_kernel(_collect_node_keys_kernel, types, constants, num_warps=8)


def compile_copy(dtype: str, head_dim: int, caches_each: int) -> int:
    """The kernel's shared memory in bytes."""
    types = {"caches_ptr": f"*{dtype}", "sources_ptr": "*i64", "destinations_ptr": "*i64"}
    types |= {"num_caches": "i32", "num_slots": "i32"}
    width = NUM_KV_HEADS * head_dim
    constants = {"WIDTH": width, "WIDTH_PADDED": triton.next_power_of_2(width), "CACHES_EACH": caches_each}
    return compile_kernel(_copy_kv_kernel, types, constants, num_warps=4)


def main() -> None:
    shared_bytes: dict[str, int] = {}
    for head_dim in (64, 80, 256):
        shared_bytes[f"bf16-{head_dim}"] = compile_attention("bf16", head_dim, 1, MAX_QUERIES)
    for dtype in DTYPES:
        shared_bytes[f"{dtype}-128"] = compile_attention(dtype, 128, 1, MAX_QUERIES)
        shared_bytes[f"{dtype}-copy"] = compile_copy(dtype, 80, 4)
    for batch, num_queries in ((1, 1), (32, 8), (64, 4), (256, 1)):
        shared_bytes[f"bf16-{batch}x{num_queries}"] = compile_attention("bf16", 128, batch, num_queries)
    for dtype in ("bf16", "fp32"):
        name = f"{dtype}-window-softcap"
        shared_bytes[name] = compile_attention(dtype, 128, 8, 16, 4096, 50.0)
        shared_bytes[f"{name}-positions"] = compile_attention(dtype, 128, 8, 16, 4096, 50.0, has_positions=True)
    shared_bytes["nodes-32x512"] = compile_node_keys(MAX_QUERIES, 512, has_positions=False)
    shared_bytes["nodes-1x64-positions"] = compile_node_keys(1, 64, has_positions=True)
    print(json.dumps(shared_bytes))


if __name__ == "__main__":
    main()
