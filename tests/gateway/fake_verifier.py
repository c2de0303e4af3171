"""A verifier that a test scripts, and a gateway in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from gateway.discovery import Resolver
from gateway.gateway import Gateway, make_server
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from outrider.protocol.wire import pack_tokens, unpack_tokens
from outrider.service.telemetry import Telemetry
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, verifier_pb2, verifier_pb2_grpc

CONTEXT_LENGTH = 2048
VOCABULARY_SIZE = 1000
READY = verifier_pb2.DRAFTER_STATE_READY
CONNECTING = verifier_pb2.DRAFTER_STATE_CONNECTING
INCOMPATIBLE = verifier_pb2.DRAFTER_STATE_INCOMPATIBLE

Update = verifier_pb2.SequenceUpdate
# Only the stubs know that a call is generic.
GenerateCall: TypeAlias = "grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]"


def update(
    sequence_id: int,
    token_ids: Iterable[int] = (),
    *,
    drafted: int = 0,
    accepted: int = 0,
    finish: generation_pb2.FinishReason | None = None,
    error: verifier_pb2.SequenceError | None = None,
    **more: Any,
) -> verifier_pb2.SequenceUpdate:
    """One sequence's share of a step, its origins filled in."""
    ids = list(token_ids)
    origins = [common_pb2.TOKEN_ORIGIN_PLAIN] * len(ids)
    if drafted and ids:
        last = common_pb2.TOKEN_ORIGIN_BONUS if accepted == drafted else common_pb2.TOKEN_ORIGIN_RECOVERED
        origins = [common_pb2.TOKEN_ORIGIN_ACCEPTED] * accepted + [last] * (len(ids) - accepted)
    ended = None
    if finish is not None:
        ended = verifier_pb2.Ended(finish_reason=finish)
    if error is not None:
        ended = verifier_pb2.Ended(error=error)
    return verifier_pb2.SequenceUpdate(
        sequence_id=sequence_id,
        token_ids=pack_tokens(ids),
        origins=bytes(origins),
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        ended=ended,
        **more,
    )


class FakeVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Records what a gateway sends and sends what a test says, or what `script` makes of each opened sequence."""

    def __init__(self, *, script: Callable[[verifier_pb2.OpenDecoding], Iterable[Update]] | None = None) -> None:
        self.identity = common_pb2.ModelIdentity(
            protocol_version=1, name="fake", revision="r1", vocabulary_size=VOCABULARY_SIZE, max_length=CONTEXT_LENGTH
        )
        self.drafters: list[verifier_pb2.DrafterStatus] = []
        self.max_running = 0
        self.script = script
        self.frames: list[verifier_pb2.DecodeRequest] = []
        self.opened: dict[int, verifier_pb2.OpenDecoding] = {}
        self.closed: list[int] = []
        self.num_streams = 0
        self.is_draining = False
        self.is_mute = False  # whether streams stay without an answer
        self.address = "127.0.0.1:0"
        self._opens: asyncio.Queue[verifier_pb2.OpenDecoding] = asyncio.Queue()
        self._outgoing: asyncio.Queue[verifier_pb2.DecodeResponse | None] | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> FakeVerifier:
        """Serve; again on the same port after a stop."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, self._server)
        host = self.address.rpartition(":")[0]
        self.address = f"{host}:{self._server.add_insecure_port(self.address)}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def GetInfo(self, request: Any, context: Any) -> verifier_pb2.VerifierServiceGetInfoResponse:
        load = verifier_pb2.VerifierLoad(max_running=self.max_running)
        return verifier_pb2.VerifierServiceGetInfoResponse(
            identity=self.identity, load=load, is_draining=self.is_draining
        )

    async def Decode(self, request_iterator: Any, context: Any) -> AsyncIterator[verifier_pb2.DecodeResponse]:
        self.num_streams += 1
        if self.is_mute:
            await asyncio.Event().wait()
        outgoing = self._outgoing = asyncio.Queue()
        outgoing.put_nowait(verifier_pb2.DecodeResponse(drafters=self.drafters, is_draining=self.is_draining))
        reader = asyncio.create_task(self._read(request_iterator))
        # A script that raises ends the stream instead of leaving the test to its timeout.
        reader.add_done_callback(lambda _: outgoing.put_nowait(None))
        try:
            while (frame := await outgoing.get()) is not None:
                yield frame
        finally:
            reader.cancel()

    async def _read(self, frames: Any) -> None:
        async for frame in frames:
            self.frames.append(frame)
            for message in frame.opens:
                self.opened[message.sequence_id] = message
                self._opens.put_nowait(message)
                if self.script is not None:
                    for step in self.script(message):
                        self.send(step)
            self.closed.extend(frame.closes)

    async def next_open(self) -> verifier_pb2.OpenDecoding:
        """The next sequence that a gateway opens."""
        return await asyncio.wait_for(self._opens.get(), 20)

    def send(self, *updates: Update) -> None:
        """One frame."""
        assert self._outgoing is not None
        self._outgoing.put_nowait(verifier_pb2.DecodeResponse(updates=updates))

    def report(self, **states: verifier_pb2.DrafterState) -> None:
        """New states of drafters, `d1=READY` for the address d1:1."""
        self.report_statuses(*statuses(**states))

    def report_statuses(self, *drafters: verifier_pb2.DrafterStatus) -> None:
        """The same with whole statuses."""
        self.drafters = list(drafters)
        self._say(verifier_pb2.DecodeResponse(drafters=self.drafters))

    def drain(self) -> None:
        """Say that no more sequences are taken."""
        self.is_draining = True
        self._say(verifier_pb2.DecodeResponse(is_draining=True))

    def _say(self, frame: verifier_pb2.DecodeResponse) -> None:
        # A gateway may count a link as ready before its stream is here, whose first frame will say it.
        if self._outgoing is not None:
            self._outgoing.put_nowait(frame)

    def break_stream(self) -> None:
        """End the Decode stream while the server lives on."""
        assert self._outgoing is not None
        self._outgoing.put_nowait(None)


def statuses(**states: verifier_pb2.DrafterState) -> list[verifier_pb2.DrafterStatus]:
    """Drafter statuses, `d1=READY` for the address d1:1."""
    return [
        verifier_pb2.DrafterStatus(address=f"{name}:1", state=state, detail="" if state == READY else f"{name} is off")
        for name, state in states.items()
    ]


@dataclass
class RunningGateway:
    """A gateway that serves, and a client's stub to it."""

    gateway: Gateway
    stub: generation_pb2_grpc.GenerationServiceAsyncStub
    channel: grpc.aio.Channel
    stop: Callable[[], Any]
    gateway_address: str

    @property
    def num_sequences(self) -> int:
        """Requests that run or whose answer is still being delivered."""
        return self.gateway._admission.num_open

    @property
    def links(self) -> list[Any]:
        """The links to verifiers."""
        return self.gateway._pool.links

    async def is_idle(self) -> None:
        """Return once nothing is left of any sequence."""
        await eventually(lambda: self.num_sequences == 0)
        assert self.gateway._admission.num_running == 0
        assert all(not link._updates for link in self.links)
        assert not +self.gateway._pool._num_by_drafter


@asynccontextmanager
async def running_gateway(
    *verifiers: FakeVerifier | str,
    tokenizer: Tokenizer | None = None,
    telemetry: Telemetry | None = None,
    metrics: GatewayMetrics | None = None,
    resolver: Resolver | None = None,
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway in front of these verifiers, on a free port, over real channels."""
    addresses = tuple(verifier if isinstance(verifier, str) else verifier.address for verifier in verifiers)
    server = make_server(
        GatewaySettings(verifiers=addresses, listen="127.0.0.1:0", **{"drain_seconds": 5, **settings}),
        tokenizer,
        telemetry or Telemetry(),
        metrics,
        resolver=resolver,
    )
    is_stopped = False

    async def stop() -> None:
        nonlocal is_stopped
        is_stopped = True
        await server.stop()

    try:
        await asyncio.wait_for(server.start(), 10)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            yield RunningGateway(server._component, stub, channel, stop, server.address)  # type: ignore[arg-type]
    finally:
        if not is_stopped:
            await asyncio.wait_for(server.stop(), 10)


@dataclass
class Completion:
    """Everything that one Generate call streamed."""

    started: generation_pb2.Started
    chunks: list[generation_pb2.Chunk]
    finished: generation_pb2.Finished

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for chunk in self.chunks for token in chunk.tokens]


async def complete(running: RunningGateway, **fields: Any) -> Completion:
    """Run one request to its end and check the order of its messages."""
    call = running.stub.Generate(generation_pb2.GenerateRequest(**fields), timeout=10)
    events = [response async for response in call]
    kinds = [response.WhichOneof("event") for response in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) <= {"chunk"}
    return Completion(events[0].started, [event.chunk for event in events[1:-1]], events[-1].finished)


def token_ids(*ids: int) -> generation_pb2.TokenIds:
    """A prompt of token ids."""
    return generation_pb2.TokenIds(ids=ids)


def prompt_of(message: verifier_pb2.OpenDecoding) -> list[int]:
    """The token ids that a sequence was opened with."""
    return unpack_tokens(message.token_ids)


async def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return once the condition holds; fail after that time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def next_of(call: GenerateCall) -> generation_pb2.GenerateResponse:
    """The next response of a call that has not ended."""
    response = await call.read()
    assert isinstance(response, generation_pb2.GenerateResponse)
    return response


async def rest_of(call: GenerateCall) -> list[generation_pb2.GenerateResponse]:
    """What is still to come on a call of which some was read; grpc.aio forbids to go on with `async for`."""
    responses = []
    while isinstance(response := await call.read(), generation_pb2.GenerateResponse):
        responses.append(response)
    return responses
