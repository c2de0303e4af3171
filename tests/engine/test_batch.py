"""Packing slices of sequences into one step's tensors."""

from __future__ import annotations

import torch

from engine.batch import Batch, SequenceSlice, build_batch


def build(*slices: SequenceSlice) -> Batch:
    return build_batch(slices, block_size=16, num_blocks=10, device=torch.device("cpu"))


def test_packed_tensors() -> None:
    batch = build(
        SequenceSlice([11, 12, 13], start=15, block_ids=[4, 9, 7], num_logit_rows=2),
        SequenceSlice([21, 22], start=0, block_ids=[2], num_logit_rows=0),
        SequenceSlice([31], start=40, block_ids=(1, 3, 5), num_logit_rows=1),
    )
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 22, 31]
    assert batch.positions.tolist() == [15, 16, 17, 0, 1, 40]
    assert batch.slot_mapping.tolist() == [4 * 16 + 15, 9 * 16, 9 * 16 + 1, 2 * 16, 2 * 16 + 1, 5 * 16 + 8]
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == [1, 2, 5]
    assert batch.cu_query_lens.tolist() == [0, 3, 5, 6]
    assert batch.context_lens.tolist() == [18, 2, 41]
    # A block that the slice does not reach yet is left out.
    assert batch.block_tables.tolist() == [[4, 9, 0], [2, 0, 0], [1, 3, 5]]
    assert (batch.max_query_len, batch.num_tokens) == (3, 6)


def test_types_and_alignment() -> None:
    batch = build(SequenceSlice(range(5), start=0, block_ids=range(1), num_logit_rows=0))
    assert batch.logit_rows is not None
    wide = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows)
    narrow = (batch.cu_query_lens, batch.context_lens, batch.block_tables)
    assert {tensor.dtype for tensor in wide} == {torch.int64}
    assert {tensor.dtype for tensor in narrow} == {torch.int32}
    base = batch.token_ids.data_ptr()
    assert all((tensor.data_ptr() - base) % 16 == 0 for tensor in (*wide, *narrow) if tensor.numel())
    assert batch.logit_rows.shape == (0,)
