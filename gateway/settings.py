"""What the gateway can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from gateway.discovery import check_target
from outrider.service.loopback import is_loopback
from outrider.service.settings import AddressList, ServiceSettings


class GatewaySettings(ServiceSettings):
    """Settings of `python -m gateway`: flags, then OUTRIDER_GATEWAY_* variables, then the file of `--config`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_GATEWAY_")

    listen: str = Field(default="127.0.0.1:50051", description="host:port to serve gRPC on; port 0 takes a free one")
    http_listen: str | None = Field(
        default=None, description="host:port to serve HTTP on, with an OpenAI-compatible API; unset: no HTTP"
    )
    strict_requests: bool = Field(
        default=False,
        description="refuse HTTP requests with fields that nobody knows, in place of ignoring those and saying so",
    )
    http_max_body_bytes: int = Field(default=8 << 20, ge=1 << 10, description="largest body of an HTTP request, bytes")
    api_keys: Path | None = Field(
        default=None,
        description="TOML file with the keys of those who may call, and their limits; read again when it changes; "
        "unset: anyone who reaches the gateway may",
    )
    verifiers: AddressList = Field(
        min_length=1,
        description="verifiers to decode on, comma-separated; all serve the same model; host:port, or dns:///host:port "
        "for every address that DNS has for the host, which are followed as they change",
    )
    drafters: AddressList = Field(
        default=(), description="drafters that the verifiers may dial, comma-separated, written as verifiers are"
    )
    dns_refresh_seconds: float = Field(
        default=5.0,
        gt=0,
        description="how often the names of dns:///host:port are looked up, seconds; a lost connection looks at once",
    )
    tokenizer: Path | None = Field(
        default=None,
        description="model directory with tokenizer.json; without it prompts are token ids only",
    )
    chat_template: Path | None = Field(
        default=None, description="file with a chat template in Jinja; default: the one that the tokenizer came with"
    )
    model_name: str | None = Field(
        default=None, min_length=1, description="name that clients see; default: the target model's own"
    )
    max_concurrent_sequences: int | None = Field(
        default=None, ge=1, description="most requests that run at a time; unset: as many as the verifiers run at once"
    )
    max_queued_requests: int = Field(
        default=256, ge=0, description="most requests that wait for a place; more are refused with RESOURCE_EXHAUSTED"
    )
    max_queue_seconds: float = Field(
        default=30.0,
        gt=0,
        description="a request that would have to wait longer for a place is refused at once, seconds; one that was "
        "let in all the same, at twice that",
    )
    drafter_wait_seconds: float = Field(
        default=5.0,
        ge=0,
        description="how long start-up waits for a drafter to be ready before serving without, seconds",
    )
    trace_prompts: bool = Field(default=False, description="write prompts, outputs and stop strings into traces")
    dashboard: bool = Field(
        default=False, description="serve a page at /dashboard that shows what happens; needs http_listen"
    )
    dashboard_otlp_listen: str | None = Field(
        default=None,
        description="host:port of this machine on which the dashboard takes traces of all services, as OTLP over gRPC; "
        "unset: the page shows none",
    )
    dashboard_texts: bool = Field(
        default=False, description="show the text of every request on the dashboard, not only of those made there"
    )
    max_traces_per_second: float | None = Field(
        default=None,
        gt=0,
        description="most requests a second that begin a trace of their own; a request that is part of a trace already "
        "stays in it; unset: as many as OTEL_TRACES_SAMPLER says",
    )

    @property
    def serves_metrics(self) -> bool:
        """Whether metrics can be read somewhere, if only at /metrics of the HTTP port."""
        return self.metrics_listen is not None or self.http_listen is not None

    @property
    def work_addresses(self) -> tuple[str, ...]:
        """Each host:port on which clients are served: not those for probes and metrics."""
        return (self.listen,) if self.http_listen is None else (self.listen, self.http_listen)

    @property
    def authenticates(self) -> bool:
        """Whether clients must say who they are."""
        return self.api_keys is not None or super().authenticates

    @property
    def _authentication(self) -> str:
        return "api_keys or tls_client_ca"

    @model_validator(mode="after")
    def _check_dashboard(self) -> Self:
        if self.dashboard and self.http_listen is None:
            raise ValueError("dashboard needs http_listen, the port to serve it on")
        listen = self.dashboard_otlp_listen
        if listen is not None and not is_loopback(listen.rpartition(":")[0]):
            raise ValueError(
                f"dashboard_otlp_listen must be an address of this machine alone, as 127.0.0.1:4317, is {listen!r}"
            )
        return self

    @field_validator("verifiers", "drafters")
    @classmethod
    def _check_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            check_target(address)
        if len(set(addresses)) != len(addresses):
            raise ValueError("an address stands in the list twice")
        return addresses
