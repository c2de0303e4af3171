"""Keeps web pages from elsewhere away from a gateway that asks nobody for a token."""

from __future__ import annotations

from starlette.requests import Request

from gateway.http.errors import ApiError
from outrider.service.loopback import is_loopback


def check_host(request: Request, listen_host: str) -> None:
    """Raise ApiError when a gateway that listens on loopback is asked for under another name than this machine's own.

    A page may let its own name resolve to this machine; its browser then takes the gateway for a part of the page, and
    still sends that name.
    """
    header = request.headers.get("host", "")
    host = header.rpartition(":")[0] or header
    if is_loopback(listen_host) and not is_loopback(host):
        raise ApiError(403, f"host: {host!r} is not this machine", code="forbidden_host")
