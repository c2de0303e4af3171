"""Settings of the drafter service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from kernels.limits import MAX_DRAFT_TOKENS, NUM_CANDIDATES
from outrider.protocol.wire import MAX_CANDIDATES
from outrider.service.settings import ModelSettings


class DrafterSettings(ModelSettings):
    """Run a drafter: a service that rides ahead of the target model and streams draft trees to verifiers."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFTER_")

    listen: str = Field(default="127.0.0.1:50053", description="host:port to serve gRPC on; port 0 takes a free one")
    kind: Literal["model", "ngram", "scripted"] = Field(
        default="model", description="what drafts: a draft model, prompt lookup, or a script"
    )
    model: Path | None = Field(default=None, description="directory of the draft model, for kind=model")
    target_revision: str = Field(
        default="", description="the only target revision to draft for; empty drafts for any that fits"
    )
    script: str = Field(default="", description="for kind=scripted: module:function or a JSON file of token sequences")
    min_ngram: int = Field(default=2, ge=1, description="for kind=ngram: shortest run of tokens to look up")
    max_ngram: int = Field(default=4, ge=1, description="for kind=ngram: longest run of tokens to look up")
    max_sequences: int = Field(default=256, ge=1, description="most sequences open at once, of all verifiers")
    num_candidates: int = Field(
        default=NUM_CANDIDATES,
        ge=1,
        le=MAX_CANDIDATES,
        description="candidates kept of the draft model's distribution, m; fewer for a verifier that takes fewer",
    )

    graph_draft_tokens: int = Field(
        default=4,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description="draft tokens that CUDA graphs make in one go, and most of a chain then, K; the lower of this "
        "and the verifier's holds",
    )
    graph_max_sequences: int = Field(
        default=64, ge=1, description="most sequences that CUDA graphs draft for at once; more take several rounds"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "model" and self.model is None:
            raise ValueError("model is required, the directory of the draft model, unless kind is ngram or scripted")
        if self.kind == "scripted" and not self.script:
            raise ValueError("script is required where kind is scripted")
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram ({self.min_ngram}) must not be above max_ngram ({self.max_ngram})")
        return self
