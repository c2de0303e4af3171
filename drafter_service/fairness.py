"""Whose turn it is, where not all can be served at once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, zip_longest

from drafter_service.sequence import DraftSequence


def take_turns(sequences: Iterable[DraftSequence]) -> list[DraftSequence]:
    """One of each verifier after the other, each verifier's in the order in which they are given.

    Whoever is first served to a limit serves a verifier of few sequences as well as one of many.
    """
    by_session: dict[int, list[DraftSequence]] = {}
    for sequence in sequences:
        by_session.setdefault(sequence.session_id, []).append(sequence)
    if len(by_session) == 1:
        return next(iter(by_session.values()))
    rounds = zip_longest(*by_session.values())
    return [sequence for sequence in chain.from_iterable(rounds) if sequence is not None]
