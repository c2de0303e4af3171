"""A link over channels that a test scripts: what it goes through, how it ends, and when it tries again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import grpc
import pytest

from outrider.protocol.errors import FailedPreconditionError
from outrider.service import stream_link
from outrider.service.stream_link import LinkTimings, StreamLink
from outrider.service.wire_bytes import counted

QUICK = LinkTimings(
    handshake_seconds=0.1, refused_backoff_seconds=0.07, first_backoff_seconds=0.01, last_backoff_seconds=0.04
)

POLL_SECONDS = 0.001


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


class FakeCall:
    """A stream whose peer says what is put into `frames`; an exception among them breaks it, `END` ends it."""

    END = object()

    def __init__(self, *frames: Any) -> None:
        self.frames: asyncio.Queue[Any] = asyncio.Queue()
        for frame in frames:
            self.frames.put_nowait(frame)
        self.written: list[Any] = []
        self.write_error: BaseException | None = None
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (frame := await self.frames.get()) is not self.END:
            if isinstance(frame, Exception):
                raise frame
            yield frame

    async def write(self, request: Any) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.written.append(request)

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class FakeChannel:
    """What one dial leads to."""

    call: FakeCall = field(default_factory=FakeCall)
    # Raised in the handshake.
    refusal: Exception | None = None
    is_closed: bool = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self.call.is_cancelled or not self.call.written, "the stream outlives its channel"
        self.is_closed = True


class Link(StreamLink[Any, Any]):
    """Notes what it goes through."""

    def __init__(self, *channels: FakeChannel, timings: LinkTimings = QUICK, proves_itself: bool = True) -> None:
        self.channels = iter(channels)
        self.used: list[FakeChannel] = []
        self.story: list[Any] = []
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.on_take: Callable[[Any], None] = lambda frame: None
        self._proves_itself = proves_itself
        super().__init__("peer", "p:1", timings=timings, max_message_bytes=1000, server_name="name", dial=self._next)

    def _next(self, address: str, options: Any) -> grpc.aio.Channel:
        assert address == "p:1"
        assert ("grpc.default_authority", "name") in options
        assert all(channel.is_closed for channel in self.used)
        # When the test's channels are used up, a peer that never answers.
        self.used.append(next(self.channels, FakeChannel()))
        return cast(grpc.aio.Channel, self.used[-1])

    async def _shake_hands(self, channel: grpc.aio.Channel) -> Any:
        (fake,) = self.used[-1:]
        assert cast(FakeChannel, counted(channel, None, "peer")) is fake
        if fake.refusal is not None:
            raise fake.refusal
        return lambda requests: fake.call

    def _first_request(self) -> Any:
        return "first"

    def _enter(self, hello: Any) -> None:
        self.story.append(("enter", hello))
        if self._proves_itself:
            self._prove_itself()

    async def _next_request(self) -> Any:
        request = await self.outbox.get()
        if isinstance(request, Exception):
            raise request
        return request

    def _take(self, frame: Any) -> None:
        self.story.append(("take", frame))
        self.on_take(frame)

    def _leave(self, detail: str, *, is_refused: bool) -> None:
        self.story.append(("leave", detail, is_refused))

    @property
    def endings(self) -> list[tuple[str, bool]]:
        """(detail, is_refused) of the attempts that are over."""
        return [event[1:] for event in self.story if event[0] == "leave"]


@asynccontextmanager
async def running(link: Link) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(link.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert all(channel.is_closed for channel in link.used)
        assert all(channel.call.is_cancelled for channel in link.used if channel.call.written)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(POLL_SECONDS)


async def test_frames_go_both_ways_until_the_peer_ends_the_stream() -> None:
    call = FakeCall("hello", 1)
    link = Link(FakeChannel(call))
    async with running(link):
        link.outbox.put_nowait("a")
        await eventually(lambda: len(call.written) == 2)
        call.frames.put_nowait(2)
        link.outbox.put_nowait("b")
        await eventually(lambda: len(call.written) == 3 and len(link.story) == 3)
        call.frames.put_nowait(FakeCall.END)
        await eventually(lambda: len(link.used) == 2)
    assert call.written == ["first", "a", "b"]
    assert link.story == [("enter", "hello"), ("take", 1), ("take", 2), ("leave", "the peer ended the stream", False)]
    assert not link.used[1].call.written or link.used[1].call.written == ["first"]


async def test_nothing_but_the_first_request_is_sent_before_the_peer_has_taken_the_stream() -> None:
    call = FakeCall()
    link = Link(FakeChannel(call), timings=LinkTimings(handshake_seconds=5, refused_backoff_seconds=5))
    link.outbox.put_nowait("too early")
    async with running(link):
        await eventually(lambda: call.written == ["first"])
        await asyncio.sleep(0.02)
        assert (call.written, link.story) == (["first"], [])
        call.frames.put_nowait("hello")
        await eventually(lambda: call.written == ["first", "too early"])


@pytest.mark.parametrize(
    ("channel", "detail", "is_refused"),
    [
        (FakeChannel(refusal=FailedPreconditionError("size: 1, not 2")), "size: 1, not 2", True),
        (FakeChannel(refusal=rpc_error(grpc.StatusCode.UNAVAILABLE, "nobody")), "UNAVAILABLE: nobody", False),
        (FakeChannel(refusal=KeyError("a bug")), "internal error: KeyError", False),
        (FakeChannel(), "the peer does not answer on its stream", False),
    ],
)
async def test_an_attempt_that_fails_before_the_stream(channel: FakeChannel, detail: str, is_refused: bool) -> None:
    link = Link(channel)
    async with running(link):
        await eventually(lambda: len(link.used) == 2)
    assert link.story == [("leave", detail, is_refused)]


@pytest.mark.parametrize(
    ("end", "detail", "is_refused"),
    [
        (FakeCall.END, "the peer ended the stream", False),
        (None, "the peer sent bytes that are no message", False),
        (rpc_error(grpc.StatusCode.FAILED_PRECONDITION, "misfit"), "FAILED_PRECONDITION: misfit", True),
        (rpc_error(grpc.StatusCode.UNAVAILABLE, "reset"), "UNAVAILABLE: reset", False),
        (KeyError("a bug"), "internal error: KeyError", False),
    ],
)
@pytest.mark.parametrize("frames", [(), ("hello",), ("hello", 1)])
async def test_how_a_stream_ends(frames: tuple[Any, ...], end: Any, detail: str, is_refused: bool) -> None:
    """Whether its end comes in place of the first frame or later, dialling goes on and the reason is kept."""
    call = FakeCall(*frames, end)
    link = Link(FakeChannel(call), FakeChannel(FakeCall("hello again")))
    async with running(link):
        await eventually(lambda: link.story[-1:] == [("enter", "hello again")])
    assert link.story[len(frames)] == ("leave", detail, is_refused)


async def test_what_goes_wrong_with_a_frame_costs_one_stream() -> None:
    def fail(frame: Any) -> None:
        raise ValueError("what a frame")

    link = Link(FakeChannel(FakeCall("hello", 1)), FakeChannel(FakeCall("hello again")))
    link.on_take = fail
    async with running(link):
        await eventually(lambda: link.story[-1:] == [("enter", "hello again")])
    assert link.endings == [("internal error: ValueError", False)]


class TestWriter:
    """The writer of a broken stream stumbles first, and only the reader knows why."""

    async def test_the_reader_tells_why(self) -> None:
        call = FakeCall("hello")
        link = Link(FakeChannel(call))
        async with running(link):
            await eventually(lambda: bool(link.story))
            call.write_error = asyncio.InvalidStateError("over")
            link.outbox.put_nowait("a")
            await asyncio.sleep(0.02)
            assert link.endings == []
            call.frames.put_nowait(rpc_error(grpc.StatusCode.UNAVAILABLE, "draining"))
            await eventually(lambda: bool(link.endings))
        assert link.endings == [("UNAVAILABLE: draining", False)]

    async def test_a_stream_that_was_refused_at_once(self) -> None:
        """Catches a refusal that is taken for a bug of ours, as the first write fails before it is read."""
        call = FakeCall(rpc_error(grpc.StatusCode.FAILED_PRECONDITION, "misfit"))
        call.write_error = asyncio.InvalidStateError("over")
        link = Link(FakeChannel(call))
        async with running(link):
            await eventually(lambda: bool(link.endings))
        assert link.endings == [("FAILED_PRECONDITION: misfit", True)]

    async def test_its_own_failure_ends_the_stream_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Catches a link that receives for ever and sends nothing any more."""
        monkeypatch.setattr(stream_link, "STATUS_SECONDS", 0.01)
        link = Link(FakeChannel(FakeCall("hello")))
        link.outbox.put_nowait(ValueError("no frame"))
        async with running(link):
            await eventually(lambda: bool(link.endings))
        assert link.endings == [("internal error: ValueError", False)]


class TestGivingUp:
    async def test_ends_the_stream_and_dials_anew(self) -> None:
        call = FakeCall("hello")
        link = Link(FakeChannel(call), FakeChannel(FakeCall("hello again")))
        async with running(link):
            await eventually(lambda: bool(link.story))
            link._give_up("silence")
            link._give_up("said twice")
            await eventually(lambda: link.story[-1:] == [("enter", "hello again")])
        assert call.is_cancelled
        assert link.endings == [("silence", False)]

    async def test_without_a_stream_is_nothing(self) -> None:
        link = Link()
        link._give_up("nothing there")
        async with running(link):
            await eventually(lambda: bool(link.endings))
        assert link.endings[0] == ("the peer does not answer on its stream", False)


@pytest.mark.parametrize("frames", [(), ("hello",)])
async def test_cancelling_closes_everything_and_tells_nobody(frames: tuple[str, ...]) -> None:
    """Whoever cancels knows why; `running` checks that stream and channel are closed."""
    call = FakeCall(*frames)
    link = Link(FakeChannel(call), timings=LinkTimings(handshake_seconds=5, refused_backoff_seconds=5))
    async with running(link):
        await eventually(lambda: bool(call.written) and len(link.story) == len(frames))
    assert link.endings == []
    assert len(link.used) == 1


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The back-offs that links ask for, which then take no time. Jitter always makes them as long as it can."""
    asked: list[float] = []
    really_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds != POLL_SECONDS:
            asked.append(seconds)
        await really_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    return asked


def lost() -> FakeChannel:
    """Nobody answers at the address."""
    return FakeChannel(refusal=rpc_error(grpc.StatusCode.UNAVAILABLE, "nobody"))


class TestBackOff:
    async def test_doubles_up_to_a_bound_and_begins_anew_after_a_peer_that_works(self, pauses: list[float]) -> None:
        link = Link(lost(), lost(), lost(), lost(), FakeChannel(FakeCall("hello", FakeCall.END)), lost())
        async with running(link):
            await eventually(lambda: len(link.used) == 7)
        assert pauses[:6] == [0.01, 0.02, 0.04, 0.04, 0.01, 0.02]

    async def test_goes_on_where_the_peer_has_proved_nothing(self, pauses: list[float]) -> None:
        """Catches a peer that takes each stream only to end it, and is dialled without a pause."""
        link = Link(*(FakeChannel(FakeCall("hello", FakeCall.END)) for _ in range(4)), proves_itself=False)
        async with running(link):
            await eventually(lambda: len(link.used) == 5)
        assert pauses[:4] == [0.01, 0.02, 0.04, 0.04]

    async def test_is_long_for_a_peer_that_does_not_fit(self, pauses: list[float]) -> None:
        link = Link(FakeChannel(refusal=FailedPreconditionError("misfit")), lost())
        async with running(link):
            await eventually(lambda: len(link.used) == 3)
        assert pauses[:2] == [QUICK.refused_backoff_seconds, 0.02]

    async def test_is_spread_by_jitter(self, pauses: list[float]) -> None:
        link = Link(lost(), timings=replace(QUICK, jitter=0.5))
        async with running(link):
            await eventually(lambda: len(link.used) == 2)
        assert pauses[0] == pytest.approx(0.015)
