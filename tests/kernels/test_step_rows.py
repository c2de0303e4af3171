"""Laying out a step's rows from slots, and putting back what it finds: kernels against plain torch, and by hand."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kernels.step_rows import (
    LaidOutRows,
    SlotState,
    advance_slots,
    keep_rows,
    lay_out_rows,
)
from tests.kernels.conftest import TritonDevice

BLOCK_SIZE = 16


def make_state(num_slots: int, max_blocks: int, seed: int = 0) -> SlotState:
    random = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    return SlotState(
        lengths=integers(1, BLOCK_SIZE * max_blocks - 40, num_slots),
        last_tokens=integers(0, 1000, num_slots).int(),
        temperature=torch.rand(num_slots, generator=random),
        seeds=integers(-(2**62), 2**62, num_slots),
        top_k=integers(0, 50, num_slots).int(),
        top_p=torch.rand(num_slots, generator=random),
        min_p=torch.rand(num_slots, generator=random),
        is_coupled=integers(0, 2, num_slots).int(),
        block_tables=integers(0, 10_000, num_slots, max_blocks).int(),
    )


def moved(state: SlotState, device: torch.device) -> SlotState:
    return SlotState(**{field.name: getattr(state, field.name).to(device, copy=True) for field in fields(state)})


def poisoned(batch: int, num_tokens: int, max_blocks: int, device: torch.device) -> LaidOutRows:
    rows = LaidOutRows.empty(batch, num_tokens, max_blocks, device)
    for field in fields(rows):
        getattr(rows, field.name).fill_(77)
    return rows


def test_a_step_by_hand() -> None:
    """Catches a chained row at the host's place, a draft at another row's, padding that the cache would keep."""
    state = make_state(4, 8)
    state.lengths[2], state.last_tokens[2] = 18, 500
    rows = poisoned(3, 6, 8, torch.device("cpu"))
    lay_out_rows(
        state,
        torch.tensor([2, 0, 3], dtype=torch.int32),
        torch.tensor([-1, 15, 0]),
        torch.tensor([3, 2, 0], dtype=torch.int32),
        torch.tensor([9, 21, 5], dtype=torch.int32),
        torch.tensor([11, 12, 22, 5], dtype=torch.int32),
        block_size=BLOCK_SIZE,
        max_query_len=3,
        out=rows,
    )
    assert rows.token_ids.tolist() == [500, 11, 12, 21, 22, 0]
    assert rows.positions.tolist() == [17, 18, 19, 15, 16, 0]
    second, first = state.block_tables[2, 1].item(), state.block_tables[0].tolist()
    assert rows.slot_mapping.tolist() == [
        *(second * BLOCK_SIZE + place for place in (1, 2, 3)),
        first[0] * BLOCK_SIZE + 15,
        first[1] * BLOCK_SIZE,
        -1,
    ]
    assert rows.owners.tolist() == [0, 0, 0, 1, 1, 3]
    assert rows.cu_query_lens.tolist() == [0, 3, 5, 5]
    assert rows.cu_num_drafts.tolist() == [0, 2, 3, 3]
    assert rows.last_places.tolist() == [2, 4, 4]
    assert rows.context_lens.tolist() == [20, 17, 0]
    assert rows.sample_positions.tolist() == [18, 16, 0]
    assert rows.seeds.tolist() == state.seeds[[2, 0, 3]].tolist()
    assert rows.is_coupled.tolist() == state.is_coupled[[2, 0, 3]].tolist()

    results = torch.full((3, 5), 77, dtype=torch.int32)
    accepted = torch.tensor([1, 0, 0], dtype=torch.int32)
    found = torch.tensor([[11, 40, -1, -1], [41, -1, -1, -1], [0, -1, -1, -1]], dtype=torch.int32)
    advance_slots(state, torch.tensor([2, 0, 3], dtype=torch.int32), rows.sample_positions, accepted, found, results)
    assert results.tolist() == [[1, 11, 40, -1, -1], [0, 41, -1, -1, -1], [0, 0, -1, -1, -1]]
    assert (state.lengths[[2, 0]].tolist(), state.last_tokens[[2, 0]].tolist()) == ([20, 17], [40, 41])


@pytest.mark.parametrize(
    ("batch", "num_rows", "max_query_len"), [(1, 1, 1), (7, 5, 5), (63, 63, 5), (64, 0, 3), (111, 90, 2)]
)
def test_kernels_do_what_plain_torch_does(
    triton_device: TritonDevice, batch: int, num_rows: int, max_query_len: int
) -> None:
    max_blocks, num_slots = 700, batch + 1  # more columns than a program copies at once
    random = torch.Generator().manual_seed(batch)
    state = make_state(num_slots, max_blocks, seed=batch)
    slots = torch.full((batch,), batch, dtype=torch.int32)
    slots[:num_rows] = torch.randperm(batch, generator=random)[:num_rows].int()
    query_lens = torch.zeros(batch, dtype=torch.int32)
    query_lens[:num_rows] = torch.randint(1, max_query_len + 1, (num_rows,), generator=random).int()
    starts = torch.where(torch.rand(batch, generator=random) < 0.5, -1, state.lengths[slots.long()] - 1)
    num_tokens = batch * max_query_len
    first_tokens, more_tokens = (torch.randint(0, 1000, (n,), generator=random).int() for n in (batch, num_tokens))
    accepted = (torch.rand(batch, generator=random) * query_lens).int().clamp(max=(query_lens - 1).clamp(min=0))
    found = torch.randint(0, 1000, (batch, max_query_len), generator=random).int()
    logits = torch.randn(num_tokens, 5000, generator=random).bfloat16()
    is_kept = (torch.rand(batch, generator=random) < 0.3).int()

    def run(device: torch.device) -> list[torch.Tensor]:
        here = moved(state, device)
        rows = poisoned(batch, num_tokens, max_blocks, device)
        lay_out_rows(
            here,
            *(values.to(device) for values in (slots, starts, query_lens, first_tokens, more_tokens)),
            block_size=BLOCK_SIZE,
            max_query_len=max_query_len,
            out=rows,
        )
        results = torch.full((batch, max_query_len + 1), 77, dtype=torch.int32, device=device)
        advance_slots(here, slots.to(device), rows.sample_positions, accepted.to(device), found.to(device), results)
        kept = torch.full_like(logits, 77.0, device=device)
        keep_rows(logits.to(device), rows.owners, is_kept.to(device), kept)
        # What nobody reads: blocks behind a context's, the slot of padding.
        for row, length in enumerate(rows.context_lens.tolist()):
            rows.block_tables[row, -(-length // BLOCK_SIZE) :] = 0
        here.lengths[-1] = here.last_tokens[-1] = 0
        tensors = [getattr(rows, field.name) for field in fields(rows)]
        return [tensor.cpu() for tensor in (*tensors, here.lengths, here.last_tokens, results, kept)]

    expected = run(torch.device("cpu"))
    with triton_device() as device:
        actual = run(device)
    for wanted, got in zip(expected, actual, strict=True):
        assert torch.equal(wanted, got)
