"""Which addresses a configured list stands for, now and while pods come and go."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

logger = logging.getLogger(__name__)

DNS_SCHEME = "dns:///"
# A name server that does not answer counts as one that fails.
LOOKUP_SECONDS = 5.0
# However often links break, a name is not looked up more often than this.
SHORTEST_SECONDS = 1.0
# For so long the last answer is believed while DNS fails; then only what works is kept.
KEEP_SECONDS = 300.0


class ResolveError(Exception):
    """DNS has no answer; the message says why."""


@dataclass(frozen=True)
class Endpoint:
    """A service to dial."""

    address: str
    """host:port; an IPv6 address in brackets."""
    server_name: str = ""
    """What its certificate must be for, where that is not the address's host: the name that DNS was asked for."""


class Resolver(Protocol):
    """Asks DNS."""

    async def resolve(self, host: str) -> Sequence[str]:
        """All IP addresses of a name, IPv4 and IPv6, at least one. Raises ResolveError."""


class SystemResolver:
    """Asks as every program of the machine does: hosts file, search domains and name servers of its configuration."""

    async def resolve(self, host: str) -> Sequence[str]:
        """All IP addresses of a name, IPv4 and IPv6, at least one. Raises ResolveError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[str]] = loop.create_future()

        def settle(addresses: Sequence[str], error: Exception | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(addresses)
            else:
                answer.set_exception(error)

        def look_up() -> None:
            addresses: Sequence[str] = ()
            error: Exception | None = None
            try:
                found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                addresses = [str(entry[4][0]) for entry in found]
            except (OSError, UnicodeError) as problem:
                error = ResolveError(getattr(problem, "strerror", None) or str(problem))
            # The loop may have ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, addresses, error)

        # Not an executor's thread: those are waited for when the process ends, which dead name servers would delay.
        threading.Thread(target=look_up, name=f"resolve {host}", daemon=True).start()
        return await answer


@dataclass
class _Name:
    """One name of the list and what is known about it."""

    host: str
    port: int
    addresses: list[str] = field(default_factory=list)
    answered: float = 0.0  # monotonic, seconds
    problem: str = ""
    is_urgent: asyncio.Event = field(default_factory=asyncio.Event)

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(address, self.host.rstrip(".")) for address in self.addresses]


class Discovery:
    """Follows a list of `host:port` and `dns:///host:port`; of the latter it looks up every address, again and again.

    `on_change` is called on the event loop whenever `endpoints` has changed. DNS that fails changes nothing for
    KEEP_SECONDS, and after that removes only what `is_working` does not vouch for. An answer that leaves an address out
    removes it at once: that is how a pod says that it wants no more work.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        resolver: Resolver,
        refresh_seconds: float,
        is_working: Callable[[str], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._resolver = resolver
        self._refresh_seconds = refresh_seconds
        self._is_working = is_working
        self._on_change = on_change
        self._sources = [_source(target) for target in targets]
        self._endpoints = self._collect()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """What the list stands for now, each address once; names that were not yet looked up stand for nothing."""
        return self._endpoints

    async def run(self) -> None:
        """Look names up until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                if isinstance(source, _Name):
                    tasks.create_task(self._follow(source))

    def refresh(self) -> None:
        """Look all names up now: something has changed out there."""
        for source in self._sources:
            if isinstance(source, _Name):
                source.is_urgent.set()

    async def _follow(self, name: _Name) -> None:
        while True:
            name.is_urgent.clear()
            began = time.monotonic()
            await self._look_up(name)
            with suppress(TimeoutError):
                # Spread out, so that many gateways that started together do not ask together for ever.
                async with asyncio.timeout(self._refresh_seconds * random.uniform(0.9, 1.1)):
                    await name.is_urgent.wait()
            await asyncio.sleep(began + min(SHORTEST_SECONDS, self._refresh_seconds) - time.monotonic())

    async def _look_up(self, name: _Name) -> None:
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                found = await self._resolver.resolve(name.host)
        except (ResolveError, TimeoutError) as error:
            self._take_failure(name, str(error) or "the name server does not answer")
            return
        except Exception:
            logger.exception("looking up %s failed", name.host)
            self._take_failure(name, "internal error")
            return
        addresses = list(dict.fromkeys(_address(host, name.port) for host in found))
        if not addresses:
            self._take_failure(name, "no addresses")
            return
        if name.problem:
            logger.info("%s is found again", name.host)
        name.problem, name.answered = "", time.monotonic()
        new = [address for address in addresses if address not in name.addresses]
        # Each gateway in an order of its own, so that they do not all fill the first verifier first.
        random.shuffle(new)
        self._set(name, [address for address in name.addresses if address in addresses] + new)

    def _take_failure(self, name: _Name, problem: str) -> None:
        if problem != name.problem:
            logger.warning("cannot look up %s: %s; going on with %d addresses", name.host, problem, len(name.addresses))
        name.problem = problem
        if time.monotonic() - name.answered > KEEP_SECONDS:
            self._set(name, [address for address in name.addresses if self._is_working(address)])

    def _set(self, name: _Name, addresses: list[str]) -> None:
        if addresses == name.addresses:
            return
        gone = [address for address in name.addresses if address not in addresses]
        come = [address for address in addresses if address not in name.addresses]
        logger.info("%s: come %s, gone %s", name.host, ", ".join(come) or "none", ", ".join(gone) or "none")
        name.addresses = addresses
        self._endpoints = self._collect()
        self._on_change()

    def _collect(self) -> tuple[Endpoint, ...]:
        by_address: dict[str, Endpoint] = {}
        for source in self._sources:
            for endpoint in source.endpoints() if isinstance(source, _Name) else [source]:
                by_address.setdefault(endpoint.address, endpoint)
        return tuple(by_address.values())


def check_target(target: str) -> None:
    """Raise ValueError unless `target` is host:port or dns:///host:port."""
    _source(target)


def _source(target: str) -> Endpoint | _Name:
    is_name = target.startswith(DNS_SCHEME)
    host, _, port = target.removeprefix(DNS_SCHEME).rpartition(":")
    # An IPv6 address stands in brackets, and `dns:host:port`, which gRPC knows too, is not meant to be a host.
    is_host = host and "/" not in host and (":" not in host or (not is_name and host[0] + host[-1] == "[]"))
    if not is_host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{target!r} is neither host:port nor {DNS_SCHEME}host:port")
    return _Name(host, int(port)) if is_name else Endpoint(target)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
