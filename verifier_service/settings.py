"""Settings of the verifier service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from kernels.limits import MAX_DRAFT_TOKENS, NUM_CANDIDATES
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.wire import (
    MAX_CANDIDATES,
    MAX_CHILDREN,
    MAX_EXPANSIONS,
    MIN_EXPANSIONS,
    NUM_EXPANSIONS,
)
from outrider.service.settings import ModelSettings

if TYPE_CHECKING:
    import torch

# Measured on two H200s: at 1 and 8 sequences, steps beside a drafter that runs ahead gained more over plain decoding
# than turns did, at 32 as much, and at 64 they lost, as the host cannot keep up. What lies between is a guess.
MOST_RUNNING_AHEAD = 16

Drafting = Literal["auto", "turns", "ahead"]


class VerifierSettings(ModelSettings):
    """Run a verifier: a service with the target model, which decides on every draft token."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_VERIFIER_")

    listen: str = Field(default="127.0.0.1:50052", description="host:port to serve gRPC on; port 0 takes a free one")
    model: Path = Field(description="directory of the target model")
    max_draft_tokens: int = Field(
        default=4,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description="most draft tokens a step (K), whatever the request asks for; as many where it names none",
    )
    verification: Literal["rejection", "coupled"] = Field(
        default="rejection",
        description="how draft tokens are verified above temperature 0 where a request neither names a rule nor gives "
        "a seed; with a seed: coupled",
    )
    num_candidates: int = Field(
        default=NUM_CANDIDATES,
        ge=1,
        le=MAX_CANDIDATES,
        description="most candidates of a draft token that are taken, for which CUDA graphs have room",
    )
    num_children: int = Field(
        default=4,
        ge=1,
        le=MAX_CHILDREN,
        description="most tokens that a drafter may name for a position: the first is verified, of the others what "
        "follows is drafted as well",
    )
    max_expansions: int = Field(
        default=NUM_EXPANSIONS,
        ge=MIN_EXPANSIONS,
        le=MAX_EXPANSIONS,
        description="most positions of a sequence's draft tree that are kept",
    )
    drafting: Drafting = Field(
        default="auto",
        description="turns: steps wait for drafts, and drafters rest while the target works, as is right where both "
        "share a device; ahead: drafters never rest, and no step waits; auto: ahead on a GPU that runs at most "
        f"{MOST_RUNNING_AHEAD} sequences at once, else turns",
    )
    max_running: int = Field(default=64, ge=1, description="most sequences decoded at once")
    max_waiting: int = Field(default=1024, ge=1, description="most sequences that may wait for a place")
    split_from: int = Field(
        default=16,
        ge=2,
        description="in turns, from so many speculating sequences on, a step verifies half of them while the other is "
        "drafted",
    )
    draft_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        le=60,
        description="in turns, longest wait for drafts before a step without any, seconds; unset: 0.5, or longer, up "
        "to 10, where drafts and the target's own steps take longer",
    )

    def draft_limits(self, device: torch.device) -> DraftLimits:
        """What a verifier whose model is on `device` takes from a drafter."""
        is_ahead = device.type != "cpu" and self.max_running <= MOST_RUNNING_AHEAD
        takes_turns = not is_ahead if self.drafting == "auto" else self.drafting == "turns"
        return DraftLimits(
            max_draft_tokens=self.max_draft_tokens,
            max_candidates=self.num_candidates,
            num_children=self.num_children,
            max_expansions=self.max_expansions,
            takes_turns=takes_turns,
        )

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.max_num_batched_tokens < self.max_running:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_running "
                f"({self.max_running}), or running sequences would starve"
            )
        return self
