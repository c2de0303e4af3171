"""The engine's side of the speculation protocol: what passes between sequences and their drafters."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from outrider.service.logs import about
from outrider.v1 import common_pb2, drafter_pb2
from verifier_service.draft_tree import ExpansionError
from verifier_service.drafting import DraftingLinks
from verifier_service.events import ExpansionsArrived, Outbox
from verifier_service.frames import RefusedExpansions
from verifier_service.sequence import TargetSequence
from verifier_service.sequence_table import SequenceTable
from verifier_service.speculation import WAITING, LinkKey
from verifier_service.step_metrics import StepMetrics

logger = logging.getLogger(__name__)


class DraftingProtocol:
    """Belongs to the engine's thread. What is wrong with one sequence ends that sequence's speculation alone."""

    def __init__(
        self, links: DraftingLinks, sequences: SequenceTable, outbox: Outbox, metrics: StepMetrics | None
    ) -> None:
        self._links = links
        self._sequences = sequences
        self._outbox = outbox
        self._metrics = metrics

    def open(self, sequence: TargetSequence) -> None:
        """Open a sequence that runs for the first time at its drafter, if it has one."""
        drafter = sequence.speculation.drafter
        if drafter is None:
            return
        if not self._links.is_up(drafter):
            self.fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_LOST)
        elif self._links.is_outgrown_by(sequence):
            self.fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_MAX_LENGTH)
        else:
            self._sequences.opened_at_drafter(sequence)
            self._outbox.output.link(drafter).opens.append(self._links.opening(sequence))

    def tell(self, sequence: TargetSequence, token_ids: list[int], now: float) -> None:
        """Tell the sequence's drafter, if it has one, what was committed `now`, monotonic."""
        speculation = sequence.speculation
        if (drafter := speculation.drafter) is None:
            return
        self._links.commit(sequence, now)
        if not speculation.num_drafts and self._links.is_outgrown_by(sequence):
            self.fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_MAX_LENGTH)
        else:
            frame = self._outbox.output.link(drafter)
            frame.commit(sequence.link_sequence_id, len(sequence.token_ids), token_ids)

    def take(self, event: ExpansionsArrived) -> None:
        """Take in a drafter's frame, unless its connection counts as lost already."""
        key = event.key
        if not self._links.has_heard(key):
            return
        now = time.monotonic()
        awaited_since = now
        for expansions in event.expansions:
            sequence = self._sequences.drafted_by(key, expansions.sequence_id)
            if sequence is None:
                continue
            try:
                if isinstance(expansions, RefusedExpansions):
                    raise expansions.error
                speculation = sequence.speculation
                is_awaited = speculation.state is WAITING
                if is_awaited and speculation.since < awaited_since:
                    awaited_since = speculation.since
                self._links.take(sequence, expansions, now)
                if sequence.trace is not None and is_awaited:
                    sequence.trace.drafted(event.step_seconds)
            except ExpansionError as error:
                with about(sequence.subject):
                    logger.warning("going on without the drafter: %s", error)
                self.fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_LOST)
        if self._metrics is not None:
            self._metrics.drafted(key.address, now - awaited_since)
        for refusal in event.refusals:
            self._take_refusal(key, refusal, event.step_seconds)

    def lose(self, key: LinkKey) -> None:
        """A connection is gone, and with it what the drafter had of its sequences."""
        self._links.remove(key)
        for sequence in self._sequences.of_drafter(key):
            self.fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_LOST)

    def look_at_the_clock(self, running: Iterable[TargetSequence]) -> None:
        """Give up drafters that are silent, and waits that have taken too long."""
        for key in self._links.silent(running):
            self._outbox.output.silent_links.append(key)
            self.lose(key)
        for sequence in self._links.go_on_plainly(running):
            self.fall_back(sequence, common_pb2.FALLBACK_REASON_DRAFTER_OVERLOADED)
        self._outbox.output.idle_links += self._links.take_idle(self._sequences)

    def fall_back(self, sequence: TargetSequence, reason: common_pb2.FallbackReason) -> None:
        """The one way from a drafter to none; the gateway is told, and the drafter, which may still draft for it."""
        self.leave(sequence)
        sequence.fall_back(reason)

    def leave(self, sequence: TargetSequence) -> None:
        """Let the drafter forget a sequence that has ended or goes on without it."""
        is_known = self._sequences.left_drafter(sequence)
        drafter = sequence.speculation.drafter
        if is_known and drafter is not None and self._links.is_up(drafter):
            self._outbox.output.link(drafter).closes.append(sequence.link_sequence_id)

    def _take_refusal(self, key: LinkKey, refusal: drafter_pb2.Refusal, draft_seconds: float) -> None:
        sequence = self._sequences.drafted_by(key, refusal.sequence_id)
        if sequence is None:
            return
        reason = self._links.take_refusal(sequence, refusal)
        if sequence.trace is not None:
            sequence.trace.drafted(draft_seconds)
        if reason is not None:
            with about(sequence.subject):
                logger.info("going on without the drafter: %s", refusal.detail)
            self.fall_back(sequence, reason)
