"""The verifier's sequences, by what gateways call them and by what drafters do."""

from __future__ import annotations

from collections.abc import Iterator

from verifier_service.sequence import TargetSequence
from verifier_service.speculation import LinkKey


class SequenceTable:
    """Every sequence from its opening to its end. Belongs to the engine's thread; its length may be asked from any."""

    def __init__(self) -> None:
        self._all: dict[tuple[int, int], TargetSequence] = {}
        self._at_drafters: dict[int, TargetSequence] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[TargetSequence]:
        return iter(self._all.values())

    def find(self, session_id: int, sequence_id: int) -> TargetSequence | None:
        """The sequence that a gateway calls so."""
        return self._all.get((session_id, sequence_id))

    def of_session(self, session_id: int) -> list[TargetSequence]:
        """All sequences of one gateway."""
        return [sequence for sequence in self._all.values() if sequence.session_id == session_id]

    def of_drafter(self, key: LinkKey) -> list[TargetSequence]:
        """All sequences that have this drafter, opened there or not yet."""
        return [sequence for sequence in self._all.values() if sequence.speculation.drafter == key]

    def add(self, sequence: TargetSequence) -> None:
        """A gateway has opened it."""
        self._all[sequence.session_id, sequence.sequence_id] = sequence

    def remove(self, sequence: TargetSequence) -> None:
        """It has ended."""
        del self._all[sequence.session_id, sequence.sequence_id]

    def opened_at_drafter(self, sequence: TargetSequence) -> None:
        """Its drafter knows it from now on."""
        self._at_drafters[sequence.link_sequence_id] = sequence

    def left_drafter(self, sequence: TargetSequence) -> bool:
        """Its drafter is to forget it; False when it did not know it."""
        return self._at_drafters.pop(sequence.link_sequence_id, None) is not None

    def drafted_by(self, key: LinkKey, link_sequence_id: int) -> TargetSequence | None:
        """The sequence, unless it has ended, has left its drafter, or is another drafter's."""
        sequence = self._at_drafters.get(link_sequence_id)
        return sequence if sequence is not None and sequence.speculation.drafter == key else None
