"""Settings of the verifier service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from kernels.limits import MAX_DRAFT_TOKENS, NUM_CANDIDATES
from outrider.protocol.wire import MAX_CANDIDATES
from outrider.service.settings import ModelSettings


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
    max_running: int = Field(default=64, ge=1, description="most sequences decoded at once")
    max_waiting: int = Field(default=1024, ge=1, description="most sequences that may wait for a place")
    split_from: int = Field(
        default=16,
        ge=2,
        description="from so many speculating sequences on, a step verifies half of them while the other is drafted",
    )
    draft_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        le=60,
        description="longest wait for a proposal before a step without one, seconds; unset: 0.5, or longer, up to 10, "
        "where proposals and the target's own steps take longer",
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.max_num_batched_tokens < self.max_running:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_running "
                f"({self.max_running}), or running sequences would starve"
            )
        return self
