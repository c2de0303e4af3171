"""Addresses as people write them."""

from __future__ import annotations


def check_address(address: str, *, allows_any_port: bool = False) -> str:
    """The address, if it is host:port, IPv6 hosts in brackets; `allows_any_port`: 0 stands for a free one.

    Raises ValueError with what is wrong.
    """
    host, _, port = address.rpartition(":")
    if not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise ValueError(f"{address!r} is not host:port")
    least = 0 if allows_any_port else 1
    if not (port.isascii() and port.isdigit() and least <= int(port) < 1 << 16):
        raise ValueError(f"the port of {address!r} is not a number from {least} to 65535")
    return address
