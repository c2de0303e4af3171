"""Verifier and drafter in this process, behind real gRPC, and a bare Decode client for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from drafter_service.drafter import Drafter
from drafter_service.factory import make_drafter
from drafter_service.scripted_drafter import Script, ScriptedDrafter
from drafter_service.service import DrafterService
from drafter_service.settings import DrafterSettings
from engine.model_runner import ModelRunner
from outrider.protocol.wire import pack_tokens, unpack_tokens
from outrider.service.serving import Registration, Server
from outrider.service.telemetry import Telemetry
from outrider.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc, generation_pb2, verifier_pb2, verifier_pb2_grpc
from tests.service_device import SERVICE_DEVICE
from verifier_service.executor import TargetExecutor
from verifier_service.metrics import VerifierMetrics
from verifier_service.service import VerifierService
from verifier_service.settings import VerifierSettings
from verifier_service.target import make_target


@asynccontextmanager
async def running_drafter(
    settings: DrafterSettings,
    telemetry: Telemetry | None = None,
    drafter: Drafter | None = None,
    *,
    step_spans: int = 32,
) -> AsyncIterator[Server]:
    """A drafter on a free port, or the port that the settings name."""
    service = DrafterService(
        drafter or make_drafter(settings),
        max_sequences=settings.max_sequences,
        target_revision=settings.target_revision,
        telemetry=telemetry or Telemetry(),
        step_spans=step_spans,
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
    settings: VerifierSettings,
    telemetry: Telemetry | None = None,
    metrics: VerifierMetrics | None = None,
    *,
    busy_poll_seconds: float = 0.0,
) -> AsyncIterator[tuple[Server, VerifierService]]:
    """A verifier on a free port."""
    service = VerifierService(
        settings, make_target(settings), telemetry or Telemetry(), metrics, busy_poll_seconds=busy_poll_seconds
    )
    registration = Registration(
        "outrider.v1.VerifierService", lambda s: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(service, s)
    )
    server = Server(settings, service, [registration], metrics=metrics)
    await server.start()
    try:
        yield server, service
    finally:
        await server.stop()


def drafter_settings(**fields: Any) -> DrafterSettings:
    """Settings for tests: free port, no long drain, CPU unless told otherwise."""
    return DrafterSettings(
        **{
            "listen": "127.0.0.1:0",
            "device": SERVICE_DEVICE,
            "dtype": "float32",
            "num_blocks": 2048,
            "drain_seconds": 0.2,
            **fields,
        }
    )


def verifier_settings(model: Path, **fields: Any) -> VerifierSettings:
    """Settings for tests: free port, no long drain, CPU unless told otherwise, a patient wait for drafts."""
    defaults = {
        "listen": "127.0.0.1:0",
        "device": SERVICE_DEVICE,
        "dtype": "float32",
        "num_blocks": 2048,
        "drain_seconds": 0.2,
        "draft_timeout_seconds": 30.0,
    }
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
    verification: int = common_pb2.VERIFICATION_UNSPECIFIED
    fallbacks: list[tuple[int, int]] = field(default_factory=list)
    ended: verifier_pb2.Ended | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finish(self) -> str:
        """Name of the finish reason, empty for a sequence that failed or goes on."""
        if self.ended is None or not self.ended.HasField("finish_reason"):
            return ""
        return generation_pb2.FinishReason.Name(self.ended.finish_reason).removeprefix("FINISH_REASON_")

    @property
    def reasons(self) -> list[str]:
        """Names of the fallback reasons, in order."""
        return [common_pb2.FallbackReason.Name(reason).removeprefix("FALLBACK_REASON_") for reason, _ in self.fallbacks]


class DecodeClient:
    """A gateway reduced to its Decode stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        # None ends the stream of requests.
        self._outbox: asyncio.Queue[verifier_pb2.DecodeRequest | None] = asyncio.Queue()
        self.results: dict[int, Result] = {}
        self.drafters: dict[str, verifier_pb2.DrafterStatus] = {}
        self._changed = asyncio.Condition()
        self._next_id = 1
        self.error: BaseException | None = None
        self.reuses_ids = False

    async def _requests(self) -> AsyncIterator[verifier_pb2.DecodeRequest]:
        while (frame := await self._outbox.get()) is not None:
            yield frame

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
        result = self.results.setdefault(update.sequence_id, Result())
        assert result.ended is None or self.reuses_ids, "an update after the end"
        result.token_ids += unpack_tokens(update.token_ids)
        result.origins += list(update.origins)
        result.logprobs += update.logprobs
        result.num_drafted += update.num_draft_tokens
        result.num_accepted += update.num_accepted_tokens
        result.num_steps += bool(update.token_ids)
        assert (update.verification != 0) == update.HasField("prefill"), "it comes with the first tokens alone"
        result.verification = update.verification or result.verification
        result.fallbacks += [(fallback.reason, fallback.position) for fallback in update.fallbacks]
        if update.HasField("ended"):
            result.ended = update.ended
            result.done.set()

    def send(self, frame: verifier_pb2.DecodeRequest) -> None:
        """Send any frame."""
        self._outbox.put_nowait(frame)

    def closing(self, sequence_id: int) -> verifier_pb2.DecodeRequest:
        """The frame that closes a sequence."""
        return verifier_pb2.DecodeRequest(closes=[sequence_id])

    def finish(self) -> None:
        """Send nothing more."""
        self._outbox.put_nowait(None)

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

    @property
    def last_id(self) -> int:
        """Of the sequence opened last."""
        return self._next_id - 1

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
async def scripted_drafter(script: Script, **fields: Any) -> AsyncIterator[Server]:
    """A drafter that proposes what a callable says."""
    settings = drafter_settings(kind="scripted", script="a callable", **fields)
    async with running_drafter(settings, drafter=ScriptedDrafter(script)) as server:
        yield server


def replay(*sequences: Sequence[int], offset: int = 0, vocab_size: int = 64) -> Script:
    """A script that continues the first of the sequences that begins with what is committed; wrong by `offset`."""

    def script(token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
        length = len(token_ids)
        for sequence in sequences:
            if list(sequence[:length]) == list(token_ids):
                return [(token + offset) % vocab_size for token in sequence[length : length + max_draft_tokens]]
        return ()

    return script


def runner_of(service: VerifierService) -> ModelRunner:
    """The target model's."""
    executor = service._target.executor
    assert isinstance(executor, TargetExecutor)
    return executor._runner


def fail_once(
    monkeypatch: pytest.MonkeyPatch, runner: ModelRunner, *, at_call: int, times: int = 1, method: str = "execute"
) -> None:
    """Let the forward pass number `at_call` from now on raise, and the `times` - 1 that follow.

    Passes over draft trees have no `execute`; all passes have `forward`.
    """
    execute = getattr(runner, method)
    calls = itertools.count(1)

    def failing(*arguments: Any) -> torch.Tensor:
        if at_call <= next(calls) < at_call + times:
            raise RuntimeError("planted")
        result: torch.Tensor = execute(*arguments)
        return result

    monkeypatch.setattr(runner, method, failing)


async def eventually(condition: Callable[[], Awaitable[bool] | bool], timeout: float = 30.0) -> None:
    """Wait until the condition holds. Raises TimeoutError when it does not come to that."""
    async with asyncio.timeout(timeout):
        while True:
            result = condition()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.01)


async def verifier_is_empty(client: DecodeClient) -> bool:
    """Whether the verifier holds no sequence and no KV block."""
    info = await client.stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest())
    load = info.load
    return load.num_running == load.num_waiting == 0 and load.num_free_kv_blocks == load.num_kv_blocks


async def drafter_is_empty(address: str) -> bool:
    """Whether the drafter holds no sequence and no KV block."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        info = await stub.GetInfo(drafter_pb2.DrafterServiceGetInfoRequest())
    return info.num_sequences == 0 and info.num_free_kv_blocks == info.num_kv_blocks


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
