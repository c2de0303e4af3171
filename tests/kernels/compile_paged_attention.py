"""Compile the paged attention kernels for sm_90 without a GPU; prints the shared memory of each in bytes, as JSON.

A program of its own, because Triton either interprets or compiles in one process.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.paged_attention_split_triton import _merge_splits_kernel, _split_attention_kernel
from kernels.paged_attention_triton import _paged_attention_kernel, _Tiling
from kernels.split_attention_triton import SplitTiling
from kernels.store_kv_triton import _store_kv_kernel
from tests.kernels.dependent_launch_rules import broken_rules

HOPPER = GPUTarget("cuda", 90, 32)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUP_SIZE = 4
NUM_KV_HEADS = 8


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> int:
    """Bytes of shared memory of the kernel, compiled as for pointers and strides that are multiples of 16."""
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = [i for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr") or "_stride_" in name]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
    assert compiled.asm["cubin"]
    if constants.get("IS_FOLLOWING"):
        # Lengths and block tables, one number at a time, are there before the kernel ahead begins.
        broken = broken_rules(compiled.asm["ptx"], early_loads=r"ld\.global\.b32")
        assert not broken, f"{kernel.__name__} {constants}: {broken} before the kernel ahead has ended"
    return int(compiled.metadata.shared)


def compile_tiles(
    dtype: str, head_dim: int, max_query_len: int, sliding_window: int | None, softcap: float | None
) -> int:
    tiling = _Tiling.choose(max_query_len, GROUP_SIZE, head_dim, DTYPES[dtype])
    types = dict.fromkeys(("output_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("cu_query_lens_ptr", "context_lens_ptr", "block_tables_ptr"), "*i32")
    types |= dict.fromkeys(("num_sequences", "block_table_stride", "query_stride_token", "query_stride_head"), "i32")
    types["scale"] = "fp32"
    constants = {
        "SLIDING_WINDOW": sliding_window,
        "SOFTCAP": softcap,
        "NUM_KV_HEADS": NUM_KV_HEADS,
        "GROUP_SIZE": GROUP_SIZE,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": 16,
        "NUM_ROWS": tiling.num_rows,
        "NUM_QUERIES": tiling.num_queries,
        "NUM_KEYS": tiling.num_keys,
        "HAS_ONE_TILE_EACH": max_query_len <= tiling.num_queries,
    }
    return compile_kernel(
        _paged_attention_kernel, types, constants, num_warps=tiling.num_warps, num_stages=tiling.num_stages
    )


def compile_splits(
    dtype: str,
    head_dim: int,
    num_sequences: int,
    max_query_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> int:
    """The larger of the two kernels' shared memory."""
    tiling = SplitTiling.choose(
        max_query_len,
        GROUP_SIZE,
        head_dim,
        DTYPES[dtype],
        num_pairs=num_sequences * NUM_KV_HEADS,
        max_context_len=4096,
    )
    pointers = {
        "output_ptr": f"*{dtype}",
        "partial_ptr": "*fp32",
        "log_totals_ptr": "*fp32",
        "query_ptr": f"*{dtype}",
        "key_cache_ptr": f"*{dtype}",
        "value_cache_ptr": f"*{dtype}",
        "cu_query_lens_ptr": "*i32",
        "context_lens_ptr": "*i32",
        "block_tables_ptr": "*i32",
    }
    numbers = (
        "num_splits",
        "max_query_len",
        "max_blocks",
        "block_table_stride",
        "query_stride_token",
        "query_stride_head",
    )
    constants = {
        "SLIDING_WINDOW": sliding_window,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
        "NUM_KEYS": tiling.num_keys,
    }
    split_bytes = compile_kernel(
        _split_attention_kernel,
        pointers | dict.fromkeys(numbers, "i32") | {"scale": "fp32"},
        constants
        | {
            "SOFTCAP": softcap,
            "NUM_KV_HEADS": NUM_KV_HEADS,
            "GROUP_SIZE": GROUP_SIZE,
            "BLOCK_SIZE": 16,
            "NUM_ROWS": tiling.num_rows,
            "IS_SPLIT": tiling.num_splits > 1,
            "IS_FOLLOWING": True,
            "IS_FOLLOWED": tiling.num_splits > 1,
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if tiling.num_splits == 1:
        return split_bytes
    merge_bytes = compile_kernel(
        _merge_splits_kernel,
        {name: pointers[name] for name in _merge_splits_kernel.arg_names if name in pointers} | {"num_splits": "i32"},
        constants
        | {
            "NUM_HEADS": NUM_KV_HEADS * GROUP_SIZE,
            "NUM_SPLITS_PADDED": triton.next_power_of_2(tiling.num_splits),
            "IS_FOLLOWING": True,
        },
        num_warps=4,
    )
    return max(split_bytes, merge_bytes)


def compile_store(dtype: str, head_dim: int) -> int:
    types = dict.fromkeys(("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr"), f"*{dtype}")
    types["slot_mapping_ptr"] = "*i64"
    strides = ("key_stride_token", "key_stride_head", "value_stride_token", "value_stride_head")
    types |= dict.fromkeys(strides, "i32")
    constants = {
        "NUM_KV_HEADS": NUM_KV_HEADS,
        "HEAD_DIM": head_dim,
        "BLOCK": triton.next_power_of_2(NUM_KV_HEADS * head_dim),
    }
    return compile_kernel(_store_kv_kernel, types, constants, num_warps=4)


def main() -> None:
    shared_bytes: dict[str, int] = {}
    for head_dim in (64, 80, 96, 128, 256):
        shared_bytes[f"bf16-{head_dim}"] = compile_tiles("bf16", head_dim, 512, None, None)
        shared_bytes[f"fp32-{head_dim}"] = compile_tiles("fp32", head_dim, 512, None, None)
    shared_bytes["bf16-128-33"] = compile_tiles("bf16", 128, 33, None, None)
    for dtype in DTYPES:
        shared_bytes[f"{dtype}-window-softcap"] = compile_tiles(dtype, 128, 512, 4096, 50.0)
    for head_dim in (64, 80, 96, 128, 256):
        shared_bytes[f"bf16-{head_dim}-split"] = compile_splits("bf16", head_dim, 1, 5)
        shared_bytes[f"fp32-{head_dim}-split"] = compile_splits("fp32", head_dim, 1, 2)
    for num_sequences, max_query_len in ((1, 1), (1, 16), (8, 5), (64, 1), (64, 5)):
        name = f"bf16-{num_sequences}x{max_query_len}-split"
        shared_bytes[name] = compile_splits("bf16", 128, num_sequences, max_query_len)
    for dtype in DTYPES:
        shared_bytes[f"{dtype}-window-softcap-split"] = compile_splits(dtype, 128, 1, 5, 4096, 50.0)
    for dtype in DTYPES:
        shared_bytes[f"{dtype}-store"] = compile_store(dtype, 80)
    print(json.dumps(shared_bytes))


if __name__ == "__main__":
    main()
