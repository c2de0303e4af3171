"""One step's input: parts of sequences packed one after another into a single row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

# Triton compiles a second variant of a kernel for pointers that are not so aligned.
_ALIGNMENT = 16


@dataclass(frozen=True)
class SequenceSlice:
    """The part of one sequence that a step computes."""

    token_ids: Sequence[int]  # tokens to compute, at least one
    start: int  # position of the first of them
    block_ids: Sequence[int]  # the sequence's KV blocks in order; they cover start + len(token_ids) tokens
    num_logit_rows: int  # logits wanted for the last so many of the tokens; 0 for an inner prefill chunk


@dataclass(frozen=True)
class Batch:
    """Slices on the device, ready for the model."""

    token_ids: torch.Tensor  # [num_tokens] int64, or int32
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64, block * block_size + offset
    logit_rows: torch.Tensor | None  # [num_logit_rows] int64, the tokens whose logits are wanted; None: all
    cu_query_lens: torch.Tensor  # [batch + 1] int32, where each slice's tokens start, and the end
    context_lens: torch.Tensor  # [batch] int32, tokens of the sequence including the slice's
    block_tables: torch.Tensor  # [batch, max_blocks] int32, 0 beyond a sequence's blocks
    max_query_len: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True)
class TreeBatch:
    """Nodes of trees on the device, ready for the model: W of each of B sequences.

    A sequence's committed tokens are in its blocks, up to `prefix_lens`; its nodes, which stand behind them, have their
    keys and values in an area of reserved cache slots, in any order. A node's ancestors may be computed in the same
    pass. To fill up to a fixed shape, put nodes with slot -1 that are nobody's ancestor, and sequences without prefix.
    """

    token_ids: torch.Tensor  # [B * W] int64, or int32; sequence after sequence
    positions: torch.Tensor  # [B * W] int64
    slot_mapping: torch.Tensor  # [B * W] int64, where each node's keys and values go; -1: nowhere
    logit_rows: torch.Tensor | None  # [num_logit_rows] int64, the nodes whose logits are wanted; None: all
    prefix_lens: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, max_blocks] int32, anything beyond a sequence's prefix
    node_starts: torch.Tensor  # [B] int64, the cache slot where each sequence's area of E slots begins
    is_ancestor: torch.Tensor  # [B, W, E] bool, contiguous: places of the area that a node sees, its own among them
    # [B, E] int32 or int64, contiguous; read where somebody's ancestor is. None: no window is shorter than a tree deep.
    node_positions: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


def build_batch(slices: Sequence[SequenceSlice], *, block_size: int, num_blocks: int, device: torch.device) -> Batch:
    """Pack slices and upload them in one copy, without waiting for the device.

    Raises ValueError for an empty batch and for a slice that contradicts itself or names a block that does not exist.
    """
    if not slices:
        raise ValueError("a batch needs at least one slice")
    for index, part in enumerate(slices):
        _check_slice(index, part, block_size, num_blocks)

    query_lens = np.array([len(part.token_ids) for part in slices], dtype=np.int64)
    starts = np.array([part.start for part in slices], dtype=np.int64)
    num_logit_rows = np.array([part.num_logit_rows for part in slices], dtype=np.int64)
    num_used_blocks = -(-(starts + query_lens) // block_size)
    cu_query_lens = np.concatenate(([0], np.cumsum(query_lens)))
    num_tokens = int(cu_query_lens[-1])
    sequence = np.repeat(np.arange(len(slices)), query_lens)
    positions = np.arange(num_tokens) - np.repeat(cu_query_lens[:-1] - starts, query_lens)
    block_tables = np.zeros((len(slices), int(num_used_blocks.max())), dtype=np.int32)
    for row, part, num_used in zip(block_tables, slices, num_used_blocks, strict=True):
        row[:num_used] = part.block_ids[:num_used]
    slots = block_tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    # A slice's last tokens end where its successor's start.
    cu_logit_rows = np.cumsum(num_logit_rows)
    logit_rows = np.arange(int(cu_logit_rows[-1])) + np.repeat(cu_query_lens[1:] - cu_logit_rows, num_logit_rows)

    uploaded = _upload(
        {
            "token_ids": np.fromiter(chain.from_iterable(part.token_ids for part in slices), np.int64, num_tokens),
            "positions": positions,
            "slot_mapping": slots,
            "logit_rows": logit_rows,
            "cu_query_lens": cu_query_lens.astype(np.int32),
            "context_lens": (starts + query_lens).astype(np.int32),
            "block_tables": block_tables,
        },
        device,
    )
    return Batch(**uploaded, max_query_len=int(query_lens.max()))


def _check_slice(index: int, part: SequenceSlice, block_size: int, num_blocks: int) -> None:
    num_tokens = len(part.token_ids)
    if num_tokens < 1:
        raise ValueError(f"slice {index} has no tokens")
    if part.start < 0:
        raise ValueError(f"slice {index} starts at position {part.start}")
    if not 0 <= part.num_logit_rows <= num_tokens:
        raise ValueError(f"slice {index} wants {part.num_logit_rows} rows of logits of {num_tokens} tokens")
    num_used = -(-(part.start + num_tokens) // block_size)
    if len(part.block_ids) < num_used:
        raise ValueError(
            f"slice {index} ends at position {part.start + num_tokens - 1}, which {len(part.block_ids)} blocks of "
            f"{block_size} do not cover"
        )
    used = part.block_ids[:num_used]
    if min(used) < 0 or max(used) >= num_blocks:
        raise ValueError(f"slice {index} names a block outside 0..{num_blocks - 1}")


def _upload(arrays: dict[str, npt.NDArray[np.generic]], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy all arrays to the device as one buffer; the tensors returned are views of it."""
    offsets, num_bytes = [], 0
    for array in arrays.values():
        offsets.append(num_bytes)
        num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Pinned memory, or the copy would wait for the device; torch keeps the buffer until the copy has happened.
    buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for array, offset in zip(arrays.values(), offsets, strict=True):
        host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    uploaded = buffer.to(device, non_blocking=True)
    return {
        name: uploaded[offset : offset + array.nbytes]
        .view(torch.int64 if array.dtype == np.int64 else torch.int32)
        .view(array.shape)
        for (name, array), offset in zip(arrays.items(), offsets, strict=True)
    }
