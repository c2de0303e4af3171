"""Draft trees on the target's device: taken in from frames, walked by what is committed, read as the chain to verify.

A slot holds the tree of its sequence, so that a step can be laid out without a word from the host: which draft tokens
stand behind the sequence's last token is known only when the step before has been sampled, and so is that token.

An *expansion* is a token behind which the drafter has looked, with its children: the tokens that may follow, the first
of which is the one to verify. It lies at `id % max_expansions`, as ids of a sequence count up and the drafter never
goes further than that beyond the one on which the sequence stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.dispatch import runs_triton

ROOT = -1
"""Parent of an expansion that stands for the last of the tokens that are committed."""

NOTHING = -1
"""In the place of an id: nothing lies there, a child is not expanded, or of a sequence's tree nothing is known."""

NUM_RECENT_TOKENS = 64
"""How far a tree may lag behind its sequence, tokens: what a slot remembers of them."""


@dataclass(frozen=True)
class DraftTrees:
    """By slot, E expansions of F children each; the last slot is nobody's."""

    ids: torch.Tensor  # [num_slots, E] int32, or NOTHING
    child_tokens: torch.Tensor  # [num_slots, E, F] int32, -1 behind the last one
    child_ids: torch.Tensor  # [num_slots, E, F] int32: of each child's expansion, or NOTHING
    candidate_ids: torch.Tensor  # [num_slots, E, m] int32, of q of the first child
    candidate_weights: torch.Tensor  # [num_slots, E, m] int32, in units of 1/65,536; all 0: it was certain
    stands: torch.Tensor  # [num_slots] int32: id of the expansion on which the sequence stands, or NOTHING
    lengths: torch.Tensor  # [num_slots] int64: tokens of the sequence up to there
    recent_tokens: torch.Tensor  # [num_slots, NUM_RECENT_TOKENS] int32: the sequence's, by position

    @classmethod
    def empty(
        cls, num_slots: int, *, max_expansions: int, num_children: int, num_candidates: int, device: torch.device
    ) -> DraftTrees:
        """Slots of which nothing is known."""

        def room(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((num_slots, *shape), value, dtype=dtype, device=device)

        return cls(
            ids=room(max_expansions, value=NOTHING),
            child_tokens=room(max_expansions, num_children, value=-1),
            child_ids=room(max_expansions, num_children, value=NOTHING),
            candidate_ids=room(max_expansions, num_candidates),
            candidate_weights=room(max_expansions, num_candidates),
            stands=room(value=NOTHING),
            lengths=room(dtype=torch.int64),
            recent_tokens=room(NUM_RECENT_TOKENS),
        )

    def forget(self, slots: torch.Tensor) -> None:  # [n] int64
        """The slots get other sequences, or their sequences other drafters."""
        self.ids.index_fill_(0, slots, NOTHING)
        self.stands.index_fill_(0, slots, NOTHING)


@dataclass(frozen=True)
class NewExpansions:
    """N expansions that a frame brought, checked: ids of one slot differ, parents came before, children are tokens.

    Each slot has one root at most, and what stands behind it in the same frame grows from it.
    """

    slots: torch.Tensor  # [N] int32
    ids: torch.Tensor  # [N] int32
    parents: torch.Tensor  # [N] int32, ids, or ROOT
    ranks: torch.Tensor  # [N] int32: which of its parent's children it is
    lengths: torch.Tensor  # [N] int64: of a root, the tokens of the sequence up to it; else nothing
    child_tokens: torch.Tensor  # [N, at most F] int32
    candidate_ids: torch.Tensor  # [N, at most m] int32
    candidate_weights: torch.Tensor  # [N, at most m] int32


def take_expansions(
    trees: DraftTrees,
    sequence_lengths: torch.Tensor,  # [num_slots] int64: tokens of each slot's sequence
    new: NewExpansions,
) -> None:
    """Put new expansions into their slots; one whose parent is no longer there is kept, but nothing leads to it.

    All trees are brought up to their sequences first: the drafter, which does the same, may have gone so far beyond the
    place where a tree stood that its expansions fall on that.
    """
    if runs_triton(trees.ids):
        from kernels.draft_chains_triton import launch_take_expansions

        launch_take_expansions(trees, sequence_lengths, new)
        return
    for slot, length in enumerate(sequence_lengths.tolist()):
        _catch_up(trees, slot, length)
    max_expansions = trees.ids.shape[1]
    num_children, num_candidates = new.child_tokens.shape[1], new.candidate_ids.shape[1]
    slots, places = new.slots.long(), new.ids.long() % max_expansions
    trees.ids[slots, places] = new.ids
    trees.child_tokens[slots, places] = -1
    trees.child_tokens[slots, places, :num_children] = new.child_tokens
    trees.child_ids[slots, places] = NOTHING
    trees.candidate_ids[slots, places, :num_candidates] = new.candidate_ids
    trees.candidate_weights[slots, places] = 0
    trees.candidate_weights[slots, places, :num_candidates] = new.candidate_weights
    is_root = new.parents == ROOT
    trees.stands[slots[is_root]] = new.ids[is_root]
    trees.lengths[slots[is_root]] = new.lengths[is_root]
    parent_places = new.parents.long() % max_expansions
    is_known = ~is_root & (trees.ids[slots, parent_places] == new.parents)
    where = (slots[is_known], parent_places[is_known], new.ranks[is_known].long())
    trees.child_ids[where] = new.ids[is_known]


@dataclass(frozen=True)
class DraftInputs:
    """The draft tokens of a step's rows, behind each other as `rejection_sample` wants them."""

    token_ids: torch.Tensor  # [room] int32
    candidate_ids: torch.Tensor  # [room, m] int32
    candidate_weights: torch.Tensor  # [room, m] int32, in units of 1/65,536; all 0: the token was certain


def pick_chains(
    trees: DraftTrees,
    sequence_lengths: torch.Tensor,  # [num_slots] int64: tokens of each slot's sequence
    slots: torch.Tensor,  # [batch] int32
    most: torch.Tensor,  # [batch] int32: draft tokens that the row may pick; below 0 for one that brings its own
    length_limits: torch.Tensor,  # [batch] int64: no sequence gets longer than this
    query_lens: torch.Tensor,  # [batch] int32: tokens of each row with its draft tokens; written for rows that pick
    given: DraftInputs,  # draft tokens of the rows that bring their own, row behind row
    *,
    max_num_draft_tokens: int,
    out: DraftInputs,
) -> None:
    """Bring each row's tree up to its sequence, and take from it the chain of first children that stands there.

    How many draft tokens a row gets depends on `most`, and on which expansions there are: never on the draft token
    itself, its q, or its probability, as a p/q test that a token's own chance decides about would no longer be exact.
    A step commits one token more than it accepts: a row gets no more draft tokens than leave room for that.

    Rows without any token, `query_lens` 0 and `most` below 0, stand behind all others.
    """
    if runs_triton(trees.ids):
        from kernels.draft_chains_triton import launch_pick_chains

        rows = (slots, most, length_limits, query_lens)
        launch_pick_chains(trees, sequence_lengths, *rows, given, max_num_draft_tokens=max_num_draft_tokens, out=out)
        return
    start = num_given = 0
    for row, (slot, allowed, limit) in enumerate(
        zip(slots.tolist(), most.tolist(), length_limits.tolist(), strict=True)
    ):
        if allowed < 0:
            number = max(int(query_lens[row]) - 1, 0)
            for name in ("token_ids", "candidate_ids", "candidate_weights"):
                getattr(out, name)[start : start + number] = getattr(given, name)[num_given : num_given + number]
            start, num_given = start + number, num_given + number
            continue
        length = int(sequence_lengths[slot])
        place = _catch_up(trees, slot, length)
        wanted = min(allowed, max_num_draft_tokens, max(limit - length - 1, 0))
        end = start
        while end < start + wanted and place is not None:
            out.token_ids[end] = trees.child_tokens[slot, place, 0]
            out.candidate_ids[end] = trees.candidate_ids[slot, place]
            out.candidate_weights[end] = trees.candidate_weights[slot, place]
            place = _place_of(trees, slot, int(trees.child_ids[slot, place, 0]))
            end += 1
        query_lens[row] = 1 + end - start
        start = end


def _catch_up(trees: DraftTrees, slot: int, length: int) -> int | None:
    """Walk down the tree by what was committed; where the expansion of the last committed token lies, if there is one.

    A committed token that is no child is a miss, after which nothing is known until a root comes. A child that is not
    expanded may yet be.
    """
    stand, reached = int(trees.stands[slot]), int(trees.lengths[slot])
    place = _place_of(trees, slot, stand) if length - reached <= NUM_RECENT_TOKENS else None
    stand = NOTHING if place is None else stand
    while place is not None and reached < length:
        token = trees.recent_tokens[slot, reached % NUM_RECENT_TOKENS]
        ranks = (trees.child_tokens[slot, place] == token).nonzero().flatten().tolist()
        below = int(trees.child_ids[slot, place, ranks[0]]) if ranks else NOTHING
        place = _place_of(trees, slot, below)
        if place is not None:
            stand, reached = below, reached + 1
        elif not ranks:
            stand = NOTHING
    trees.stands[slot], trees.lengths[slot] = stand, reached
    return place


def _place_of(trees: DraftTrees, slot: int, number: int) -> int | None:
    """Where the expansion lies, unless it was never there or another one has taken its place."""
    place = number % trees.ids.shape[1]
    return place if number != NOTHING and int(trees.ids[slot, place]) == number else None
