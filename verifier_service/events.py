"""What crosses between the verifier's event loop and its engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.service.step_spans import EventRecord, SpanRecord
from outrider.v1 import drafter_pb2, verifier_pb2
from verifier_service.draft_tree import SequenceExpansions
from verifier_service.frames import LinkFrame, RefusedExpansions
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import LinkKey


@dataclass(frozen=True)
class SequenceOpened:
    """A gateway wants a sequence decoded."""

    sequence: TargetSequence


@dataclass(frozen=True)
class OpeningRefused:
    """A gateway wants what cannot be decoded. The engine answers, so that nothing follows a sequence's end."""

    session_id: int
    sequence_id: int
    error: verifier_pb2.SequenceError


@dataclass(frozen=True)
class SequencesClosed:
    """A gateway no longer wants these sequences, finished or not."""

    session_id: int
    sequence_ids: Sequence[int]


@dataclass(frozen=True)
class SessionClosed:
    """A gateway's stream ended."""

    session_id: int


@dataclass(frozen=True)
class LinkUp:
    """A drafter is ready. `max_length` 0: it has no limit."""

    key: LinkKey
    max_length: int


@dataclass(frozen=True)
class LinkDown:
    """A connection to a drafter is gone."""

    key: LinkKey


@dataclass(frozen=True)
class LinkRetired:
    """No gateway names the drafter any more: the connection is to go when its last sequence has ended. Or, not
    `is_retired`, one names it again."""

    key: LinkKey
    is_retired: bool


@dataclass(frozen=True)
class ExpansionsArrived:
    """A drafter's frame, already checked: by whoever has the time, which the engine's thread has not."""

    key: LinkKey
    expansions: Sequence[SequenceExpansions | RefusedExpansions]
    refusals: Sequence[drafter_pb2.Refusal]
    step_seconds: float


Event = (
    SequenceOpened
    | OpeningRefused
    | SequencesClosed
    | SessionClosed
    | LinkUp
    | LinkDown
    | LinkRetired
    | ExpansionsArrived
)


@dataclass(frozen=True)
class SequenceRecords:
    """What has been noted for the trace of a sequence."""

    session_id: int
    sequence_id: int
    records: Sequence[SpanRecord | EventRecord]
    # The gateway closed the sequence: these are the last ones, and no update will follow.
    is_closed: bool = False


@dataclass
class StepOutput:
    """Everything that one step sends: a frame for each gateway and for each drafter that it concerns."""

    session_frames: dict[int, verifier_pb2.DecodeResponse] = field(default_factory=dict)
    link_frames: dict[LinkKey, LinkFrame] = field(default_factory=dict)
    # Connections that have fallen silent, to be closed and dialled anew.
    silent_links: list[LinkKey] = field(default_factory=list)
    # Retired connections that no sequence uses any more.
    idle_links: list[LinkKey] = field(default_factory=list)
    records: list[SequenceRecords] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.session_frames or self.link_frames or self.silent_links or self.idle_links or self.records)

    def session(self, session_id: int) -> verifier_pb2.DecodeResponse:
        """The frame for a gateway, made when first asked for."""
        # Asked for every sequence of a step: no frame is made only to be thrown away.
        if (frame := self.session_frames.get(session_id)) is None:
            frame = self.session_frames[session_id] = verifier_pb2.DecodeResponse()
        return frame

    def link(self, key: LinkKey) -> LinkFrame:
        """The frame for a drafter, made when first asked for."""
        if (frame := self.link_frames.get(key)) is None:
            frame = self.link_frames[key] = LinkFrame()
        return frame


class Outbox:
    """What is gathered for the network until it leaves. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self.output = StepOutput()

    def take(self) -> StepOutput:
        """All of it; what comes next goes into another."""
        output, self.output = self.output, StepOutput()
        return output
