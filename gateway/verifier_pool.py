"""All verifiers of the gateway, the drafters as they see them, and where a new sequence goes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gateway.discovery import Discovery, Resolver, SystemResolver
from gateway.sequence_updates import SequenceUpdates
from gateway.served_model import ServedModel
from gateway.verifier_link import VerifierLink
from outrider.protocol.errors import UnavailableError
from outrider.service.instruments import Counter as CounterInstrument
from outrider.service.security import Dial, dial_plaintext
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2

logger = logging.getLogger(__name__)

REPORT_SECONDS = 10.0
# What a verifier is taken to run at once that does not say.
UNKNOWN_MAX_RUNNING = 64


@dataclass(frozen=True)
class Route:
    """Where one sequence goes."""

    link: VerifierLink
    # Empty: none, for `no_drafter_reason`.
    drafter_address: str
    no_drafter_reason: common_pb2.FallbackReason = common_pb2.FALLBACK_REASON_UNSPECIFIED


class VerifierPool:
    """Keeps a link to each verifier and spreads sequences over verifiers and drafters, while both come and go.

    The first verifier to connect says which model the gateway serves; one with another model is refused for as long as
    any other is connected. `check_model` may refuse a model for the gateway's own reasons.
    """

    def __init__(
        self,
        verifiers: Sequence[str],
        drafters: Sequence[str],
        *,
        max_message_bytes: int,
        dial: Dial = dial_plaintext,
        wire_bytes: CounterInstrument | None = None,
        check_model: Callable[[ServedModel], None],
        resolver: Resolver | None = None,
        dns_refresh_seconds: float = 5.0,
    ) -> None:
        resolver = resolver or SystemResolver()
        self._targets = tuple(verifiers)
        self._has_drafters = bool(drafters)
        self._verifiers = Discovery(
            verifiers,
            resolver=resolver,
            refresh_seconds=dns_refresh_seconds,
            is_working=self._is_connected,
            on_change=self._follow_verifiers,
        )
        self._drafters = Discovery(
            drafters,
            resolver=resolver,
            refresh_seconds=dns_refresh_seconds,
            is_working=self._is_drafter_ready,
            on_change=self._follow_drafters,
        )
        self._max_message_bytes = max_message_bytes
        self._dial = dial
        self._wire_bytes = wire_bytes
        self._check_model = check_model
        self._model: ServedModel | None = None
        self._num_by_drafter: Counter[str] = Counter()
        self._changed = asyncio.Event()
        # By address; retired ones stay until their last sequence has ended.
        self._links: dict[str, VerifierLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_running = False
        self._follow_verifiers()

    @property
    def links(self) -> list[VerifierLink]:
        """The link to each verifier that is known now."""
        return list(self._links.values())

    @property
    def model(self) -> ServedModel:
        """The model that is served. Raises UnavailableError before the first verifier has connected."""
        if self._model is None:
            raise UnavailableError("no verifier has connected yet", retry_delay_seconds=1.0)
        return self._model

    @property
    def capacity(self) -> int:
        """How many sequences the verifiers that are ready run at once, at least 1."""
        return max(1, sum(link.load.max_running or UNKNOWN_MAX_RUNNING for link in self.links if link.is_ready))

    async def start(self, *, drafter_wait_seconds: float) -> None:
        """Connect; returns once a verifier is ready and, where drafters are configured, one is or was waited for."""
        self._is_running = True
        for link in self.links:
            self._run(link)
        for discovery in (self._verifiers, self._drafters):
            self._spawn(discovery.run())
        while not await self._wait_for(lambda: any(link.is_ready for link in self.links), REPORT_SECONDS):
            logger.warning("still waiting for a verifier at %s", ", ".join(self._targets))
        if self._has_drafters and not await self._wait_for(self._has_ready_drafter, drafter_wait_seconds):
            logger.warning("no drafter is ready: serving without speculation until one is")

    async def stop(self) -> None:
        """Close every link; sequences that still run fail with UNAVAILABLE."""
        self._is_running = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def route(self, mode: generation_pb2.SpeculationMode, *, without: Collection[VerifierLink] = ()) -> Route:
        """The ready verifier, and the drafter that is ready for it, with the fewest sequences of this gateway.

        Raises UnavailableError when no verifier is ready.
        """
        links = [link for link in self.links if link.is_ready and link not in without]
        if not links:
            raise UnavailableError("no verifier is reachable", retry_delay_seconds=1.0)
        link = min(links, key=_load)
        if mode == generation_pb2.SPECULATION_MODE_OFF:
            return Route(link, "", common_pb2.FALLBACK_REASON_CLIENT_DISABLED)
        states = {drafter.address: self._state(link, drafter.address) for drafter in self._drafters.endpoints}
        ready = [address for address, state in states.items() if state == verifier_pb2.DRAFTER_STATE_READY]
        if ready:
            return Route(link, min(ready, key=lambda address: self._num_by_drafter[address]))
        if states and set(states.values()) == {verifier_pb2.DRAFTER_STATE_INCOMPATIBLE}:
            return Route(link, "", common_pb2.FALLBACK_REASON_INCOMPATIBLE_DRAFTER)
        return Route(link, "", common_pb2.FALLBACK_REASON_NO_DRAFTER)

    @contextmanager
    def open(self, route: Route, message: verifier_pb2.OpenDecoding) -> Iterator[SequenceUpdates]:
        """The sequence on the route's verifier, closed there when the context ends. Raises UnavailableError."""
        updates = route.link.open(message)
        self._num_by_drafter[route.drafter_address] += 1
        try:
            yield updates
        finally:
            self._num_by_drafter[route.drafter_address] -= 1
            if not self._num_by_drafter[route.drafter_address]:
                # Drafters come and go for as long as the gateway runs.
                del self._num_by_drafter[route.drafter_address]
            updates.close()

    def verifier_members(self) -> list[generation_pb2.VerifierMember]:
        """The verifiers, for clients that ask."""
        return [
            generation_pb2.VerifierMember(
                address=link.address, is_ready=link.is_ready, num_sequences=link.num_sequences
            )
            for link in self.links
        ]

    def drafter_members(self) -> list[generation_pb2.DrafterMember]:
        """The drafters as the verifiers see them, for clients that ask."""
        return [self._drafter_member(drafter.address) for drafter in self._drafters.endpoints]

    def _drafter_member(self, address: str) -> generation_pb2.DrafterMember:
        statuses = [link.drafters[address] for link in self.links if address in link.drafters]
        is_ready = any(status.state == verifier_pb2.DRAFTER_STATE_READY for status in statuses)
        details = [status.detail for status in statuses if status.detail]
        return generation_pb2.DrafterMember(
            address=address,
            is_ready=is_ready,
            num_sequences=self._num_by_drafter[address],
            detail="" if is_ready else (details or ["no verifier has a link to it"])[0],
        )

    def _accept(self, model: ServedModel) -> None:
        self._check_model(model)
        if self._model is not None and any(link.model is not None for link in self.links):
            self._model.check_same(model)
        else:
            self._model = model

    def _has_ready_drafter(self) -> bool:
        return any(self._is_drafter_ready(drafter.address) for drafter in self._drafters.endpoints)

    def _is_drafter_ready(self, address: str) -> bool:
        return any(self._state(link, address) == verifier_pb2.DRAFTER_STATE_READY for link in self.links)

    def _is_connected(self, address: str) -> bool:
        return address in self._links and self._links[address].is_connected

    def _follow_verifiers(self) -> None:
        """Have a link to each verifier that is known, and none for long to any other."""
        wanted = {endpoint.address for endpoint in self._verifiers.endpoints}
        for link in self.links:
            if link.address not in wanted and not link.is_retired:
                link.retire()
        for endpoint in self._verifiers.endpoints:
            link_there = self._links.get(endpoint.address)
            if link_there is None or (link_there.is_retired and not link_there.revive()):
                self._links[endpoint.address] = link = VerifierLink(
                    endpoint,
                    self._drafters.endpoints,
                    max_message_bytes=self._max_message_bytes,
                    dial=self._dial,
                    wire_bytes=self._wire_bytes,
                    accept=self._accept,
                    on_change=self._changed.set,
                    on_lost=self._refresh,
                )
                if self._is_running:
                    self._run(link)

    def _follow_drafters(self) -> None:
        for link in self.links:
            link.set_drafters(self._drafters.endpoints)
        self._changed.set()

    def _refresh(self) -> None:
        # What broke may have been replaced.
        self._verifiers.refresh()
        self._drafters.refresh()

    def _run(self, link: VerifierLink) -> None:
        self._spawn(link.run()).add_done_callback(lambda _: self._forget(link))

    def _forget(self, link: VerifierLink) -> None:
        if self._is_running and self._links.get(link.address) is link:
            del self._links[link.address]
            logger.info("left verifier %s", link.address)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _state(self, link: VerifierLink, address: str) -> verifier_pb2.DrafterState:
        status = link.drafters.get(address)
        return verifier_pb2.DRAFTER_STATE_CONNECTING if status is None else status.state

    async def _wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition came true within that time."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


def _load(link: VerifierLink) -> tuple[bool, int, int]:
    # Our own count is exact and moves at once; the reported load breaks ties between several gateways.
    return link.is_shunned, link.num_sequences, link.load.num_running + link.load.num_waiting
