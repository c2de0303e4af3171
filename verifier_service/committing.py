"""What a step's result does to a sequence."""

from __future__ import annotations

from engine.step import Sampled
from verifier_service.step import Committed, Scheduled


def commit(part: Scheduled, sampled: Sampled) -> Committed:
    """Append to the sequence what it keeps of the tokens that were sampled for it."""
    sequence = part.sequence
    position = len(sequence.token_ids)
    token_ids, finish_reason = sequence.cut(sampled.token_ids)
    # The step computed all of its drafts; keys and values behind the accepted ones are overwritten by the next.
    sequence.num_computed += sampled.num_accepted
    sequence.acceptance.add(part.num_drafts, sampled.num_accepted)
    sequence.token_ids += token_ids
    if sequence.history is not None:
        sequence.history.append(token_ids)
    sequence.num_committed_here += len(token_ids)
    # Taken now: the next drafts may come before this step is reported.
    draft_wait, draft_bytes = sequence.speculation.take_measured()
    return Committed(part, sampled, position, token_ids, finish_reason, draft_wait, draft_bytes)
