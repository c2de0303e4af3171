"""The contract between a service and the model that it owns: plain rows go in, sampled tokens come out.

Services decide who takes part in a step; an executor alone knows graphs, streams and devices. Rows know nothing of
requests, of the wire or of traces: a table may stand in for the model (`benchmarks.host`), and several ranks may run the
same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from engine.block_manager import BlockTable
from engine.draft_tokens import NO_DRAFT_TOKENS, DraftTokens
from engine.slots import Slot
from kernels.penalties import TokenHistory
from outrider.protocol.sampling_parameters import SamplingParameters


class Wanted(Enum):
    """What a row is computed for."""

    NOTHING = 0  # keys and values alone: an inner chunk of a prompt
    TOKENS = 1


@dataclass(slots=True)  # not frozen: one for each sequence of a step
class Row:
    """One sequence's part of a step: tokens to compute, then draft tokens to verify behind them.

    The row follows the slot's last step, collected or not. `is_chained`: its one token is the one that the step before
    samples, which the host does not know yet, at a position that only the device knows; `token_ids` is empty then.
    """

    slot: Slot
    sampling: SamplingParameters
    blocks: BlockTable  # cover all of the row's positions, of a chained one the furthest that it can reach
    start: int  # position of the first token; of a chained row -1
    token_ids: Sequence[int]
    drafts: DraftTokens = field(default=NO_DRAFT_TOKENS)
    wanted: Wanted = Wanted.TOKENS
    num_logprobs: int | None = None  # beside the chosen token's; None for none at all
    # Token counts for penalties, up to date when the row is submitted; None where there are none.
    history: TokenHistory | None = None

    @property
    def is_chained(self) -> bool:
        """Whether the row begins with what the slot's last step samples."""
        return self.start < 0


class PositionLogprobs(NamedTuple):
    """Natural log-probabilities at one position, of the distribution before penalties, temperature and filters."""

    logprob: float  # of the token that was chosen
    top_token_ids: Sequence[int]  # most likely first
    top_logprobs: Sequence[float]


@dataclass(slots=True)  # not frozen: one for each sequence of a step
class Sampled:
    """What a step samples for one row: the accepted draft tokens and one token of the target's own."""

    token_ids: list[int]
    num_accepted: int
    logprobs: Sequence[PositionLogprobs] = ()  # one a token, or none at all


class PassKind(Enum):
    """How a pass ran; the values are metrics' labels."""

    GRAPH = "graph"
    PROMPT = "prompt"  # chunks of prompts alone, which no graph holds
    EAGER = "eager"  # something that decodes, without a graph


class Pass(Protocol):
    """A part of a step that comes back by itself."""

    @property
    def kind(self) -> PassKind:
        """How it ran."""

    @property
    def rows(self) -> Sequence[int]:
        """Indexes of its rows among those that were submitted."""

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not wait."""

    def collect(self) -> Sequence[Sampled | None]:
        """What was sampled for each of its rows, None where nothing was wanted. Waits; raises what the device raised.

        Once for each pass, in the order in which passes were submitted.
        """


class Executor(Protocol):
    """Runs steps of one model, in the order of their submission. Belongs to the thread that owns the model."""

    # Steps that may be submitted and not yet collected.
    max_in_flight: int

    def can_overlap(self, row: Row) -> bool:
        """Whether the row may be submitted while a step with its slot is not collected: to be asked before planning."""

    def submit(self, rows: Sequence[Row]) -> Sequence[Pass]:
        """Begin a step, behind those before it, without waiting for any; its passes in the order in which they end.

        Where the device does not work by itself, the step is over when this returns. Raises what the device raises.
        """
