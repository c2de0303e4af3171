"""Verifier and drafter in this process, behind real gRPC, and a bare Decode client for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from drafter_service.drafter import Drafter
from drafter_service.factory import make_drafter
from drafter_service.service import DrafterService
from drafter_service.settings import DrafterSettings
from engine.device import make_runner
from engine.serving import Registration, Server
from engine.telemetry import Telemetry
from engine.wire import pack_tokens, unpack_tokens
from outrider.v1 import common_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from verifier_service.service import VerifierService
from verifier_service.settings import VerifierSettings
from verifier_service.target import Target


@asynccontextmanager
async def running_drafter(
    settings: DrafterSettings, telemetry: Telemetry | None = None, drafter: Drafter | None = None
) -> AsyncIterator[Server]:
    """A drafter on a free port, or the port that the settings name."""
    service = DrafterService(
        drafter or make_drafter(settings),
        max_sequences=settings.max_sequences,
        target_revision=settings.target_revision,
        telemetry=telemetry or Telemetry(),
    )
    registration = Registration(
        "outrider.v1.DrafterService", lambda s: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, s)
    )
    server = Server(settings, service, [registration])
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def running_verifier(
    settings: VerifierSettings, telemetry: Telemetry | None = None
) -> AsyncIterator[tuple[Server, VerifierService]]:
    """A verifier on a free port."""
    service = VerifierService(settings, Target(lambda: make_runner(settings, settings.model)), telemetry or Telemetry())
    registration = Registration(
        "outrider.v1.VerifierService", lambda s: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(service, s)
    )
    server = Server(settings, service, [registration])
    await server.start()
    try:
        yield server, service
    finally:
        await server.stop()


def drafter_settings(**fields: Any) -> DrafterSettings:
    """Settings for tests: free port, no long drain, CPU unless told otherwise."""
    return DrafterSettings(**{"listen": "127.0.0.1:0", "device": "cpu", "drain_seconds": 0.2, **fields})


def verifier_settings(model: Path, **fields: Any) -> VerifierSettings:
    """Settings for tests: free port, no long drain, CPU unless told otherwise, a patient wait for proposals."""
    defaults = {"listen": "127.0.0.1:0", "device": "cpu", "drain_seconds": 0.2, "draft_timeout_seconds": 10.0}
    return VerifierSettings(**{**defaults, "model": model, **fields})


@dataclass
class Result:
    """What came back for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    fallbacks: list[tuple[int, int]] = field(default_factory=list)
    ended: verifier_pb2.Ended | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def reasons(self) -> list[str]:
        """Names of the fallback reasons, in order."""
        return [common_pb2.FallbackReason.Name(reason).removeprefix("FALLBACK_REASON_") for reason, _ in self.fallbacks]


class DecodeClient:
    """A gateway reduced to its Decode stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        self._outbox: asyncio.Queue[verifier_pb2.DecodeRequest] = asyncio.Queue()
        self.results: dict[int, Result] = {}
        self.drafters: dict[str, verifier_pb2.DrafterStatus] = {}
        self._changed = asyncio.Condition()
        self._next_id = 1
        self.error: BaseException | None = None

    async def _requests(self) -> AsyncIterator[verifier_pb2.DecodeRequest]:
        while True:
            yield await self._outbox.get()

    async def run(self) -> None:
        """Read frames until the stream ends."""
        try:
            async for frame in self.stub.Decode(self._requests()):
                for status in frame.drafters:
                    self.drafters[status.address] = status
                for update in frame.updates:
                    self._take(update)
                async with self._changed:
                    self._changed.notify_all()
        except grpc.aio.AioRpcError as error:
            self.error = error
            for result in self.results.values():
                result.done.set()

    def _take(self, update: verifier_pb2.SequenceUpdate) -> None:
        result = self.results[update.sequence_id]
        result.token_ids += unpack_tokens(update.token_ids)
        result.origins += list(update.origins)
        result.logprobs += update.logprobs
        result.num_drafted += update.num_draft_tokens
        result.num_accepted += update.num_accepted_tokens
        result.num_steps += bool(update.token_ids)
        result.fallbacks += [(fallback.reason, fallback.position) for fallback in update.fallbacks]
        if update.HasField("ended"):
            result.ended = update.ended
            result.done.set()

    def send(self, frame: verifier_pb2.DecodeRequest) -> None:
        """Send any frame."""
        self._outbox.put_nowait(frame)

    async def use_drafters(self, *addresses: str, state: int = verifier_pb2.DRAFTER_STATE_READY) -> None:
        """Name the drafters and wait until all are in `state`."""
        self.send(verifier_pb2.DecodeRequest(drafters=verifier_pb2.DrafterPool(addresses=addresses)))
        await self.drafters_become(state, *addresses)

    async def drafters_become(self, state: int, *addresses: str, timeout: float = 20.0) -> None:
        """Wait until all of the drafters are in `state`."""
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(
                lambda: all(a in self.drafters and self.drafters[a].state == state for a in addresses)
            )

    def open(self, token_ids: Sequence[int], *, drafter: str = "", seed: int = 0, **fields: Any) -> tuple[int, Result]:
        """Open a sequence; greedy unless `sampling` says otherwise."""
        sequence_id = self._next_id
        self._next_id += 1
        sampling = common_pb2.SamplingParameters(**{"temperature": 0.0, "seed": seed, **fields.pop("sampling", {})})
        opening = verifier_pb2.OpenDecoding(
            sequence_id=sequence_id,
            token_ids=pack_tokens(token_ids),
            num_prompt_tokens=fields.pop("num_prompt_tokens", len(token_ids)),
            sampling=sampling,
            drafter_address=drafter,
            **fields,
        )
        self.results[sequence_id] = result = Result()
        self.send(verifier_pb2.DecodeRequest(opens=[opening]))
        return sequence_id, result

    async def decode(self, token_ids: Sequence[int], **fields: Any) -> Result:
        """Open a sequence and wait for its end."""
        _, result = self.open(token_ids, **fields)
        async with asyncio.timeout(60):
            await result.done.wait()
        if self.error is not None:
            raise self.error
        return result


@asynccontextmanager
async def decode_client(address: str) -> AsyncIterator[DecodeClient]:
    """A client on a stream of its own."""
    async with grpc.aio.insecure_channel(address) as channel:
        client = DecodeClient(channel)
        reader = asyncio.create_task(client.run())
        try:
            yield client
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
