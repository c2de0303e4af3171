"""The engine's side of the speculation protocol: which drafters are up, what is owed, who is late."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.draft_tokens import DraftTokens
from outrider.protocol.wire import pack_tokens
from outrider.v1 import common_pb2, drafter_pb2
from verifier_service.gathering import Gathering
from verifier_service.sequence import LinkKey, TargetSequence

# A sequence whose drafter keeps it waiting this often in a row is better off alone.
MAX_LATE_IN_A_ROW = 3
# So is one that has heard nothing for this many times the longest wait.
MAX_TIMEOUTS_BEHIND = 10

_FALLBACKS = {
    drafter_pb2.NO_PROPOSAL_REASON_MAX_LENGTH: common_pb2.FALLBACK_REASON_DRAFTER_MAX_LENGTH,
    drafter_pb2.NO_PROPOSAL_REASON_OVERLOADED: common_pb2.FALLBACK_REASON_DRAFTER_OVERLOADED,
}


@dataclass
class _Link:
    max_length: int
    heard_at: float  # monotonic, seconds
    is_retired: bool = False


class DraftingLinks:
    """Links to drafters as the engine knows them, and the waiting of sequences for their proposals."""

    def __init__(self, draft_timeout: float, gathering: Gathering) -> None:
        self._draft_timeout = draft_timeout
        self._gathering = gathering
        self._links: dict[LinkKey, _Link] = {}
        self.num_late = 0  # times that a sequence gave up waiting; only ever grows

    def add(self, key: LinkKey, max_length: int) -> None:
        """A drafter is ready."""
        self._links[key] = _Link(max_length, time.monotonic())

    def remove(self, key: LinkKey) -> None:
        """A drafter is gone."""
        self._links.pop(key, None)

    def retire(self, key: LinkKey, *, is_retired: bool) -> None:
        """Note whether the drafter is wanted for nothing but the sequences that it has."""
        if link := self._links.get(key):
            link.is_retired = is_retired

    def take_idle(self, sequences: Iterable[TargetSequence]) -> list[LinkKey]:
        """Retired links that none of the sequences uses; each is returned once."""
        retired = {key for key, link in self._links.items() if link.is_retired}
        if not retired:
            return []
        idle = retired - {sequence.drafter for sequence in sequences if sequence.drafter is not None}
        for key in idle:
            self._links[key].is_retired = False
        return list(idle)

    def is_up(self, key: LinkKey) -> bool:
        """Whether frames to the drafter can be sent."""
        return key in self._links

    def has_heard(self, key: LinkKey) -> bool:
        """Note that a frame has come; False when the connection it came from counts as lost."""
        if link := self._links.get(key):
            link.heard_at = time.monotonic()
        return key in self._links

    def is_outgrown_by(self, sequence: TargetSequence) -> bool:
        """Whether the sequence's next proposal would pass the drafter's context."""
        assert sequence.drafter is not None
        max_length = self._links[sequence.drafter].max_length
        if not max_length:
            return False
        # The first token is the target's own: the first proposal that matters is the one behind it.
        position = len(sequence.token_ids) + (0 if sequence.num_committed_here else 1)
        return position + sequence.max_draft_tokens > max_length

    def opening(self, sequence: TargetSequence) -> drafter_pb2.OpenSequence:
        """The message that opens a sequence at its drafter."""
        return drafter_pb2.OpenSequence(
            sequence_id=sequence.link_sequence_id,
            token_ids=pack_tokens(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling.to_message(),
            verification=sequence.verification,
            max_draft_tokens=sequence.max_draft_tokens,
            traceparent=sequence.traceparent,
        )

    def tell(
        self, frame: drafter_pb2.DraftRequest, sequence: TargetSequence, token_ids: Sequence[int], now: float
    ) -> None:
        """Put into a frame for the drafter what was committed `now`, monotonic; the wait for an answer starts if one is
        needed."""
        if sequence.is_waiting_for_proposal:
            sequence.waiting_since = now
        # By attributes: as arguments of `add` they would take a third longer.
        verdict = frame.verdicts.add()
        verdict.sequence_id = sequence.link_sequence_id
        verdict.epoch = sequence.proposals.epoch
        verdict.num_committed = len(sequence.token_ids)
        verdict.token_ids = pack_tokens(token_ids)

    def take(self, sequence: TargetSequence, proposal: drafter_pb2.Proposal, drafts: DraftTokens, now: float) -> int:
        """Buffer a proposal that has come `now`, monotonic; how many of its tokens are too late to be verified.

        Raises ProposalError when it breaks the protocol.
        """
        num_stale = sequence.proposals.offer(proposal.epoch, proposal.position, drafts, sequence.token_ids)
        sequence.has_had_proposal = True
        if sequence.behind_since is not None:
            self._end_lag(sequence, now)
        if sequence.proposals.waiting.token_ids:
            sequence.num_late_in_a_row = 0
            if sequence.trace is not None:
                sequence.proposal_bytes += drafts.num_bytes
            self._gathering.answered(sequence, now)
            self._end_wait(sequence, now)
        return num_stale

    def take_refusal(
        self, sequence: TargetSequence, refusal: drafter_pb2.NoProposal
    ) -> common_pb2.FallbackReason | None:
        """Note that there is no proposal; the reason to fall back, or None where only this position goes without."""
        if refusal.reason != drafter_pb2.NO_PROPOSAL_REASON_NO_MATCH:
            return _FALLBACKS.get(refusal.reason, common_pb2.FALLBACK_REASON_DRAFTER_LOST)
        now = time.monotonic()
        self._end_lag(sequence, now)
        if refusal.position == sequence.length:
            sequence.num_late_in_a_row = 0
            sequence.plain_position = sequence.length
            self._end_wait(sequence, now)
        return None

    def silent(self, running: Iterable[TargetSequence]) -> set[LinkKey]:
        """Drafters that owe a proposal and have sent nothing at all for as long as one may take."""
        now = time.monotonic()
        return {
            sequence.drafter
            for sequence in running
            if sequence.drafter is not None
            and (sequence.behind_since is not None or self._is_late(sequence, now))
            and now - self._links[sequence.drafter].heard_at >= self._draft_timeout
        }

    def go_on_plainly(self, running: Iterable[TargetSequence]) -> list[TargetSequence]:
        """Let sequences that have waited long enough take steps without drafts until their drafters answer.

        Those that should stop hoping for proposals, because they come too late or not at all, are returned.
        """
        now = time.monotonic()
        hopeless = []
        for sequence in running:
            if self._is_late(sequence, now):
                sequence.behind_since = now
                # A long prompt may keep a drafter busy for a while; that is no reason to do without it afterwards.
                sequence.num_late_in_a_row += int(sequence.has_had_proposal)
                self._end_wait(sequence, now)
                self.num_late += 1
                if sequence.trace is not None:
                    sequence.trace.draft_is_late(sequence.draft_wait, sequence.length)
            if sequence.behind_since is not None and (
                sequence.num_late_in_a_row >= MAX_LATE_IN_A_ROW
                or now - sequence.behind_since >= MAX_TIMEOUTS_BEHIND * self._draft_timeout
            ):
                hopeless.append(sequence)
        return hopeless

    def time_until_late(self, running: Iterable[TargetSequence]) -> float | None:
        """Seconds until the next sequence will have waited too long; None when none is waiting."""
        waits = [
            sequence.waiting_since
            for sequence in running
            if sequence.waiting_since is not None and sequence.is_waiting_for_proposal
        ]
        if not waits:
            return None
        # A clock's tick above zero, so that sleeping cannot come back a moment too early and find nothing to do.
        return max(min(waits) + self._draft_timeout - time.monotonic(), 0.001)

    def _is_late(self, sequence: TargetSequence, now: float) -> bool:
        return (
            sequence.waiting_since is not None
            and now - sequence.waiting_since >= self._draft_timeout
            and sequence.is_waiting_for_proposal
        )

    def _end_lag(self, sequence: TargetSequence, now: float) -> None:
        if sequence.behind_since is not None:
            sequence.behind_since = None
            # What is still owed, if anything, is the answer to the last verdict.
            sequence.waiting_since = now

    def _end_wait(self, sequence: TargetSequence, now: float) -> None:
        if sequence.waiting_since is not None:
            sequence.draft_wait = now - sequence.waiting_since
            sequence.waiting_since = None
