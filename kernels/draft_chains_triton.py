"""Triton kernels of `kernels.draft_chains`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.draft_chains import NUM_RECENT_TOKENS, DraftInputs, DraftTrees, NewExpansions


def launch_take_expansions(
    trees: DraftTrees,
    sequence_lengths: torch.Tensor,  # [num_slots] int64
    new: NewExpansions,
) -> None:
    """`take_expansions` on the GPU, a program an expansion; links follow when all of them lie in place."""
    num_new, num_new_children = new.child_tokens.shape
    if num_new == 0:
        return
    max_expansions, num_children, num_candidates = *trees.child_tokens.shape[1:], trees.candidate_ids.shape[2]
    _catch_up_kernel[(len(sequence_lengths),)](
        trees.ids,
        trees.child_tokens,
        trees.child_ids,
        trees.stands,
        trees.lengths,
        trees.recent_tokens,
        sequence_lengths,
        MAX_EXPANSIONS=max_expansions,
        NUM_CHILDREN=num_children,
        CHILDREN=triton.next_power_of_2(num_children),
        NUM_RECENT=NUM_RECENT_TOKENS,
        num_warps=1,
    )
    _store_expansions_kernel[(num_new,)](
        new.slots,
        new.ids,
        new.child_tokens,
        new.candidate_ids,
        new.candidate_weights,
        trees.ids,
        trees.child_tokens,
        trees.child_ids,
        trees.candidate_ids,
        trees.candidate_weights,
        num_new_children,
        new.candidate_ids.shape[1],
        MAX_EXPANSIONS=max_expansions,
        NUM_CHILDREN=num_children,
        CHILDREN=triton.next_power_of_2(num_children),
        NUM_CANDIDATES=num_candidates,
        CANDIDATES=triton.next_power_of_2(max(num_candidates, 1)),
        num_warps=1,
    )
    _link_expansions_kernel[(num_new,)](
        new.slots,
        new.ids,
        new.parents,
        new.ranks,
        new.lengths,
        trees.ids,
        trees.child_ids,
        trees.stands,
        trees.lengths,
        MAX_EXPANSIONS=max_expansions,
        NUM_CHILDREN=num_children,
        num_warps=1,
    )


@triton.jit
def _is_there(
    ids_ptr,  # of one slot
    number,
    MAX_EXPANSIONS: tl.constexpr,
):
    is_id = number >= 0
    return is_id & (tl.load(ids_ptr + number % MAX_EXPANSIONS, mask=is_id, other=-1) == number)


@triton.jit
def _catch_up(
    slot,
    length,  # of the slot's sequence
    ids_ptr,  # of the slot
    child_tokens_ptr,
    child_ids_ptr,
    stands_ptr,  # of all slots
    lengths_ptr,
    recent_tokens_ptr,
    MAX_EXPANSIONS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    CHILDREN: tl.constexpr,
    NUM_RECENT: tl.constexpr,
):  # id of the expansion on which the sequence stands, and whether that is the one of its last token
    reached = tl.load(lengths_ptr + slot)
    stand = tl.load(stands_ptr + slot)
    is_there = _is_there(ids_ptr, stand, MAX_EXPANSIONS) & (length - reached <= NUM_RECENT)
    stand = tl.where(is_there, stand, -1)
    child = tl.arange(0, CHILDREN)
    is_child = child < NUM_CHILDREN
    is_walking = is_there & (reached < length)
    while is_walking:
        token = tl.load(recent_tokens_ptr + slot * NUM_RECENT + reached % NUM_RECENT)
        at = stand % MAX_EXPANSIONS * NUM_CHILDREN
        is_found = is_child & (tl.load(child_tokens_ptr + at + child, mask=is_child, other=-1) == token)
        rank = tl.min(tl.where(is_found, child, CHILDREN), axis=0)
        below = tl.load(child_ids_ptr + at + rank, mask=rank < CHILDREN, other=-1)
        is_there = _is_there(ids_ptr, below, MAX_EXPANSIONS)
        # No such child: a miss. One that is not expanded may yet be.
        stand = tl.where(is_there, below, tl.where(rank < CHILDREN, stand, -1))
        reached += is_there.to(tl.int64)
        is_walking = is_there & (reached < length)
    tl.store(stands_ptr + slot, stand)
    tl.store(lengths_ptr + slot, reached)
    return stand, is_there


@triton.jit
def _catch_up_kernel(
    ids_ptr,
    child_tokens_ptr,
    child_ids_ptr,
    stands_ptr,
    lengths_ptr,
    recent_tokens_ptr,
    sequence_lengths_ptr,
    MAX_EXPANSIONS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    CHILDREN: tl.constexpr,
    NUM_RECENT: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    _catch_up(
        slot,
        tl.load(sequence_lengths_ptr + slot),
        ids_ptr + slot * MAX_EXPANSIONS,
        child_tokens_ptr + slot * MAX_EXPANSIONS * NUM_CHILDREN,
        child_ids_ptr + slot * MAX_EXPANSIONS * NUM_CHILDREN,
        stands_ptr,
        lengths_ptr,
        recent_tokens_ptr,
        MAX_EXPANSIONS=MAX_EXPANSIONS,
        NUM_CHILDREN=NUM_CHILDREN,
        CHILDREN=CHILDREN,
        NUM_RECENT=NUM_RECENT,
    )


@triton.jit(do_not_specialize=["num_new_children", "num_new_candidates"])
def _store_expansions_kernel(
    slots_ptr,  # of the new ones
    new_ids_ptr,
    new_tokens_ptr,
    new_candidate_ids_ptr,
    new_candidate_weights_ptr,
    ids_ptr,  # of the slots
    child_tokens_ptr,
    child_ids_ptr,
    candidate_ids_ptr,
    candidate_weights_ptr,
    num_new_children,
    num_new_candidates,
    MAX_EXPANSIONS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    CHILDREN: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    new = tl.program_id(0).to(tl.int64)
    number = tl.load(new_ids_ptr + new)
    where = tl.load(slots_ptr + new).to(tl.int64) * MAX_EXPANSIONS + number % MAX_EXPANSIONS
    tl.store(ids_ptr + where, number)
    child = tl.arange(0, CHILDREN)
    token = tl.load(new_tokens_ptr + new * num_new_children + child, mask=child < num_new_children, other=-1)
    tl.store(child_tokens_ptr + where * NUM_CHILDREN + child, token, mask=child < NUM_CHILDREN)
    tl.store(child_ids_ptr + where * NUM_CHILDREN + child, token * 0 - 1, mask=child < NUM_CHILDREN)
    if NUM_CANDIDATES > 0:
        candidate = tl.arange(0, CANDIDATES)
        is_new = candidate < num_new_candidates
        source = new * num_new_candidates + candidate
        target = where * NUM_CANDIDATES + candidate
        is_kept = candidate < NUM_CANDIDATES
        tl.store(
            candidate_ids_ptr + target, tl.load(new_candidate_ids_ptr + source, mask=is_new, other=0), mask=is_kept
        )
        weights = tl.load(new_candidate_weights_ptr + source, mask=is_new, other=0)
        tl.store(candidate_weights_ptr + target, weights, mask=is_kept)


@triton.jit
def _link_expansions_kernel(
    slots_ptr,  # of the new ones
    new_ids_ptr,
    parents_ptr,
    ranks_ptr,
    new_lengths_ptr,
    ids_ptr,  # of the slots
    child_ids_ptr,
    stands_ptr,
    lengths_ptr,
    MAX_EXPANSIONS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
):
    new = tl.program_id(0)
    slot = tl.load(slots_ptr + new).to(tl.int64)
    number = tl.load(new_ids_ptr + new)
    parent = tl.load(parents_ptr + new)
    if parent < 0:
        tl.store(stands_ptr + slot, number)
        tl.store(lengths_ptr + slot, tl.load(new_lengths_ptr + new))
    else:
        where = slot * MAX_EXPANSIONS + parent % MAX_EXPANSIONS
        if tl.load(ids_ptr + where) == parent:
            tl.store(child_ids_ptr + where * NUM_CHILDREN + tl.load(ranks_ptr + new), number)


def launch_pick_chains(
    trees: DraftTrees,
    sequence_lengths: torch.Tensor,  # [num_slots] int64
    slots: torch.Tensor,  # [batch] int32
    most: torch.Tensor,  # [batch] int32
    length_limits: torch.Tensor,  # [batch] int64
    query_lens: torch.Tensor,  # [batch] int32
    given: DraftInputs,
    *,
    max_num_draft_tokens: int,
    out: DraftInputs,
) -> None:
    """`pick_chains` on the GPU: a program a row finds where its draft tokens lie, then all of them are put together."""
    batch = len(slots)
    max_expansions, num_children, num_candidates = *trees.child_tokens.shape[1:], trees.candidate_ids.shape[2]
    sources = torch.empty((batch, max_num_draft_tokens), dtype=torch.int32, device=slots.device)
    _find_chains_kernel[(batch,)](
        trees.ids,
        trees.child_tokens,
        trees.child_ids,
        trees.stands,
        trees.lengths,
        trees.recent_tokens,
        sequence_lengths,
        slots,
        most,
        length_limits,
        query_lens,
        sources,
        max_num_draft_tokens,
        MAX_EXPANSIONS=max_expansions,
        NUM_CHILDREN=num_children,
        CHILDREN=triton.next_power_of_2(num_children),
        NUM_RECENT=NUM_RECENT_TOKENS,
        num_warps=1,
    )
    _gather_chains_kernel[(batch, max_num_draft_tokens)](
        trees.child_tokens,
        trees.candidate_ids,
        trees.candidate_weights,
        slots,
        most,
        query_lens,
        sources,
        given.token_ids,
        given.candidate_ids,
        given.candidate_weights,
        out.token_ids,
        out.candidate_ids,
        out.candidate_weights,
        batch,
        max_num_draft_tokens,
        ROWS=triton.next_power_of_2(batch),
        MAX_EXPANSIONS=max_expansions,
        NUM_CHILDREN=num_children,
        NUM_CANDIDATES=num_candidates,
        CANDIDATES=triton.next_power_of_2(max(num_candidates, 1)),
        num_warps=1,
    )


@triton.jit
def _find_chains_kernel(
    ids_ptr,  # of the slots
    child_tokens_ptr,
    child_ids_ptr,
    stands_ptr,
    lengths_ptr,
    recent_tokens_ptr,
    sequence_lengths_ptr,
    slots_ptr,  # of the rows
    most_ptr,
    length_limits_ptr,
    query_lens_ptr,
    sources_ptr,  # [batch, max_num_draft_tokens]
    max_num_draft_tokens,
    MAX_EXPANSIONS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    CHILDREN: tl.constexpr,
    NUM_RECENT: tl.constexpr,
):
    row = tl.program_id(0)
    most = tl.load(most_ptr + row)
    if most >= 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        ids_ptr += slot * MAX_EXPANSIONS
        child_ids_ptr += slot * MAX_EXPANSIONS * NUM_CHILDREN
        length = tl.load(sequence_lengths_ptr + slot)
        stand, is_there = _catch_up(
            slot,
            length,
            ids_ptr,
            child_tokens_ptr + slot * MAX_EXPANSIONS * NUM_CHILDREN,
            child_ids_ptr,
            stands_ptr,
            lengths_ptr,
            recent_tokens_ptr,
            MAX_EXPANSIONS=MAX_EXPANSIONS,
            NUM_CHILDREN=NUM_CHILDREN,
            CHILDREN=CHILDREN,
            NUM_RECENT=NUM_RECENT,
        )
        limit = tl.load(length_limits_ptr + row) - length - 1
        wanted = tl.minimum(tl.minimum(most.to(tl.int64), max_num_draft_tokens), limit)
        number = 0
        is_picking = is_there & (number < wanted)
        while is_picking:
            place = stand % MAX_EXPANSIONS
            tl.store(sources_ptr + row * max_num_draft_tokens + number, place)
            stand = tl.load(child_ids_ptr + place * NUM_CHILDREN)
            number += 1
            is_picking = _is_there(ids_ptr, stand, MAX_EXPANSIONS) & (number < wanted)
        tl.store(query_lens_ptr + row, 1 + number)


@triton.jit
def _gather_chains_kernel(
    child_tokens_ptr,  # of the slots
    candidate_ids_ptr,
    candidate_weights_ptr,
    slots_ptr,  # of the rows
    most_ptr,
    query_lens_ptr,
    sources_ptr,
    given_tokens_ptr,
    given_ids_ptr,
    given_weights_ptr,
    out_tokens_ptr,
    out_ids_ptr,
    out_weights_ptr,
    batch,
    max_num_draft_tokens,
    ROWS: tl.constexpr,
    MAX_EXPANSIONS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row, number = tl.program_id(0), tl.program_id(1)
    if number + 1 < tl.load(query_lens_ptr + row):
        rows = tl.arange(0, ROWS)
        is_before = rows < row  # all of them are rows of the batch
        num_drafts = tl.maximum(tl.load(query_lens_ptr + rows, mask=is_before, other=0) - 1, 0)
        target = (tl.sum(num_drafts, axis=0) + number).to(tl.int64)
        candidate = tl.arange(0, CANDIDATES)
        is_candidate = candidate < NUM_CANDIDATES
        is_given = tl.load(most_ptr + row) < 0
        if is_given:
            brings_own = tl.load(most_ptr + rows, mask=is_before, other=0) < 0
            source = (tl.sum(tl.where(brings_own, num_drafts, 0), axis=0) + number).to(tl.int64)
            token = tl.load(given_tokens_ptr + source)
            ids = tl.load(given_ids_ptr + source * NUM_CANDIDATES + candidate, mask=is_candidate, other=0)
            weights = tl.load(given_weights_ptr + source * NUM_CANDIDATES + candidate, mask=is_candidate, other=0)
        else:
            place = tl.load(sources_ptr + row * max_num_draft_tokens + number)
            source = tl.load(slots_ptr + row).to(tl.int64) * MAX_EXPANSIONS + place
            token = tl.load(child_tokens_ptr + source * NUM_CHILDREN)
            ids = tl.load(candidate_ids_ptr + source * NUM_CANDIDATES + candidate, mask=is_candidate, other=0)
            weights = tl.load(candidate_weights_ptr + source * NUM_CANDIDATES + candidate, mask=is_candidate, other=0)
        tl.store(out_tokens_ptr + target, token)
        tl.store(out_ids_ptr + target * NUM_CANDIDATES + candidate, ids, mask=is_candidate)
        tl.store(out_weights_ptr + target * NUM_CANDIDATES + candidate, weights, mask=is_candidate)
