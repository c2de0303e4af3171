"""The contract between a service and the model that it owns: plain rows go in, sampled tokens come out.

Services decide who takes part in a step; an executor alone knows graphs, streams and devices. Rows know nothing of
requests, of the wire or of traces: a table may stand in for the model, as in `benchmarks.host`, and several ranks may
run the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from engine.block_manager import BlockTable
from engine.draft_tokens import NO_DRAFT_TOKENS, DraftTokens
from outrider.protocol.sampling_parameters import SamplingParameters

if TYPE_CHECKING:
    # Where torch is: what only counts passes need not load it.
    from engine.slots import Slot
    from kernels.penalties import TokenHistory

RowT = TypeVar("RowT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)


class Wanted(Enum):
    """What a row is computed for."""

    NOTHING = 0  # keys and values alone: an inner chunk of a prompt
    TOKENS = 1


# For whoever asks about many rows: a member of an enumeration takes three times as long to look up.
NOTHING, TOKENS = Wanted


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


@dataclass(slots=True)  # not frozen: one for each sequence of a round
class DraftRow:
    """One sequence's part of a drafting round: tokens to compute, then tokens to draft behind them."""

    slot: Slot
    sampling: SamplingParameters
    blocks: BlockTable  # cover the row's tokens and all that are drafted but the last one
    start: int  # position of the first token
    token_ids: Sequence[int]
    num_draft_tokens: int  # 0: keys and values alone, for an inner chunk of a prompt
    max_candidates: int  # at least 1: how many of a token's candidates may have weight, if there are more
    # Token counts for penalties, up to date when the row is submitted; None where there are none.
    history: TokenHistory | None = None


@dataclass(slots=True)  # not frozen: one for each sequence of a round
class Drafted:
    """What a round drafts for one row, and the distributions that the tokens were drawn from."""

    token_ids: list[int]
    candidate_ids: npt.NDArray[np.int32]  # [num_tokens, m]
    candidate_weights: npt.NDArray[np.uint16]  # [num_tokens, m], in units of 1/65,536


class PassKind(Enum):
    """How a pass ran; the values are metrics' labels."""

    GRAPH = "graph"
    PROMPT = "prompt"  # chunks of prompts, which no graph holds, and what decodes along with them
    EAGER = "eager"  # something that decodes and that no graph holds


class Pass(Protocol[ResultT]):
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

    def collect(self) -> Sequence[ResultT | None]:
        """What was found for each of its rows, None where nothing was wanted. Waits; raises what the device raised.

        Once for each pass, in the order in which passes were submitted.
        """


class Executor(Protocol[RowT, ResultT]):
    """Runs steps of one model, in the order of their submission. Belongs to the thread that owns the model.

    A verifier's takes `Row`s and finds `Sampled`, a drafter's takes `DraftRow`s and finds `Drafted`.
    """

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted and not yet collected."""

    def can_overlap(self, row: RowT) -> bool:
        """Whether the row may be submitted while a step with its slot is not collected: to be asked before planning."""

    def submit(self, rows: Sequence[RowT]) -> Sequence[Pass[ResultT]]:
        """Begin a step, behind those before it, without waiting for any; its passes in the order in which they end.

        Where the device does not work by itself, the step is over when this returns. What goes wrong is told by the
        pass that it concerns.
        """


class FailedPass:
    """A pass that did not get as far as the device."""

    is_done = True

    def __init__(self, rows: Sequence[int], kind: PassKind, error: Exception) -> None:
        self.rows = rows
        self.kind = kind
        self._error = error

    def collect(self) -> NoReturn:
        """Raise what went wrong."""
        raise self._error
