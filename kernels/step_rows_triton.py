"""Triton kernels of `kernels.step_rows`: small ones, of a program a row, that stand before and behind every step."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.step_rows import LaidOutRows, SlotState

_TABLE_COLUMNS = 512
_LOGIT_COLUMNS = 4096


def launch_lay_out_rows(
    state: SlotState,
    slots: torch.Tensor,  # [batch] int32
    starts: torch.Tensor,  # [batch] int64
    query_lens: torch.Tensor,  # [batch] int32
    first_tokens: torch.Tensor,  # [batch] int32
    more_tokens: torch.Tensor,  # [n] int32
    *,
    block_size: int,
    max_query_len: int,
    out: LaidOutRows,
) -> None:
    """`lay_out_rows` on the GPU."""
    batch = len(slots)
    _lay_out_rows_kernel[(batch,)](
        state.lengths,
        state.last_tokens,
        state.temperature,
        state.seeds,
        state.top_k,
        state.top_p,
        state.min_p,
        state.is_coupled,
        state.block_tables,
        slots,
        starts,
        query_lens,
        first_tokens,
        more_tokens,
        out.token_ids,
        out.positions,
        out.slot_mapping,
        out.owners,
        out.cu_query_lens,
        out.last_places,
        out.context_lens,
        out.cu_num_drafts,
        out.sample_positions,
        out.temperature,
        out.seeds,
        out.top_k,
        out.top_p,
        out.min_p,
        out.is_coupled,
        out.block_tables,
        batch,
        len(out.token_ids),
        state.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        ROWS=triton.next_power_of_2(batch),
        TOKENS=triton.next_power_of_2(max_query_len),
        COLUMNS=_TABLE_COLUMNS,
        num_warps=4,
    )


@triton.jit
def _lay_out_rows_kernel(
    lengths_ptr,  # of slots
    last_tokens_ptr,
    slot_temperature_ptr,
    slot_seeds_ptr,
    slot_top_k_ptr,
    slot_top_p_ptr,
    slot_min_p_ptr,
    slot_is_coupled_ptr,
    slot_tables_ptr,
    slots_ptr,  # of rows
    starts_ptr,
    query_lens_ptr,
    first_tokens_ptr,
    more_tokens_ptr,
    token_ids_ptr,  # written from here on, as `LaidOutRows` has them
    positions_ptr,
    slot_mapping_ptr,
    owners_ptr,
    cu_query_lens_ptr,
    last_places_ptr,
    context_lens_ptr,
    cu_num_drafts_ptr,
    sample_positions_ptr,
    temperature_ptr,
    seeds_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    is_coupled_ptr,
    tables_ptr,
    batch,
    num_tokens,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    all_lens = tl.load(query_lens_ptr + rows, mask=rows < batch, other=0)
    first_place = tl.sum(tl.where(rows < row, all_lens, 0), axis=0)  # of the row's tokens among all
    total = tl.sum(all_lens, axis=0)
    drafts_before = first_place - tl.sum(tl.where((rows < row) & (all_lens > 0), 1, 0), axis=0)
    query_len = tl.load(query_lens_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    given_start = tl.load(starts_ptr + row)
    is_chained = given_start < 0
    start = tl.where(is_chained, tl.load(lengths_ptr + slot) - 1, given_start)

    tokens = tl.arange(0, TOKENS)
    is_own = tokens < query_len
    place = first_place + tokens
    first_token = tl.where(is_chained, tl.load(last_tokens_ptr + slot), tl.load(first_tokens_ptr + row))
    token = tl.load(more_tokens_ptr + drafts_before + tokens - 1, mask=is_own & (tokens > 0), other=0)
    token = tl.where(tokens == 0, first_token, token)
    position = start + tokens
    block = tl.load(slot_tables_ptr + slot * table_stride + position // BLOCK_SIZE, mask=is_own, other=0)
    tl.store(token_ids_ptr + place, token, mask=is_own)
    tl.store(positions_ptr + place, position, mask=is_own)
    tl.store(slot_mapping_ptr + place, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_own)
    tl.store(owners_ptr + place, row + tl.zeros_like(place), mask=is_own)
    # What stands behind the last row is shared out among all programs.
    place = row * TOKENS + tokens
    is_padding = (place >= total) & (place < num_tokens)
    tl.store(token_ids_ptr + place, tl.zeros_like(token), mask=is_padding)
    tl.store(positions_ptr + place, tl.zeros_like(position), mask=is_padding)
    tl.store(slot_mapping_ptr + place, tl.full([TOKENS], -1, tl.int64), mask=is_padding)
    tl.store(owners_ptr + place, batch + tl.zeros_like(place), mask=is_padding)

    has_tokens = query_len > 0
    context_len = tl.where(has_tokens, start + query_len, 0)
    if row == 0:
        tl.store(cu_query_lens_ptr, 0)
        tl.store(cu_num_drafts_ptr, 0)
    tl.store(cu_query_lens_ptr + row + 1, first_place + query_len)
    tl.store(last_places_ptr + row, tl.maximum(first_place + query_len - 1, 0).to(tl.int64))
    tl.store(cu_num_drafts_ptr + row + 1, drafts_before + tl.where(has_tokens, query_len - 1, 0))
    tl.store(context_lens_ptr + row, context_len.to(tl.int32))
    tl.store(sample_positions_ptr + row, tl.where(has_tokens, start + 1, 0))
    tl.store(temperature_ptr + row, tl.load(slot_temperature_ptr + slot))
    tl.store(seeds_ptr + row, tl.load(slot_seeds_ptr + slot))
    tl.store(top_k_ptr + row, tl.load(slot_top_k_ptr + slot))
    tl.store(top_p_ptr + row, tl.load(slot_top_p_ptr + slot))
    tl.store(min_p_ptr + row, tl.load(slot_min_p_ptr + slot))
    tl.store(is_coupled_ptr + row, tl.load(slot_is_coupled_ptr + slot))
    num_blocks = (context_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    num_blocks = tl.where(has_tokens, tl.minimum(num_blocks, table_stride), 0)
    columns = tl.arange(0, COLUMNS)
    first_column = 0
    while first_column < num_blocks:
        column = first_column + columns
        is_used = column < num_blocks
        blocks = tl.load(slot_tables_ptr + slot * table_stride + column, mask=is_used)
        tl.store(tables_ptr + row.to(tl.int64) * table_stride + column, blocks, mask=is_used)
        first_column += COLUMNS


def launch_advance_slots(
    state: SlotState,
    slots: torch.Tensor,  # [batch] int32
    sample_positions: torch.Tensor,  # [batch] int64
    num_accepted: torch.Tensor,  # [batch] int32
    token_ids: torch.Tensor,  # [batch, n] int32
    results: torch.Tensor,  # [batch, n + 1] int32
) -> None:
    """`advance_slots` on the GPU."""
    batch, num_tokens = token_ids.shape
    _advance_slots_kernel[(batch,)](
        state.lengths,
        state.last_tokens,
        slots,
        sample_positions,
        num_accepted,
        token_ids,
        results,
        num_tokens,
        token_ids.stride(0),
        results.stride(0),
        TOKENS=triton.next_power_of_2(num_tokens),
        num_warps=1,
    )


@triton.jit
def _advance_slots_kernel(
    lengths_ptr,
    last_tokens_ptr,
    slots_ptr,
    sample_positions_ptr,
    num_accepted_ptr,
    token_ids_ptr,
    results_ptr,
    num_tokens,
    token_stride,
    result_stride,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    num_accepted = tl.load(num_accepted_ptr + row)
    tokens = tl.arange(0, TOKENS)
    found = tl.load(token_ids_ptr + row * token_stride + tokens, mask=tokens < num_tokens, other=0)
    tl.store(results_ptr + row * result_stride, num_accepted)
    tl.store(results_ptr + row * result_stride + 1 + tokens, found, mask=tokens < num_tokens)
    tl.store(lengths_ptr + slot, tl.load(sample_positions_ptr + row) + num_accepted + 1)
    tl.store(last_tokens_ptr + slot, tl.sum(tl.where(tokens == num_accepted, found, 0), axis=0))


def launch_keep_rows(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    owners: torch.Tensor,  # [num_tokens] int32
    is_kept: torch.Tensor,  # [batch] int32
    out: torch.Tensor,  # [at least num_tokens, vocab_size]
) -> None:
    """`keep_rows` on the GPU, a program for each stretch of a row."""
    num_tokens, vocab_size = logits.shape
    _keep_rows_kernel[(num_tokens, triton.cdiv(vocab_size, _LOGIT_COLUMNS))](
        logits,
        owners,
        is_kept,
        out,
        len(is_kept),
        vocab_size,
        logits.stride(0),
        out.stride(0),
        COLUMNS=_LOGIT_COLUMNS,
        num_warps=4,
    )


@triton.jit
def _keep_rows_kernel(
    logits_ptr,
    owners_ptr,
    is_kept_ptr,
    out_ptr,
    batch,
    vocab_size,
    logits_stride,
    out_stride,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners_ptr + token)
    is_wanted = tl.load(is_kept_ptr + owner, mask=owner < batch, other=0)
    if is_wanted > 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_inside = column < vocab_size
        found = tl.load(logits_ptr + token * logits_stride + column, mask=is_inside)
        tl.store(out_ptr + token * out_stride + column, found, mask=is_inside)
