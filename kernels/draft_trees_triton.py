"""Triton kernels of `kernels.draft_trees`: one program a sequence walks and chooses, one a place lays out, one grows.

Plain torch would take more than a hundred small kernels, a third of the time of a pass.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# Triton's decorators and device functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.draft_trees import CHAIN_RESERVE, MAX_DEPTH, NUM_RECENT, TreeLimits, TreePass, TreeState

_LAST_INDEX = tl.constexpr(0x7FFFFFFF)
_LOW_WORD = tl.constexpr(0xFFFFFFFF)
_NO_KEY = tl.constexpr(-(1 << 63))


def launch_advance_trees(
    state: TreeState,
    slots: torch.Tensor,  # [B] int64
    block_tables: torch.Tensor,  # [B, max_blocks] int32
    limits: TreeLimits,
    out: TreePass,
) -> None:
    """`advance_trees` on the GPU."""
    batch, width = out.rows.shape
    is_expanded = state.is_expanded.view(torch.uint8)
    shape = {
        "RING": state.max_expansions,
        "CHILDREN": state.max_children,
        "PLACES": width,
        "DEPTH": MAX_DEPTH,
        "RECENT": NUM_RECENT,
        "RING_LANES": triton.next_power_of_2(state.max_expansions),
    }
    _choose_kernel[(batch,)](
        state.lengths,
        state.recent_tokens,
        state.ring_sizes,
        state.num_children,
        state.max_depths,
        state.prefix_lens,
        state.stands,
        state.stand_ids,
        state.next_ids,
        state.tokens,
        state.positions,
        state.logps,
        state.ancestors,
        state.child_tokens,
        state.child_logps,
        is_expanded,
        slots,
        block_tables,
        block_tables.stride(0),
        limits.min_logp,
        limits.max_length,
        limits.area_start,
        out.prefix_lens,
        out.copy_sources,
        out.copy_targets,
        out.chosen,
        out.plan,
        out.lengths,
        out.stand_positions,
        out.num_new,
        out.first_places,
        out.num_told,
        out.first_ids,
        **shape,
        CHILD_LANES=triton.next_power_of_2(state.max_children),
        PLACE_LANES=triton.next_power_of_2(width),
        RESERVE=CHAIN_RESERVE,
        BLOCK_SIZE=limits.block_size,
        num_warps=8,
    )
    _lay_out_kernel[(batch, width)](
        state.recent_tokens,
        state.tokens,
        state.positions,
        state.logps,
        state.ancestors,
        state.child_tokens,
        state.child_logps,
        is_expanded,
        slots,
        limits.area_start,
        out.plan,
        out.chosen,
        out.first_places,
        out.token_ids,
        out.positions,
        out.slot_mapping,
        out.sample_positions,
        out.is_ancestor.view(torch.uint8),
        out.rows,
        out.logps,
        out.parents,
        out.ranks,
        **shape,
        CHILD_LANES=triton.next_power_of_2(state.max_children),
        num_warps=4,
    )


@triton.jit
def _ids_of(rows, next_id, ring):
    """The last expansion in each row of a ring, made or not."""
    newest = next_id - 1
    return newest - ((newest - rows) % ring + ring) % ring


@triton.jit
def _choose_kernel(
    lengths_ptr,
    recent_ptr,
    ring_sizes_ptr,
    num_children_ptr,
    max_depths_ptr,
    prefix_lens_ptr,
    stands_ptr,
    stand_ids_ptr,
    next_ids_ptr,
    tokens_ptr,
    positions_ptr,
    logps_ptr,
    ancestors_ptr,
    child_tokens_ptr,
    child_logps_ptr,
    is_expanded_ptr,
    slots_ptr,
    tables_ptr,
    table_stride,
    min_logp,
    max_length,
    area_start,
    out_prefix_lens_ptr,
    sources_ptr,
    targets_ptr,
    chosen_ptr,  # [B, PLACES]: the child that each place expands, by its index in the ring
    plan_ptr,  # [B, 8]: what `_lay_out_kernel` goes by
    out_lengths_ptr,
    stand_positions_ptr,
    num_new_ptr,
    first_places_ptr,
    num_told_ptr,
    first_ids_ptr,
    RING: tl.constexpr,
    CHILDREN: tl.constexpr,
    PLACES: tl.constexpr,
    DEPTH: tl.constexpr,
    RECENT: tl.constexpr,
    RING_LANES: tl.constexpr,
    CHILD_LANES: tl.constexpr,
    PLACE_LANES: tl.constexpr,
    RESERVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    length = tl.load(lengths_ptr + slot)
    ring = tl.load(ring_sizes_ptr + slot)
    num_children = tl.load(num_children_ptr + slot)
    old_prefix = tl.load(prefix_lens_ptr + slot)
    old_stand = tl.load(stands_ptr + slot)
    next_id = tl.load(next_ids_ptr + slot)
    has_stand = old_stand >= 0

    lanes = tl.arange(0, RING_LANES).to(tl.int64)
    is_row = lanes < ring
    ids = _ids_of(lanes, next_id, ring)
    first = slot * RING
    positions = tl.load(positions_ptr + first + lanes, mask=is_row, other=-1).to(tl.int64)
    tokens = tl.load(tokens_ptr + first + lanes, mask=is_row, other=-1)

    # Walk to the child whose token is committed, for as long as there is one.
    stand = tl.where(has_stand, old_stand, 0)
    stand_id = tl.load(stand_ids_ptr + slot)
    base = tl.where(has_stand, tl.load(positions_ptr + first + stand).to(tl.int64), old_prefix - 1)
    is_walking = has_stand & (base + 1 < length)
    while is_walking:
        token = tl.load(recent_ptr + slot * RECENT + (base + 1) % RECENT)
        parents = tl.load(ancestors_ptr + (first + lanes) * DEPTH + base % DEPTH, mask=is_row, other=-1)
        is_next = is_row & (parents == stand) & (ids > stand_id) & (positions == base + 1) & (tokens == token)
        found = tl.max(tl.where(is_next, lanes, -1), axis=0)
        has_found = found >= 0
        stand_id = tl.where(has_found, tl.max(tl.where(is_next, ids, -1), axis=0), stand_id)
        stand = tl.where(has_found, found, stand)
        base = tl.where(has_found, base + 1, base)
        is_walking = has_found & (base + 1 < length)
    prefix = tl.where(has_stand, base, old_prefix)

    # What the tree has walked over becomes part of the prefix.
    depths = tl.arange(0, DEPTH).to(tl.int64)
    moved = old_prefix + depths
    is_moved = moved < prefix
    moved_rows = tl.load(ancestors_ptr + (first + stand) * DEPTH + moved % DEPTH, mask=is_moved, other=0).to(tl.int64)
    blocks = tl.load(tables_ptr + row * table_stride + moved // BLOCK_SIZE, mask=is_moved, other=0).to(tl.int64)
    sources = tl.where(is_moved, area_start + first + moved_rows, -1)
    targets = tl.where(is_moved, blocks * BLOCK_SIZE + moved % BLOCK_SIZE, -1)
    tl.store(sources_ptr + row * DEPTH + depths, sources)
    tl.store(targets_ptr + row * DEPTH + depths, targets)

    # Committed tokens that no expansion stands for.
    num_missing = length - 1 - base
    num_chained = tl.minimum(num_missing, tl.minimum(PLACES, DEPTH - 1))

    # The children of the most probable paths, one after another.
    children = tl.arange(0, CHILD_LANES).to(tl.int64)
    last_position = tl.minimum(prefix + DEPTH - 1, base + tl.load(max_depths_ptr + slot))
    last_position = tl.minimum(last_position, max_length - 2)
    own = tl.load(ancestors_ptr + (first + lanes) * DEPTH + base % DEPTH, mask=is_row & (base >= 0), other=-1)
    may_expand = is_row & (own == stand) & (ids >= stand_id) & (positions >= base) & (positions < base + DEPTH)
    may_expand = may_expand & (positions < last_position) & has_stand & (num_missing == 0)
    index = lanes[:, None] * CHILDREN + children[None, :]
    is_child = may_expand[:, None] & (children[None, :] < CHILDREN) & (children[None, :] < num_children)
    logps = tl.load(child_logps_ptr + first * CHILDREN + index, mask=is_child, other=-float("inf"))
    is_taken = tl.load(is_expanded_ptr + first * CHILDREN + index, mask=is_child, other=1) != 0
    stand_logp = tl.load(logps_ptr + first + stand)
    is_open = is_child & (is_taken == 0) & (logps - stand_logp >= min_logp) & (logps > -float("inf"))
    bits = logps.to(tl.int32, bitcast=True).to(tl.int64)
    ordered = tl.where(bits < 0, bits ^ _LAST_INDEX, bits)
    keys = tl.where(is_open, (ordered << 32) | (_LAST_INDEX - index), _NO_KEY)
    room = tl.minimum(stand_id + ring - RESERVE - next_id, PLACES)
    places = tl.arange(0, PLACE_LANES)
    chosen = tl.full((PLACE_LANES,), -1, tl.int64)
    num_chosen = num_chained * 0
    best = tl.max(tl.max(keys, axis=1), axis=0)
    while (best != _NO_KEY) & (num_chosen < room):
        chosen = tl.where(places == num_chosen, _LAST_INDEX - (best & _LOW_WORD), chosen)
        keys = tl.where(keys == best, _NO_KEY, keys)
        num_chosen += 1
        best = tl.max(tl.max(keys, axis=1), axis=0)
    tl.store(chosen_ptr + row * PLACES + places, chosen, mask=places < PLACES)

    # Of a chain its end alone is told, as a child where it is one and nothing else was missing.
    last_token = tl.load(recent_ptr + slot * RECENT + (length + RECENT - 1) % RECENT)
    stand_children = tl.load(
        child_tokens_ptr + (first + stand) * CHILDREN + children, mask=children < CHILDREN, other=-1
    )
    is_same = (stand_children == last_token) & (children < num_children) & (children < CHILDREN)
    rank = tl.min(tl.where(is_same, children, CHILD_LANES), axis=0)
    continues = (rank < CHILD_LANES) & (num_missing == 1) & has_stand
    is_chain = num_chained > 0
    num_new = num_chained + num_chosen
    first_place = tl.where(is_chain, num_chained - (num_chained == num_missing).to(tl.int64), 0)
    plan = plan_ptr + row * 8
    tl.store(plan, num_chained)
    tl.store(plan + 1, num_new)
    tl.store(plan + 2, tl.where(has_stand, stand, -1))
    tl.store(plan + 3, base)
    tl.store(plan + 4, next_id)
    tl.store(plan + 5, ring)
    tl.store(plan + 6, tl.where(continues, stand_id, -1))
    tl.store(plan + 7, tl.where(continues, rank, 0))
    tl.store(out_prefix_lens_ptr + row, prefix.to(tl.int32))
    tl.store(out_lengths_ptr + row, length.to(tl.int32))
    tl.store(stand_positions_ptr + row, (base + num_chained).to(tl.int32))
    tl.store(num_new_ptr + row, num_new.to(tl.int32))
    tl.store(first_places_ptr + row, first_place.to(tl.int32))
    tl.store(num_told_ptr + row, (num_new - first_place).to(tl.int32))
    tl.store(first_ids_ptr + row, (next_id + first_place).to(tl.int32))

    last_id = next_id + num_chained - 1
    new_stand = tl.where(has_stand, stand, -1)
    tl.store(stands_ptr + slot, tl.where(is_chain, last_id % ring, new_stand))
    tl.store(stand_ids_ptr + slot, tl.where(is_chain, last_id, stand_id))
    tl.store(prefix_lens_ptr + slot, prefix)
    tl.store(next_ids_ptr + slot, next_id + num_new)


@triton.jit
def _lay_out_kernel(
    recent_ptr,
    tokens_ptr,
    positions_ptr,
    logps_ptr,
    ancestors_ptr,
    child_tokens_ptr,
    child_logps_ptr,
    is_expanded_ptr,
    slots_ptr,
    area_start,
    plan_ptr,
    chosen_ptr,
    first_places_ptr,
    token_ids_ptr,
    out_positions_ptr,
    slot_mapping_ptr,
    sample_positions_ptr,
    is_ancestor_ptr,
    rows_ptr,
    out_logps_ptr,
    parents_ptr,
    ranks_ptr,
    RING: tl.constexpr,
    CHILDREN: tl.constexpr,
    PLACES: tl.constexpr,
    DEPTH: tl.constexpr,
    RECENT: tl.constexpr,
    RING_LANES: tl.constexpr,
    CHILD_LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1).to(tl.int64)
    token = row * PLACES + place
    slot = tl.load(slots_ptr + row)
    plan = plan_ptr + row * 8
    num_chained = tl.load(plan)
    num_new = tl.load(plan + 1)
    stand = tl.load(plan + 2)
    base = tl.load(plan + 3)
    next_id = tl.load(plan + 4)
    ring = tl.load(plan + 5)
    is_new = place < num_new
    in_chain = place < num_chained
    first = slot * RING
    index = tl.load(chosen_ptr + token)
    is_chosen = is_new & (in_chain == 0)
    index = tl.where(is_chosen, index, 0)
    parent = index // CHILDREN
    own_row = (next_id + place) % ring

    chain_position = base + 1 + place
    chain_token = tl.load(recent_ptr + slot * RECENT + chain_position % RECENT)
    parent_position = tl.load(positions_ptr + first + parent).to(tl.int64)
    child_token = tl.load(child_tokens_ptr + first * CHILDREN + index)
    child_logp = tl.load(child_logps_ptr + first * CHILDREN + index)
    position = tl.where(in_chain, chain_position, parent_position + 1)
    token_id = tl.where(in_chain, chain_token, child_token)
    logp = tl.where(in_chain, 0.0, child_logp)

    depths = tl.arange(0, DEPTH).to(tl.int64)
    ancestor_positions = position - (position - depths + DEPTH) % DEPTH
    source = tl.where(in_chain, stand, parent)
    ancestors = tl.load(ancestors_ptr + (first + source) * DEPTH + depths, mask=is_new & (source >= 0), other=-1)
    chain_place = ancestor_positions - base - 1
    chain_rows = ((next_id + chain_place) % ring).to(tl.int32)
    ancestors = tl.where(in_chain & (chain_place >= 0), chain_rows, ancestors)
    ancestors = tl.where(depths == position % DEPTH, own_row.to(tl.int32), ancestors)

    # Those whose keys are in the node area: from where the tree stood before the pass.
    first_position = tl.where(stand >= 0, base, base + 1)
    lanes = tl.arange(0, RING_LANES)
    is_seen = is_new & (ancestor_positions >= first_position) & (ancestor_positions <= position) & (ancestors >= 0)
    seen = tl.where(is_seen, ancestors, -1)
    is_ancestor = tl.max((seen[None, :] == lanes[:, None]).to(tl.int32), axis=1)
    tl.store(is_ancestor_ptr + token * RING + lanes, is_ancestor.to(tl.uint8), mask=lanes < RING)

    tl.store(token_ids_ptr + token, tl.where(is_new, token_id, 0))
    tl.store(out_positions_ptr + token, tl.where(is_new, position, 0))
    tl.store(sample_positions_ptr + token, tl.where(is_new, position + 1, 0))
    tl.store(slot_mapping_ptr + token, tl.where(is_new, area_start + first + own_row, -1))
    tl.store(out_logps_ptr + token, logp)
    is_told = is_new & (place >= tl.load(first_places_ptr + row))
    tl.store(rows_ptr + token, tl.where(is_told, own_row, -1))
    parent_id = _ids_of(parent, next_id, ring)
    tl.store(parents_ptr + token, tl.where(in_chain, tl.load(plan + 6), parent_id).to(tl.int32))
    tl.store(ranks_ptr + token, tl.where(in_chain, tl.load(plan + 7), index % CHILDREN).to(tl.int32))

    there = first + own_row
    tl.store(tokens_ptr + there, token_id, mask=is_new)
    tl.store(positions_ptr + there, position.to(tl.int32), mask=is_new)
    tl.store(logps_ptr + there, logp, mask=is_new)
    tl.store(ancestors_ptr + there * DEPTH + depths, ancestors, mask=is_new)
    children = tl.arange(0, CHILD_LANES)
    is_child = is_new & (children < CHILDREN)
    tl.store(child_tokens_ptr + there * CHILDREN + children, -1, mask=is_child)
    tl.store(child_logps_ptr + there * CHILDREN + children, -float("inf"), mask=is_child)
    tl.store(is_expanded_ptr + there * CHILDREN + children, 0, mask=is_child)
    tl.store(is_expanded_ptr + first * CHILDREN + index, 1, mask=is_chosen)


def launch_grow_trees(
    state: TreeState,
    slots: torch.Tensor,  # [B] int64
    tree_pass: TreePass,
    child_tokens: torch.Tensor,  # [T, F] int32
    child_logps: torch.Tensor,  # [T, F] float32
) -> None:
    """`grow_trees` on the GPU."""
    batch, width = tree_pass.rows.shape
    _grow_kernel[(batch * width,)](
        state.child_tokens,
        state.child_logps,
        slots,
        tree_pass.rows,
        tree_pass.logps,
        child_tokens,
        child_logps,
        RING=state.max_expansions,
        CHILDREN=state.max_children,
        PLACES=width,
        CHILD_LANES=triton.next_power_of_2(state.max_children),
        num_warps=1,
    )


@triton.jit
def _grow_kernel(
    state_tokens_ptr,
    state_logps_ptr,
    slots_ptr,
    rows_ptr,
    logps_ptr,
    tokens_ptr,
    child_logps_ptr,
    RING: tl.constexpr,
    CHILDREN: tl.constexpr,
    PLACES: tl.constexpr,
    CHILD_LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    own_row = tl.load(rows_ptr + token)
    slot = tl.load(slots_ptr + token // PLACES)
    children = tl.arange(0, CHILD_LANES)
    mask = (children < CHILDREN) & (own_row >= 0)
    there = (slot * RING + own_row) * CHILDREN + children
    tl.store(state_tokens_ptr + there, tl.load(tokens_ptr + token * CHILDREN + children, mask=mask), mask=mask)
    logps = tl.load(child_logps_ptr + token * CHILDREN + children, mask=mask) + tl.load(logps_ptr + token)
    tl.store(state_logps_ptr + there, logps, mask=mask)
