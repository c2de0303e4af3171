"""Checks the drafters that a gateway names, before they are dialled."""

from __future__ import annotations

from outrider.protocol.errors import InvalidArgumentError
from outrider.v1 import verifier_pb2

# Each is a connection that this verifier keeps.
MAX_DRAFTERS = 1024
MAX_ADDRESS_LENGTH = 300


def check_pool(pool: verifier_pb2.DrafterPool) -> None:
    """Raise InvalidArgumentError unless these are addresses, and not more than one can have links to."""
    if len(pool.addresses) > MAX_DRAFTERS:
        raise InvalidArgumentError(
            "drafters.addresses", f"has {len(pool.addresses)} addresses, at most {MAX_DRAFTERS} are taken"
        )
    for index, address in enumerate(pool.addresses):
        host, _, port = address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16
        is_host = bool(host) and host.isascii() and host.isprintable() and not set(host) & set(" /\\?#@")
        if not is_host or not is_port or len(address) > MAX_ADDRESS_LENGTH:
            raise InvalidArgumentError(
                "drafters.addresses", f"{address[:MAX_ADDRESS_LENGTH]!r} at index {index} is not host:port"
            )
