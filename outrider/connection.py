"""How a client reaches the gateway: TLS, the API key, the channel's options."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.retry import RetryPolicy

API_KEY_VARIABLE = "OUTRIDER_API_KEY"

# The largest message either way that a channel is ready for.
MAX_MESSAGE_BYTES = 64 << 20

_KEY = re.compile(r"[\x21-\x7e]+")
# The keepalive finds out about a gateway that vanished without a word; servers of ours allow a ping every 15 s.
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)


@dataclass(frozen=True)
class Tls:
    """How the gateway proves itself, and how the client does where the gateway asks for a certificate. PEM files."""

    ca: Path | str | None = None
    """Authorities of the gateway's certificate; None: those that gRPC trusts by itself."""
    certificate: Path | str | None = None
    key: Path | str | None = None
    """Of the certificate; the two belong together."""
    server_name: str = ""
    """What the gateway's certificate is for, where that is not the host of the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel is made with. Raises OSError for a file that cannot be read, ValueError for half a pair."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client's certificate and its key belong together")
        ca, key, certificate = (
            None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)


def channel_options(tls: Tls | None, retry: RetryPolicy) -> list[tuple[str, int | str]]:
    """gRPC's options for a channel to the gateway."""
    options = [*_OPTIONS, *retry.channel_options(MAX_MESSAGE_BYTES)]
    if tls is not None and tls.server_name:
        options += [("grpc.ssl_target_name_override", tls.server_name), ("grpc.default_authority", tls.server_name)]
    return options


def authorization(api_key: str | None, environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """Metadata with the key, or with that of OUTRIDER_API_KEY where it is None; none for an empty one.

    Raises ValueError for what cannot be a key.
    """
    key = environment.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    if not key:
        return ()
    if not _KEY.fullmatch(key):
        raise ValueError("the API key has characters that are not printable ASCII, or spaces")
    return (("authorization", f"Bearer {key}"),)
