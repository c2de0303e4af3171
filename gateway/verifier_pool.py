"""All verifiers of the gateway, the drafters as they see them, and where a new sequence goes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import UnavailableError
from gateway.decoding import Decoding
from gateway.served_model import ServedModel
from gateway.verifier_link import VerifierLink
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
    """Keeps a link to each verifier and spreads sequences over verifiers and drafters.

    The first verifier to connect says which model the gateway serves; one with another model is refused for as long as
    any other is connected. `check_model` may refuse a model for the gateway's own reasons.
    """

    def __init__(
        self,
        verifiers: Sequence[str],
        drafters: Sequence[str],
        *,
        max_message_bytes: int,
        check_model: Callable[[ServedModel], None],
    ) -> None:
        self._drafters = tuple(drafters)
        self._check_model = check_model
        self._model: ServedModel | None = None
        self._num_by_drafter: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._links = [
            VerifierLink(
                address,
                drafters,
                max_message_bytes=max_message_bytes,
                accept=self._accept,
                on_change=self._changed.set,
            )
            for address in verifiers
        ]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def model(self) -> ServedModel:
        """The model that is served. Raises UnavailableError before the first verifier has connected."""
        if self._model is None:
            raise UnavailableError("no verifier has connected yet", retry_delay_seconds=1.0)
        return self._model

    @property
    def capacity(self) -> int:
        """How many sequences the verifiers that are ready run at once, at least 1."""
        return max(1, sum(link.load.max_running or UNKNOWN_MAX_RUNNING for link in self._links if link.is_ready))

    async def start(self, *, drafter_wait_seconds: float) -> None:
        """Connect; returns once a verifier is ready and, where drafters are configured, one is or was waited for."""
        self._tasks = [asyncio.create_task(link.run()) for link in self._links]
        while not await self._wait_for(lambda: any(link.is_ready for link in self._links), REPORT_SECONDS):
            logger.warning("still waiting for a verifier at %s", ", ".join(link.address for link in self._links))
        if self._drafters and not await self._wait_for(self._has_ready_drafter, drafter_wait_seconds):
            logger.warning("no drafter is ready: serving without speculation until one is")

    async def stop(self) -> None:
        """Close every link; sequences that still run fail with UNAVAILABLE."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def route(self, mode: generation_pb2.SpeculationMode, *, without: Collection[VerifierLink] = ()) -> Route:
        """The ready verifier, and the drafter that is ready for it, with the fewest sequences of this gateway.

        Raises UnavailableError when no verifier is ready.
        """
        links = [link for link in self._links if link.is_ready and link not in without]
        if not links:
            raise UnavailableError("no verifier is reachable", retry_delay_seconds=1.0)
        link = min(links, key=_load)
        if mode == generation_pb2.SPECULATION_MODE_OFF:
            return Route(link, "", common_pb2.FALLBACK_REASON_CLIENT_DISABLED)
        states = {address: self._state(link, address) for address in self._drafters}
        ready = [address for address, state in states.items() if state == verifier_pb2.DRAFTER_STATE_READY]
        if ready:
            return Route(link, min(ready, key=lambda address: self._num_by_drafter[address]))
        if states and set(states.values()) == {verifier_pb2.DRAFTER_STATE_INCOMPATIBLE}:
            return Route(link, "", common_pb2.FALLBACK_REASON_INCOMPATIBLE_DRAFTER)
        return Route(link, "", common_pb2.FALLBACK_REASON_NO_DRAFTER)

    @contextmanager
    def open(self, route: Route, message: verifier_pb2.OpenDecoding) -> Iterator[Decoding]:
        """The sequence on the route's verifier, closed there when the context ends. Raises UnavailableError."""
        decoding = route.link.open(message)
        self._num_by_drafter[route.drafter_address] += 1
        try:
            yield decoding
        finally:
            self._num_by_drafter[route.drafter_address] -= 1
            decoding.close()

    def verifier_members(self) -> list[generation_pb2.VerifierMember]:
        """The verifiers, for clients that ask."""
        return [
            generation_pb2.VerifierMember(
                address=link.address, is_ready=link.is_ready, num_sequences=link.num_sequences
            )
            for link in self._links
        ]

    def drafter_members(self) -> list[generation_pb2.DrafterMember]:
        """The drafters as the verifiers see them, for clients that ask."""
        return [self._drafter_member(address) for address in self._drafters]

    def _drafter_member(self, address: str) -> generation_pb2.DrafterMember:
        statuses = [link.drafters[address] for link in self._links if address in link.drafters]
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
        if self._model is not None and any(link.model is not None for link in self._links):
            self._model.check_same(model)
        else:
            self._model = model

    def _has_ready_drafter(self) -> bool:
        return any(
            self._state(link, address) == verifier_pb2.DRAFTER_STATE_READY
            for link in self._links
            for address in self._drafters
        )

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
