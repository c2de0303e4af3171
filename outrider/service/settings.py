"""Typed settings of a service: by flag, environment or file, in that order; what nobody knows is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from outrider.service.address import check_address
from outrider.service.logs import LogFormat
from outrider.service.loopback import is_loopback
from outrider.service.settings_error import describe, spell
from outrider.service.settings_parser import make_parser

SERVICES = ("GATEWAY", "VERIFIER", "DRAFTER")
# Variables that are for clients: a service may find them in its environment, and does not read them.
CLIENT_VARIABLES = frozenset({"OUTRIDER_API_KEY"})


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


# Written `a:1,b:2` in flags and environment, as an array in a file.
AddressList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class BadSettingsError(Exception):
    """The settings do not parse; the message names each key and is for the operator."""


class ServiceSettings(BaseSettings):
    """What every service can be told. A subclass sets `env_prefix` and adds its own fields."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        nested_model_default_partial_update=False,
    )

    config: Path | None = Field(
        default=None,
        description="TOML file with these settings, keys as in the environment but lower case and without prefix",
    )
    listen: str = Field(default="127.0.0.1:0", description="host:port to serve gRPC on; port 0 takes a free one")
    health_listen: str | None = Field(
        default=None,
        description="host:port of a second port with health checks alone, never encrypted, for probes; unset: none",
    )
    metrics_listen: str | None = Field(
        default=None, description="host:port to serve metrics on, as Prometheus reads them, at /metrics; unset: none"
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="PEM file with the certificate to serve with, and to show to services that are dialled, and what "
        "leads to its authority; unset: no TLS. All files of these settings are read again when they change",
    )
    tls_key: Path | None = Field(default=None, description="PEM file with the certificate's private key")
    tls_client_ca: Path | None = Field(
        default=None,
        description="PEM file with the authorities of clients' certificates; unset: clients need none",
    )
    tls_allowed_clients: AddressList = Field(
        default=(),
        description="names (DNS or URI), comma-separated, one of which a client's certificate must be for; empty: any",
    )
    tls_ca: Path | None = Field(
        default=None,
        description="PEM file with the authorities of the services that this one dials; unset: it dials without TLS",
    )
    allow_plaintext: bool = Field(
        default=False, description="serve without TLS on an address that other machines can reach"
    )
    allow_unauthenticated: bool = Field(
        default=False, description="serve anyone on an address that other machines can reach"
    )
    max_message_bytes: int = Field(
        default=64 << 20, ge=1 << 16, description="largest gRPC message in either direction, bytes"
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, description="how long running sequences may go on after SIGTERM, seconds"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="least severe log line that is written"
    )
    log_format: LogFormat = Field(
        default="auto", description="text for a person or json for a collector; auto is text on a terminal"
    )

    @property
    def work_addresses(self) -> tuple[str, ...]:
        """Each host:port on which clients are served: not those for probes and metrics."""
        return (self.listen,)

    @property
    def authenticates(self) -> bool:
        """Whether clients must say who they are."""
        return self.tls_client_ca is not None

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        for setting, needed in (
            ("tls_certificate", "tls_key"),
            ("tls_key", "tls_certificate"),
            ("tls_client_ca", "tls_certificate"),
            ("tls_allowed_clients", "tls_client_ca"),
        ):
            if getattr(self, setting) and not getattr(self, needed):
                raise ValueError(f"{setting} needs {needed}")
        return self

    @model_validator(mode="after")
    def _check_open_addresses(self) -> Self:
        for address in self.work_addresses:
            if is_loopback(address.rpartition(":")[0]):
                continue
            if self.tls_certificate is None and not self.allow_plaintext:
                raise ValueError(
                    f"other machines can reach {address}: set tls_certificate and tls_key, or allow_plaintext if its "
                    "network keeps strangers from listening"
                )
            if not self.authenticates and not self.allow_unauthenticated:
                raise ValueError(
                    f"other machines can reach {address}: set {self._authentication}, or allow_unauthenticated if "
                    "its network keeps strangers out"
                )
        return self

    @property
    def _authentication(self) -> str:
        return "tls_client_ca"

    # A subclass may have no such field.
    @field_validator("listen", "health_listen", "metrics_listen", "http_listen", check_fields=False)
    @classmethod
    def _check_listen(cls, address: str | None) -> str | None:
        return None if address is None else check_address(address, allows_any_port=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, arguments: Sequence[str], *, program: str) -> Self:
        """Settings from command-line `arguments`, then OUTRIDER_* variables, then the file that `--config` names.

        Raises BadSettingsError naming all that is unknown or has a bad value as it was written; an unknown flag, or
        `--help`, ends the program as argparse does.
        """
        prefix = cls.model_config["env_prefix"]
        flags = vars(make_parser(cls, program).parse_args(arguments))
        refuse_unknown_variables(cls, os.environ)
        path = flags.get("config", os.environ.get(f"{prefix}CONFIG"))
        if path is not None and not Path(path).is_file():
            raise BadSettingsError(f"{'--config' if 'config' in flags else f'{prefix}CONFIG'}: no file at {path}")
        # A subclass, as the file belongs to this call and not to the class.
        bound = type(
            cls.__name__,
            (cls,),
            {"model_config": SettingsConfigDict(toml_file=path), "__doc__": cls.__doc__, "__module__": cls.__module__},
        )
        try:
            settings = bound(**{name: ",".join(one) if isinstance(one, list) else one for name, one in flags.items()})
        except ValidationError as error:
            spelled = spell(flags, os.environ, prefix, path)
            raise BadSettingsError(describe(error, cls.model_fields, spelled, prefix)) from error
        except (SettingsError, ValueError) as error:
            raise BadSettingsError(str(error)) from error
        assert isinstance(settings, cls)
        return settings


class ModelSettings(ServiceSettings):
    """What a service with a model can be told about it."""

    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="number format of the weights; auto is float32 on a CPU and bfloat16 on a GPU"
    )
    block_size: int = Field(default=16, ge=16, description="tokens in a KV-cache block, a power of two")
    num_blocks: int | None = Field(default=None, ge=1, description="KV-cache blocks; unset sizes the cache from memory")
    memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="share of the GPU memory left after loading that the KV cache takes"
    )
    cpu_cache_bytes: int = Field(default=256 << 20, ge=1 << 20, description="size of the KV cache on a CPU, bytes")
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="most tokens of a sequence, prompt and output together; unset: what the model's config allows",
    )
    max_num_batched_tokens: int = Field(default=2048, ge=64, description="most tokens computed in one forward pass")
    cuda_graphs: bool = Field(
        default=True, description="replay decoding as CUDA graphs, on a GPU; takes a few seconds longer to start"
    )
    step_spans: int = Field(
        default=32,
        ge=1,
        description="steps of a traced request that get a span each; later ones are folded, as many to a span",
    )
    num_threads: int = Field(
        default=0, ge=0, description="CPU threads of the model; 0: one for each core that it may use"
    )
    busy_poll_seconds: float | None = Field(
        default=None,
        ge=0,
        le=10,
        description="how long a thread that waits for the next frame looks for it before it sleeps, seconds; costs up"
        " to two cores while there is traffic; unset is 0.02 on a GPU with 8 or more cores, else 0",
    )

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"must be auto, cpu, cuda or cuda:N, is {value!r}")
        return value

    @field_validator("block_size")
    @classmethod
    def _check_block_size(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"must be a power of two, is {value}")
        return value


def refuse_unknown_variables(cls: type[ServiceSettings], environment: Mapping[str, str]) -> None:
    """Raise BadSettingsError for an OUTRIDER_* variable that no service has, or that this one does not know.

    Variables of the other services are theirs to check: one environment may configure all three.
    """
    prefix = cls.model_config["env_prefix"]
    known = {f"{prefix}{name.upper()}" for name in cls.model_fields}
    for name in sorted(environment):
        if not name.startswith("OUTRIDER_") or name in CLIENT_VARIABLES:
            continue
        is_ours = name.startswith(prefix)
        is_anothers = any(name.startswith(f"OUTRIDER_{service}_") for service in SERVICES) and not is_ours
        if not is_anothers and name not in known:
            raise BadSettingsError(f"{name}: unknown environment variable")
