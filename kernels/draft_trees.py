"""Draft trees of many sequences as arrays on the device: what a pass expands, and what becomes of it.

The host brings committed tokens and the number of them (`TreeState.recent_tokens`, `lengths`); all else follows here:
where a tree stands after them, which keys move from its node area to the paged cache, which tokens a pass computes. So
one pass can follow another without a word from the host.

A sequence's *ring* holds its last expansions, each in the row `id % ring_size`. A tree *stands* on the expansion of a
committed token: the last one, or the last of those that are computed. Committed tokens behind it that the tree has not
expanded become a *chain* of expansions of the pass, the last of which is where it stands from then on. Only that one is
told to the verifier: as a root, or as the child of its parent where just one token was missing.

Keys and values of expansions lie in the sequence's node area, cache slot `area_start + slot * max_expansions + row`;
those of the positions before `prefix_lens` lie in its paged blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.dispatch import runs_triton

# No expansion stands for a position further than this beyond the committed ones.
MAX_DEPTH = 32
# Committed tokens at hand for each sequence: the host brings no more than so many beyond where the tree stands.
NUM_RECENT = 64
# Places of the ring that are kept for chains: without them, a miss could find the ring full.
CHAIN_RESERVE = 32
_NONE = torch.iinfo(torch.int64).min
_LOW_WORD = 0xFFFFFFFF
_LAST_INDEX = 0x7FFFFFFF


@dataclass(frozen=True)
class TreeState:
    """By slot, the last of which is nobody's: padding has it, and what is written nowhere else goes there."""

    # Of a sequence. The host writes the first eight between passes, the last four for a new tree alone.
    lengths: torch.Tensor  # [slots] int64: committed tokens
    recent_tokens: torch.Tensor  # [slots, NUM_RECENT] int32: the committed token of position p at p % NUM_RECENT
    ring_sizes: torch.Tensor  # [slots] int64, at most max_expansions
    num_children: torch.Tensor  # [slots] int64: ranks from here on are never expanded
    max_depths: torch.Tensor  # [slots] int64: positions behind where the tree stands that may be expanded
    prefix_lens: torch.Tensor  # [slots] int64: positions whose keys are in the paged blocks
    stands: torch.Tensor  # [slots] int64: row of the expansion on which the tree stands, -1 for a new tree
    stand_ids: torch.Tensor  # [slots] int64
    next_ids: torch.Tensor  # [slots] int64: of the next expansion
    # Of an expansion.
    tokens: torch.Tensor  # [slots, max_expansions] int32
    positions: torch.Tensor  # [slots, max_expansions] int32
    logps: torch.Tensor  # [slots, max_expansions] float32: of its path, estimated
    ancestors: (
        torch.Tensor
    )  # [slots, max_expansions, MAX_DEPTH] int32: row of its ancestor at position p, p % MAX_DEPTH
    # Of a child.
    child_tokens: torch.Tensor  # [slots, max_expansions, num_children] int32
    child_logps: torch.Tensor  # [slots, max_expansions, num_children] float32: of its path, estimated; -inf: no child
    is_expanded: torch.Tensor  # [slots, max_expansions, num_children] bool

    @classmethod
    def empty(cls, num_slots: int, max_expansions: int, num_children: int, device: torch.device) -> TreeState:
        """Room for so many sequences, none of which is there."""

        def room(dtype: torch.dtype, *shape: int, fill: float = 0) -> torch.Tensor:
            return torch.full((num_slots + 1, *shape), fill, dtype=dtype, device=device)

        i32, i64, f32, children = torch.int32, torch.int64, torch.float32, (max_expansions, num_children)
        return cls(
            lengths=room(i64),
            recent_tokens=room(i32, NUM_RECENT),
            ring_sizes=room(i64, fill=max_expansions),
            num_children=room(i64),
            max_depths=room(i64),
            prefix_lens=room(i64),
            stands=room(i64, fill=-1),
            stand_ids=room(i64),
            next_ids=room(i64),
            tokens=room(i32, max_expansions),
            positions=room(i32, max_expansions),
            logps=room(f32, max_expansions),
            ancestors=room(i32, max_expansions, MAX_DEPTH, fill=-1),
            child_tokens=room(i32, *children, fill=-1),
            child_logps=room(f32, *children, fill=-torch.inf),
            is_expanded=room(torch.bool, *children),
        )

    @property
    def padding(self) -> int:
        """The slot that nobody has."""
        return len(self.lengths) - 1

    @property
    def max_expansions(self) -> int:
        """Rows of each ring (E)."""
        return self.tokens.shape[1]

    @property
    def max_children(self) -> int:
        """Children that each expansion has room for (F)."""
        return self.child_tokens.shape[2]


@dataclass(frozen=True)
class TreePass:
    """What a pass computes: `width` (W) places for each of `batch` (B) sequences, T = B * W tokens."""

    # For the model. Places without an expansion have token 0, position 0 and no place in the cache.
    token_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64: in the node area; -1 where there is no expansion
    sample_positions: torch.Tensor  # [T] int64: of the children
    is_ancestor: torch.Tensor  # [B, W, E] bool: itself and those before it whose keys are in the node area
    prefix_lens: torch.Tensor  # [B] int32: positions whose keys are in the paged blocks
    copy_sources: torch.Tensor  # [B * MAX_DEPTH] int64: cache slots of keys that become part of the prefix, or -1
    copy_targets: torch.Tensor  # [B * MAX_DEPTH] int64: where they go
    # For the children.
    rows: torch.Tensor  # [B, W] int64: of the expansions that are told to the verifier, -1 for all else
    logps: torch.Tensor  # [B, W] float32: of their paths
    # Between the kernels that lay it out.
    plan: torch.Tensor  # [B, 8] int64
    chosen: torch.Tensor  # [B, W] int64
    # For the host.
    lengths: torch.Tensor  # [B] int32: committed tokens that the pass knew of
    stand_positions: (
        torch.Tensor
    )  # [B] int32: where the tree stands after the pass; below length - 1: tokens are missing
    num_new: torch.Tensor  # [B] int32: expansions that the pass made
    first_places: torch.Tensor  # [B] int32: the first of them that is told to the verifier, all behind it are too
    num_told: torch.Tensor  # [B] int32
    first_ids: torch.Tensor  # [B] int32: of the first that is told
    parents: torch.Tensor  # [B, W] int32: ids, -1 for a root
    ranks: torch.Tensor  # [B, W] int32: among the parent's children

    @classmethod
    def empty(
        cls, batch: int, width: int, max_expansions: int, device: torch.device, **given: torch.Tensor
    ) -> TreePass:
        """Room for so much, beside what is `given` by name. Raises ValueError for more places than a miss may take."""
        if not 1 <= width <= CHAIN_RESERVE:
            raise ValueError(f"width is {width}, expected 1 to {CHAIN_RESERVE}")

        def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        i32, i64, num_tokens = torch.int32, torch.int64, batch * width
        shapes: dict[str, tuple[torch.dtype, *tuple[int, ...]]] = {
            "token_ids": (i32, num_tokens),
            "positions": (i64, num_tokens),
            "slot_mapping": (i64, num_tokens),
            "sample_positions": (i64, num_tokens),
            "is_ancestor": (torch.bool, batch, width, max_expansions),
            "prefix_lens": (i32, batch),
            "copy_sources": (i64, batch * MAX_DEPTH),
            "copy_targets": (i64, batch * MAX_DEPTH),
            "rows": (i64, batch, width),
            "logps": (torch.float32, batch, width),
            "plan": (i64, batch, 8),
            "chosen": (i64, batch, width),
            "lengths": (i32, batch),
            "stand_positions": (i32, batch),
            "num_new": (i32, batch),
            "first_places": (i32, batch),
            "num_told": (i32, batch),
            "first_ids": (i32, batch),
            "parents": (i32, batch, width),
            "ranks": (i32, batch, width),
        }
        return cls(**{name: given[name] if name in given else room(*shape) for name, shape in shapes.items()})


@dataclass(frozen=True)
class TreeLimits:
    """What holds for all trees of a model."""

    min_probability: float  # children whose path, from where the tree stands, is less probable are not expanded
    max_length: int  # positions from here on have no token
    area_start: int  # cache slot of the first node area
    block_size: int

    @property
    def min_logp(self) -> float:
        """The logarithm of the least probability."""
        return math.log(self.min_probability) if self.min_probability > 0 else -math.inf


def advance_trees(
    state: TreeState,
    slots: torch.Tensor,  # [B] int64: each sequence's, the padding slot for none
    block_tables: torch.Tensor,  # [B, max_blocks] int32: cover all committed tokens
    limits: TreeLimits,
    out: TreePass,
) -> None:
    """Walk down by what is committed and choose what the pass expands; lay it out, and write it into the trees.

    A tree that misses committed tokens expands them, as many as there are places. Any other expands the children of
    the most probable paths, of equal ones the one that stands first in the ring.
    """
    if runs_triton(slots):
        from kernels.draft_trees_triton import launch_advance_trees

        launch_advance_trees(state, slots, block_tables, limits, out)
        return
    reference_advance_trees(state, slots, block_tables, limits, out)


def reference_advance_trees(
    state: TreeState,
    slots: torch.Tensor,  # [B] int64
    block_tables: torch.Tensor,  # [B, max_blocks] int32
    limits: TreeLimits,
    out: TreePass,
) -> None:
    """`advance_trees` in plain torch: no shape depends on data, and nothing waits for the device."""
    num_places, num_children = out.rows.shape[1], state.max_children
    ring = _Ring.of(state, slots)
    column = slots.unsqueeze(1)
    old_prefix = ring.prefix_lens

    # Walk: the deepest expansion below which all ancestors' tokens are those committed.
    old_base = torch.where(ring.has_stand, _at(ring.positions, ring.stands), old_prefix - 1)
    below, depths = ring.below(ring.stands, ring.stand_ids, old_base)
    is_committed = (ring.tokens == ring.recent_tokens.gather(1, ring.positions % NUM_RECENT)) & (
        ring.positions < ring.lengths.unsqueeze(1)
    )
    is_matched = is_committed | (depths <= 0)
    places = torch.arange(MAX_DEPTH, device=slots.device)
    ancestor_positions = ring.positions.unsqueeze(2) - (ring.positions.unsqueeze(2) - places) % MAX_DEPTH
    matched_ancestors = is_matched.gather(1, ring.ancestors.clamp(min=0).flatten(1)).view(ring.ancestors.shape)
    on_path = below & (matched_ancestors | (ancestor_positions <= old_base.view(-1, 1, 1))).all(dim=2)
    stands = torch.where(on_path, depths, -1).argmax(dim=1)
    stand_ids = _at(ring.ids, stands)
    base = torch.where(ring.has_stand, _at(ring.positions, stands), old_base)
    prefix_lens = torch.where(ring.has_stand, base, old_prefix)
    stand_ancestors = torch.where(ring.has_stand.unsqueeze(1), _rows_at(ring.ancestors, stands.unsqueeze(1))[:, 0], -1)

    # What the tree has walked over becomes part of the prefix.
    node_starts = limits.area_start + column * state.max_expansions
    moved = old_prefix.unsqueeze(1) + places  # [B, MAX_DEPTH] positions
    is_moved = moved < prefix_lens.unsqueeze(1)
    moved_rows = stand_ancestors.gather(1, moved % MAX_DEPTH)
    blocks = block_tables.gather(1, torch.where(is_moved, moved // limits.block_size, 0)).long()
    out.copy_sources.copy_(torch.where(is_moved, node_starts + moved_rows, -1).flatten())
    out.copy_targets.copy_(torch.where(is_moved, blocks * limits.block_size + moved % limits.block_size, -1).flatten())

    # Committed tokens that no expansion stands for.
    place = torch.arange(num_places, device=slots.device)
    num_missing = ring.lengths - 1 - base
    # The keys of a chain, and of what it begins behind, are no further apart than ancestors are known.
    num_chained = num_missing.clamp(max=min(num_places, MAX_DEPTH - 1))
    in_chain = place < num_chained.unsqueeze(1)
    chain_positions = base.unsqueeze(1) + 1 + place
    chain_tokens = ring.recent_tokens.gather(1, chain_positions % NUM_RECENT)

    # The children of the most probable paths.
    below, _ = ring.below(stands, stand_ids, base)
    last_position = torch.minimum(prefix_lens + MAX_DEPTH - 1, base + state.max_depths[slots])
    last_position = last_position.clamp(max=limits.max_length - 2)
    may_expand = below & (ring.positions < last_position.unsqueeze(1)) & (num_missing == 0).unsqueeze(1)
    logps = state.child_logps[slots]
    ranks = torch.arange(num_children, device=slots.device)
    is_open = (
        may_expand.unsqueeze(2)
        & (ranks < state.num_children[slots].view(-1, 1, 1))
        & ~state.is_expanded[slots]
        & (logps - _at(state.logps[slots], stands).view(-1, 1, 1) >= limits.min_logp)
        & (logps > -torch.inf)
    )
    keys = torch.where(is_open, _ordered_keys(logps), _NONE).flatten(1)
    best = keys.topk(num_places, dim=1).values
    room = stand_ids + ring.sizes - CHAIN_RESERVE - ring.next_ids
    is_chosen = (best != _NONE) & (place < room.unsqueeze(1))
    index = torch.where(is_chosen, _LAST_INDEX - (best & _LOW_WORD), 0)
    parents = index // num_children

    # What the pass computes, of either kind.
    is_new = in_chain | is_chosen
    rows = (ring.next_ids.unsqueeze(1) + place) % ring.sizes.unsqueeze(1)
    positions = torch.where(in_chain, chain_positions, ring.positions.gather(1, parents) + 1)
    tokens = torch.where(in_chain, chain_tokens, state.child_tokens[slots].flatten(1).gather(1, index))
    new_logps = torch.where(in_chain, 0.0, logps.flatten(1).gather(1, index))
    ancestor_positions = positions.unsqueeze(2) - (positions.unsqueeze(2) - places) % MAX_DEPTH
    chain_place = ancestor_positions - base.view(-1, 1, 1) - 1
    ancestors = torch.where(in_chain.unsqueeze(2), stand_ancestors.unsqueeze(1), _rows_at(ring.ancestors, parents))
    chain_rows = rows.gather(1, chain_place.clamp(0, num_places - 1).flatten(1)).view(ancestors.shape)
    ancestors = torch.where(in_chain.unsqueeze(2) & (chain_place >= 0), chain_rows, ancestors)
    ancestors = torch.where(ancestor_positions == positions.unsqueeze(2), rows.unsqueeze(2), ancestors)

    # Into the trees; what is no expansion, to where nobody reads.
    nowhere = state.padding * state.max_expansions
    where = torch.where(is_new, column * state.max_expansions + rows, nowhere)
    for name, values in (
        ("tokens", tokens),
        ("positions", positions),
        ("logps", new_logps),
        ("ancestors", ancestors),
    ):
        flat = getattr(state, name).flatten(0, 1)
        flat[where] = values.to(flat.dtype)
    state.child_tokens.flatten(0, 1)[where] = -1
    state.child_logps.flatten(0, 1)[where] = -torch.inf
    state.is_expanded.flatten(0, 1)[where] = False
    expanded = torch.where(is_chosen, column * state.max_expansions * num_children + index, nowhere * num_children)
    state.is_expanded.view(-1)[expanded] = True
    num_new = is_new.sum(dim=1)
    is_chain = num_chained > 0
    last_row = (ring.next_ids + num_chained - 1) % ring.sizes
    state.stands[slots] = torch.where(is_chain, last_row, torch.where(ring.has_stand, stands, -1))
    state.stand_ids[slots] = torch.where(is_chain, ring.next_ids + num_chained - 1, stand_ids)
    state.prefix_lens[slots] = prefix_lens
    state.next_ids[slots] = ring.next_ids + num_new

    # For the model.
    ring_positions = state.positions[slots].long()
    ring_rows = torch.arange(state.max_expansions, device=slots.device)
    seen = ancestors.gather(2, (ring_positions % MAX_DEPTH).unsqueeze(1).expand(-1, num_places, -1)) == ring_rows
    ring_positions = ring_positions.unsqueeze(1)
    seen &= (ring_positions >= prefix_lens.view(-1, 1, 1)) & (ring_positions <= positions.unsqueeze(2))
    out.is_ancestor.copy_(seen & is_new.unsqueeze(2))
    out.token_ids.copy_(torch.where(is_new, tokens, 0).flatten())
    out.positions.copy_(torch.where(is_new, positions, 0).flatten())
    out.slot_mapping.copy_(torch.where(is_new, node_starts + rows, -1).flatten())
    out.sample_positions.copy_(torch.where(is_new, positions + 1, 0).flatten())
    out.prefix_lens.copy_(prefix_lens)
    out.logps.copy_(new_logps)

    # For the verifier: of a chain its end alone, as a child where it is one and nothing else was missing.
    is_child = (state.child_tokens[slots, stands] == tokens[:, :1]) & (ranks < state.num_children[slots].unsqueeze(1))
    is_child &= ((num_missing == 1) & ring.has_stand).unsqueeze(1)
    chain_parents = torch.where(is_child.any(dim=1), stand_ids, -1)
    is_told = ~is_chain | (num_chained == num_missing)
    first_places = torch.where(is_chain, num_chained - is_told.long(), 0)
    out.rows.copy_(torch.where(is_new & (place >= first_places.unsqueeze(1)), rows, -1))
    out.lengths.copy_(ring.lengths)
    out.stand_positions.copy_(base + num_chained)
    out.num_new.copy_(num_new)
    out.first_places.copy_(first_places)
    out.num_told.copy_(num_new - first_places)
    out.first_ids.copy_(ring.next_ids + first_places)
    out.parents.copy_(torch.where(in_chain, chain_parents.unsqueeze(1), ring.ids.gather(1, parents)))
    out.ranks.copy_(torch.where(in_chain, is_child.int().argmax(dim=1, keepdim=True), index % num_children))


def grow_trees(
    state: TreeState,
    slots: torch.Tensor,  # [B] int64
    tree_pass: TreePass,
    child_tokens: torch.Tensor,  # [B * W, F] int32
    child_logps: torch.Tensor,  # [B * W, F] float32: of each child given its parent, estimated; -inf: no child
) -> None:
    """Give the expansions of a pass their children; those that nobody is told of have none."""
    if runs_triton(slots):
        from kernels.draft_trees_triton import launch_grow_trees

        launch_grow_trees(state, slots, tree_pass, child_tokens, child_logps)
        return
    num_places, width = tree_pass.rows.shape[1], state.max_children
    nowhere = state.padding * state.max_expansions
    where = slots.unsqueeze(1) * state.max_expansions + tree_pass.rows
    where = torch.where(tree_pass.rows < 0, nowhere, where)
    shape = (-1, num_places, width)
    state.child_tokens.flatten(0, 1)[where] = child_tokens.view(shape)
    state.child_logps.flatten(0, 1)[where] = child_logps.view(shape) + tree_pass.logps.unsqueeze(2)


@dataclass(frozen=True)
class _Ring:
    """The trees of a batch."""

    lengths: torch.Tensor  # [B] int64
    recent_tokens: torch.Tensor  # [B, NUM_RECENT] int32
    sizes: torch.Tensor  # [B] int64
    prefix_lens: torch.Tensor  # [B] int64
    has_stand: torch.Tensor  # [B] bool
    stands: torch.Tensor  # [B] int64, 0 where there is none
    stand_ids: torch.Tensor  # [B] int64
    next_ids: torch.Tensor  # [B] int64
    ids: torch.Tensor  # [B, E] int64, of the last expansion in each row, made or not
    tokens: torch.Tensor  # [B, E] int32
    positions: torch.Tensor  # [B, E] int64
    ancestors: torch.Tensor  # [B, E, MAX_DEPTH] int64

    @classmethod
    def of(cls, state: TreeState, slots: torch.Tensor) -> _Ring:
        """What stands there before the pass."""
        sizes, next_ids, stands = state.ring_sizes[slots], state.next_ids[slots], state.stands[slots]
        rows = torch.arange(state.max_expansions, device=slots.device)
        newest = next_ids.unsqueeze(1) - 1
        ids = newest - (newest - rows) % sizes.unsqueeze(1)
        return cls(
            lengths=state.lengths[slots],
            recent_tokens=state.recent_tokens[slots],
            sizes=sizes,
            prefix_lens=state.prefix_lens[slots],
            has_stand=stands >= 0,
            stands=stands.clamp(min=0),
            stand_ids=state.stand_ids[slots],
            next_ids=next_ids,
            ids=torch.where(rows < sizes.unsqueeze(1), ids, -1),
            tokens=state.tokens[slots],
            positions=state.positions[slots].long(),
            ancestors=state.ancestors[slots].long(),
        )

    def below(
        self,
        stands: torch.Tensor,  # [B] int64
        stand_ids: torch.Tensor,  # [B] int64
        base: torch.Tensor,  # [B] int64, their positions
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [B, E] bool, [B, E] int64
        """Which expansions have this one among their ancestors, itself included, and how far below they are."""
        depths = self.positions - base.unsqueeze(1)
        entry = (base % MAX_DEPTH).view(-1, 1, 1).expand(-1, self.ids.shape[1], 1)
        has_ancestor = self.ancestors.gather(2, entry).squeeze(2) == stands.unsqueeze(1)
        # An older expansion's ancestor in the same row was another one.
        is_younger = self.ids >= stand_ids.unsqueeze(1)
        is_near = (depths >= 0) & (depths < MAX_DEPTH)
        return has_ancestor & is_younger & is_near & self.has_stand.unsqueeze(1), depths


def _at(
    values: torch.Tensor,  # [B, E]
    rows: torch.Tensor,  # [B] int64
) -> torch.Tensor:  # [B]
    return values.gather(1, rows.unsqueeze(1)).squeeze(1)


def _rows_at(
    values: torch.Tensor,  # [B, E, n]
    rows: torch.Tensor,  # [B, W] int64
) -> torch.Tensor:  # [B, W, n]
    return values.gather(1, rows.unsqueeze(2).expand(-1, -1, values.shape[2]))


def _ordered_keys(
    values: torch.Tensor,  # [B, E, F] float32
) -> torch.Tensor:  # [B, E, F] int64
    """Keys in the order of the values, of equal ones the first one's the largest; the low word tells the place."""
    bits = values.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ _LAST_INDEX, bits)
    index = torch.arange(values.shape[1] * values.shape[2], device=values.device).view(values.shape[1:])
    return (ordered << 32) | (_LAST_INDEX - index)
