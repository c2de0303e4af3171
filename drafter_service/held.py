"""What a sequence has of the draft model's memory, and what is known of its tree on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from drafter_service.device_trees import DeviceTrees, NewTree
from drafter_service.sequence import DraftSequence
from engine.sampling_tensors import new_history
from engine.slots import Slot
from engine.step import TreeRow
from kernels.draft_trees import MAX_DEPTH, NUM_RECENT
from kernels.penalties import TokenHistory
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.v1 import common_pb2


@dataclass(eq=False, slots=True)
class Held:
    """One open sequence. Its keys and values are in `sequence.block_ids` as far as `sequence.num_computed` says, and
    further by what its tree has walked over since it grows."""

    sequence: DraftSequence
    slot: Slot | None = None  # None: nothing is held
    row: TreeRow | None = None  # None until its tree grows
    history: TokenHistory | None = None
    is_released: bool = False
    num_in_flight: int = 0  # replays that have not been read
    last_launch: int = 0
    admitted_at: int = 0  # launch before which it got its slot
    # Its tree on the device, as far as replays that were read tell.
    next_id: int = 0
    stand_position: int = -1
    num_brought: int = 0  # committed tokens that the device was told of
    is_resting: bool = False  # nothing was worth a row, and nothing has been committed since
    # Taking turns: as many committed tokens as were answered. What is open is drafted for when its first verdict comes.
    num_answered: int = 0

    def __post_init__(self) -> None:
        self.num_answered = self.sequence.length

    @property
    def takes_turns(self) -> bool:
        """Whether it rests until a verdict comes."""
        return self.sequence.limits.takes_turns

    @property
    def wants_pass(self) -> bool:
        """Whether a pass over its tree would make something; once it grows."""
        if self.takes_turns:
            return self.num_answered < self.sequence.length and not self.num_in_flight
        return not self.is_resting

    @property
    def num_left_to_tree(self) -> int:
        """Committed tokens that its tree computes: the last one, to draft behind it. Taking turns, there is nothing to
        draft before a verdict comes."""
        return 0 if self.takes_turns and self.num_answered == self.sequence.length else 1

    def begin(self, trees: DeviceTrees, num_children: int) -> None:
        """Let a tree grow behind what is computed."""
        assert self.slot is not None
        sequence, limits = self.sequence, self.sequence.limits
        self.row = TreeRow(
            self.slot,
            _sampling(sequence),
            sequence.block_ids,
            is_coupled=sequence.verification == common_pb2.VERIFICATION_COUPLED,
            max_candidates=max(limits.max_candidates, 1),
        )
        tree = NewTree(
            prefix_lens=sequence.num_computed,
            next_ids=self.next_id,
            ring_sizes=min(limits.max_expansions, trees.state.max_expansions),
            # Other outcomes than the first come too late where the verifier waits for the answer to its choice.
            num_children=1 if self.takes_turns else min(limits.num_children, num_children),
            max_depths=sequence.max_draft_tokens - 1 if self.takes_turns else MAX_DEPTH,
        )
        trees.begin(self.slot.index, tree)
        self.stand_position = sequence.num_computed - 1
        self.num_brought = sequence.num_computed
        self.is_resting = False

    @property
    def num_to_bring(self) -> int:
        """Committed tokens that the device may know of by the next pass: no more than it has room for."""
        return min(self.sequence.length, self.stand_position + 1 + NUM_RECENT)

    def bring(self, trees: DeviceTrees) -> None:
        """Tell the device what was committed since the last pass; the blocks cover it."""
        assert self.row is not None
        length, token_ids = self.num_to_bring, self.sequence.token_ids
        if length > self.num_brought:
            trees.bring(self.row.slot.index, token_ids[self.num_brought : length], length)
            self.num_brought = length
            if self.row.sampling.has_penalties:
                self.row.history = self._counted()

    def lose(self) -> None:
        """Its slot was taken: all is to be computed anew, and its tree begins again."""
        self.slot, self.row = None, None
        self.sequence.num_computed = 0

    def _counted(self) -> TokenHistory | None:
        sequence = self.sequence
        if self.history is None:
            self.history = new_history(sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens)
        else:
            self.history.append(sequence.token_ids[sequence.num_prompt_tokens + self.history.num_outputs :])
        return self.history


def _sampling(sequence: DraftSequence) -> SamplingParameters:
    """How its tokens are chosen: greedily where nothing else would be accepted."""
    if sequence.verification == common_pb2.VERIFICATION_GREEDY:
        return replace(sequence.sampling, temperature=0.0)
    return sequence.sampling
