"""What stands between the slots of sequences and a step of fixed shape: rows laid out for the model, results put back.

A slot holds on the device what a step needs of a running sequence, so that one step can follow another without a word
from the host: where the sequence ends and its last token are written by the step that samples it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.dispatch import runs_triton


@dataclass(frozen=True)
class SlotState:
    """By slot, the last of which is nobody's: padding reads and writes it."""

    lengths: torch.Tensor  # [num_slots] int64: tokens of the sequence, committed or sampled by a step in flight
    last_tokens: torch.Tensor  # [num_slots] int32: the last one of them
    temperature: torch.Tensor  # [num_slots] float32
    seeds: torch.Tensor  # [num_slots] int64, the bit pattern of a uint64
    top_k: torch.Tensor  # [num_slots] int32
    top_p: torch.Tensor  # [num_slots] float32
    min_p: torch.Tensor  # [num_slots] float32
    is_coupled: torch.Tensor  # [num_slots] int32: 0 or 1
    block_tables: torch.Tensor  # [num_slots, max_blocks] int32


@dataclass(frozen=True)
class LaidOutRows:
    """The rows of a step behind each other, with room for `batch` of them and `num_tokens` tokens in all."""

    token_ids: torch.Tensor  # [num_tokens] int32, 0 behind the last row
    positions: torch.Tensor  # [num_tokens] int64, 0 behind the last row
    slot_mapping: torch.Tensor  # [num_tokens] int64: place in the KV cache; -1 behind the last row
    owners: torch.Tensor  # [num_tokens] int32: the row of each token, `batch` behind the last row
    cu_query_lens: torch.Tensor  # [batch + 1] int32
    last_places: torch.Tensor  # [batch] int64: where each row's last token stands; of rows without any, another's
    context_lens: torch.Tensor  # [batch] int32, 0 for rows without tokens
    cu_num_drafts: torch.Tensor  # [batch + 1] int32: where each row's tokens but the first start, and the end
    sample_positions: torch.Tensor  # [batch] int64: of the token that follows each row's first one
    temperature: torch.Tensor  # [batch] float32
    seeds: torch.Tensor  # [batch] int64
    top_k: torch.Tensor  # [batch] int32
    top_p: torch.Tensor  # [batch] float32
    min_p: torch.Tensor  # [batch] float32
    is_coupled: torch.Tensor  # [batch] int32
    block_tables: torch.Tensor  # [batch, max_blocks] int32; only the blocks of a row's context are written

    @classmethod
    def empty(cls, batch: int, num_tokens: int, max_blocks: int, device: torch.device) -> LaidOutRows:
        """Room for so much."""

        def room(shape: int | tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return cls(
            token_ids=room(num_tokens, i32),
            positions=room(num_tokens, i64),
            slot_mapping=room(num_tokens, i64),
            owners=room(num_tokens, i32),
            cu_query_lens=room(batch + 1, i32),
            last_places=room(batch, i64),
            context_lens=room(batch, i32),
            cu_num_drafts=room(batch + 1, i32),
            sample_positions=room(batch, i64),
            temperature=room(batch, f32),
            seeds=room(batch, i64),
            top_k=room(batch, i32),
            top_p=room(batch, f32),
            min_p=room(batch, f32),
            is_coupled=room(batch, i32),
            block_tables=room((batch, max_blocks), i32),
        )


def lay_out_rows(
    state: SlotState,
    slots: torch.Tensor,  # [batch] int32
    starts: torch.Tensor,  # [batch] int64: position of the first token; -1: the slot's last token is the first
    query_lens: torch.Tensor,  # [batch] int32: tokens of each row; 0 for rows behind the last
    first_tokens: torch.Tensor,  # [batch] int32; ignored where a row starts at -1
    more_tokens: torch.Tensor,  # [n] int32: all rows' tokens but the first, row behind row
    *,
    block_size: int,
    max_query_len: int,
    out: LaidOutRows,
) -> None:
    """Lay out a step: tokens with their positions and places in the cache, and how each row is sampled.

    Rows without tokens stand behind all others. The blocks of a slot cover all its row's positions.
    """
    if runs_triton(first_tokens):
        from kernels.step_rows_triton import launch_lay_out_rows

        given = (slots, starts, query_lens, first_tokens, more_tokens)
        launch_lay_out_rows(state, *given, block_size=block_size, max_query_len=max_query_len, out=out)
        return
    num_rows = int((query_lens > 0).sum())
    rows, lens = slots[:num_rows].long(), query_lens[:num_rows].long()
    is_chained = starts[:num_rows] < 0
    first = torch.where(is_chained, state.lengths[rows] - 1, starts[:num_rows])
    ends = lens.cumsum(0)
    total = int(ends[-1]) if num_rows else 0
    owners = torch.repeat_interleave(torch.arange(num_rows), lens)
    offsets = torch.arange(total) - (ends - lens)[owners]
    positions = first[owners] + offsets
    tokens = out.token_ids.zero_()[:total]
    tokens[offsets == 0] = torch.where(is_chained, state.last_tokens[rows], first_tokens[:num_rows])
    tokens[offsets > 0] = more_tokens[: total - num_rows]
    out.positions.zero_()[:total] = positions
    blocks = state.block_tables[rows[owners], positions // block_size].long()
    out.slot_mapping.fill_(-1)[:total] = blocks * block_size + positions % block_size
    out.owners.fill_(len(slots))[:total] = owners.int()
    out.cu_query_lens.fill_(total)[0] = 0
    out.cu_query_lens[1 : num_rows + 1] = ends.int()
    out.last_places.copy_((out.cu_query_lens[1:] - 1).clamp(min=0))
    out.context_lens.zero_()[:num_rows] = (first + lens).int()
    out.cu_num_drafts.fill_(total - num_rows)[0] = 0
    out.cu_num_drafts[1 : num_rows + 1] = (lens - 1).cumsum(0).int()
    out.sample_positions.zero_()[:num_rows] = first + 1
    for name in ("temperature", "seeds", "top_k", "top_p", "min_p", "is_coupled", "block_tables"):
        getattr(out, name).copy_(getattr(state, name)[slots.long()])


def advance_slots(
    state: SlotState,
    slots: torch.Tensor,  # [batch] int32
    sample_positions: torch.Tensor,  # [batch] int64: of each row's first new token
    num_accepted: torch.Tensor,  # [batch] int32
    token_ids: torch.Tensor,  # [batch, n] int32: what each row commits, num_accepted + 1 tokens
    results: torch.Tensor,  # [batch, n + 1] int32, written: num_accepted, then the tokens
) -> None:
    """Move each sequence on to the end of what its row commits, and write the results as the host reads them."""
    if runs_triton(token_ids):
        from kernels.step_rows_triton import launch_advance_slots

        launch_advance_slots(state, slots, sample_positions, num_accepted, token_ids, results)
        return
    results[:, 0] = num_accepted
    results[:, 1:] = token_ids
    index = slots.long()
    state.lengths[index] = sample_positions + num_accepted + 1
    state.last_tokens[index] = token_ids.gather(1, num_accepted.long().unsqueeze(1)).squeeze(1)


def keep_rows(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    owners: torch.Tensor,  # [num_tokens] int32: the row of each token, at least `batch` for none
    is_kept: torch.Tensor,  # [batch] int32: whether the row's logits are wanted
    out: torch.Tensor,  # [at least num_tokens, vocab_size], written where they are
) -> None:
    """Copy the logits of some rows to where the next step leaves them alone; the others cost next to nothing."""
    if runs_triton(logits):
        from kernels.step_rows_triton import launch_keep_rows

        launch_keep_rows(logits, owners, is_kept, out)
        return
    padded = torch.cat([is_kept, is_kept.new_zeros(1)])
    wanted = torch.nonzero(padded[owners.long().clamp(max=len(is_kept))]).flatten()
    out[wanted] = logits[wanted]
