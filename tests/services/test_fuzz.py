"""Whatever arrives on a stream: a status that says so, no crash, and other sequences as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from kernels.random import RANDOM_SCHEME
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.verdicts import Verdict, pack_verdicts
from outrider.protocol.wire import PROTOCOL_VERSION, pack_tokens
from outrider.v1 import common_pb2, drafter_pb2, verifier_pb2
from tests.fuzz import Fuzzer
from tests.services.conftest import Pair
from tests.services.harness import (
    DecodeClient,
    decode_client,
    drafter_is_empty,
    drafter_settings,
    eventually,
    running_drafter,
    running_verifier,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.reference import greedy, prompts
from verifier_service.draft_tree import SequenceExpansions
from verifier_service.frames import read_expansions

DECODE = "/outrider.v1.VerifierService/Decode"
DRAFT = "/outrider.v1.DrafterService/Draft"
VERIFIER_INFO = "/outrider.v1.VerifierService/GetInfo"
DRAFTER_INFO = "/outrider.v1.DrafterService/GetInfo"
MAX_MESSAGE_BYTES = 1 << 16
NUM_TOKENS = 24
BYSTANDERS = prompts(4)[1:]
VOCABULARY = 64

UNKNOWN_SEQUENCE = drafter_pb2.REFUSAL_REASON_UNKNOWN_SEQUENCE
BAD_MESSAGE = drafter_pb2.REFUSAL_REASON_BAD_MESSAGE

# In turns: one answer for each verdict.
LIMITS = DraftLimits(max_draft_tokens=4, max_candidates=64, takes_turns=True)

Open = verifier_pb2.OpenDecoding
Frame = verifier_pb2.DecodeRequest


@dataclass
class Running:
    """Both services, and a client of the verifier whose sequences must not notice anything."""

    pair: Pair
    verifier: str
    drafter: str
    client: DecodeClient
    num_undisturbed: int = 0
    codes: Counter[str] = field(default_factory=Counter)

    @asynccontextmanager
    async def bystanders(self) -> AsyncIterator[None]:
        """Sequences on a stream of their own, one after the other for as long as the context lasts, two at least."""
        is_over = False

        async def run() -> None:
            target, _ = self.pair
            while not is_over or self.num_undisturbed < 2:
                prompt = BYSTANDERS[self.num_undisturbed % len(BYSTANDERS)]
                result = await self.client.decode(prompt, drafter=self.drafter, max_tokens=NUM_TOKENS)
                assert result.token_ids == greedy(target, prompt, NUM_TOKENS)
                assert result.reasons == []
                assert result.num_drafted > 0
                self.num_undisturbed += 1

        running = asyncio.create_task(run())
        try:
            yield
            is_over = True
            async with asyncio.timeout(60):
                await running
        finally:
            running.cancel()

    async def stream(self, method: str, wires: Iterable[bytes], *, linger: float = 0.0) -> str:
        """The status of a stream on which these bytes were sent, empty where it got lost."""
        address = self.drafter if method == DRAFT else self.verifier
        async with grpc.aio.insecure_channel(address, options=LOCAL) as channel:
            call: Any = channel.stream_stream(method, None, None)(None)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for wire in wires:
                    await call.write(wire)
                await asyncio.sleep(linger)
                await call.done_writing()
            async with asyncio.timeout(20):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
                        pass
                code: grpc.StatusCode = await call.code()
                # Not the service's: a client that writes on a stream which has just ended makes up a status of its own.
                is_own = await call.details() == "Internal error from Core"
        name = "" if is_own else code.name
        self.codes[name] += 1
        return name

    async def ask(self, method: str, request: bytes) -> str:
        """The status of a single request."""
        address = self.drafter if method == DRAFTER_INFO else self.verifier
        async with grpc.aio.insecure_channel(address, options=LOCAL) as channel:
            call: Any = channel.unary_unary(method, None, None)(request, timeout=20)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call
            code: grpc.StatusCode = await call.code()
        self.codes[code.name] += 1
        return code.name

    async def is_empty(self) -> None:
        """Return once neither service holds anything."""
        await eventually(lambda: verifier_is_empty(self.client))
        await eventually(lambda: drafter_is_empty(self.drafter))


# A connection for each case: one that breaks the transport must not be another's.
LOCAL = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]


@pytest.fixture
async def running(pair: Pair, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Running]:
    """The services; afterwards they are empty, alive, and have logged no error."""
    target, draft = pair
    limits = {"max_message_bytes": MAX_MESSAGE_BYTES}
    async with (
        running_drafter(drafter_settings(model=draft, max_sequences=16, **limits)) as drafter,
        running_verifier(verifier_settings(target, max_running=8, max_waiting=16, **limits)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        running = Running(pair, verifier.address, drafter.address, client)
        yield running
        await running.is_empty()
        result = await client.decode(BYSTANDERS[0], drafter=drafter.address, max_tokens=NUM_TOKENS)
        assert result.token_ids == greedy(target, BYSTANDERS[0], NUM_TOKENS)
        await running.is_empty()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def opening(sequence_id: int, drafter: str = "", **fields: Any) -> Open:
    """A good opening with some fields replaced."""
    sampling = common_pb2.SamplingParameters(temperature=0.7, seed=5, top_k=9, logit_bias={3: 1.5})
    defaults = {
        "token_ids": pack_tokens([1, 2, 3, 4]),
        "num_prompt_tokens": 4,
        "sampling": sampling,
        "max_tokens": 12,
        "drafter_address": drafter,
        "request_id": "fuzz",
    }
    return Open(sequence_id=sequence_id, **{**defaults, **fields})


def hello(**fields: Any) -> drafter_pb2.DraftRequest:
    """A verifier's first frame."""
    defaults = {"protocol_version": PROTOCOL_VERSION, "random_scheme": RANDOM_SCHEME, "vocabulary_size": VOCABULARY}
    return drafter_pb2.DraftRequest(
        identity=common_pb2.ModelIdentity(**{**defaults, **fields}), limits=LIMITS.to_message()
    )


def draft_opening(sequence_id: int, **fields: Any) -> drafter_pb2.OpenSequence:
    defaults = {
        "token_ids": pack_tokens([1, 2, 3, 4]),
        "num_prompt_tokens": 4,
        "sampling": common_pb2.SamplingParameters(temperature=0.7, seed=5),
        "verification": common_pb2.VERIFICATION_REJECTION,
        "max_draft_tokens": 4,
    }
    return drafter_pb2.OpenSequence(sequence_id=sequence_id, **{**defaults, **fields})


async def test_noise_on_decode(running: Running) -> None:
    """Catches frames that crash the verifier, end its engine's thread, leak blocks or disturb other streams."""
    fuzzer = Fuzzer(1)
    good = [
        Frame(opens=[opening(1), opening(2, running.drafter)]),
        Frame(closes=[1, 2], opens=[opening(3, running.drafter, logprobs=3)]),
        Frame(drafters=verifier_pb2.DrafterPool()),
    ]
    async with running.bystanders():
        for number in range(250):
            wires = [good[0].SerializeToString()] if number % 2 else []
            wires += [fuzzer.wire(Frame, good) for _ in range(fuzzer.chance.randint(1, 4))]
            code = await running.stream(DECODE, wires, linger=0.05 if number % 10 == 0 else 0)
            assert code in ("", "OK", "INVALID_ARGUMENT"), (number, code)
    assert running.num_undisturbed >= 2
    assert min(running.codes["OK"], running.codes["INVALID_ARGUMENT"]) > 10


async def test_noise_on_draft(running: Running) -> None:
    """Catches frames that crash the drafter, end its engine's thread, leak blocks or disturb a verifier's stream."""
    fuzzer = Fuzzer(2)
    verdicts = verdict(1, 5, [7])
    good = [
        hello(),
        drafter_pb2.DraftRequest(opens=[draft_opening(1), draft_opening(2)]),
        drafter_pb2.DraftRequest(verdicts=verdicts, closes=[drafter_pb2.CloseSequence(sequence_id=2)]),
    ]
    async with running.bystanders():
        for number in range(250):
            wires = [message.SerializeToString() for message in good[: number % 4]]
            wires += [fuzzer.wire(drafter_pb2.DraftRequest, good) for _ in range(fuzzer.chance.randint(1, 4))]
            code = await running.stream(DRAFT, wires, linger=0.05 if number % 10 == 0 else 0)
            assert code in ("", "OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"), (number, code)
    assert running.num_undisturbed >= 2
    # Most changed bytes are of packed arrays, which then do not fit each other.
    assert running.codes["OK"] > 2
    assert running.codes["INVALID_ARGUMENT"] > 10


async def test_noise_on_single_requests_and_messages_without_end(running: Running) -> None:
    """Catches a GetInfo that fails on bytes, and messages above the limit that get further than gRPC."""
    fuzzer = Fuzzer(3)
    too_long = b"\x12" + fuzzer.chance.randbytes(MAX_MESSAGE_BYTES + 1)
    async with running.bystanders():
        for method in (VERIFIER_INFO, DRAFTER_INFO):
            for _ in range(40):
                assert await running.ask(method, fuzzer.noise()) in ("OK", "INVALID_ARGUMENT")
            assert await running.ask(method, too_long) == "RESOURCE_EXHAUSTED"
        for method in (DECODE, DRAFT):
            assert await running.stream(method, [too_long]) == "RESOURCE_EXHAUSTED"
            assert await running.stream(method, []) == "OK"


# What a gateway may send for a sequence in the wrong moment or with the wrong numbers, and the status that ends it.
BAD_OPENINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"token_ids": b""}, "token_ids"),
    "half a token": ({"token_ids": b"123"}, "token_ids"),
    "an unknown token": ({"token_ids": pack_tokens([1, VOCABULARY])}, "token_ids"),
    "more prompt than tokens": ({"num_prompt_tokens": 2**32 - 1}, "num_prompt_tokens"),
    "no prompt": ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
    "nothing left to generate": ({"token_ids": pack_tokens([1] * 20), "max_tokens": 4}, "token_ids"),
    "a prompt beyond the context": ({"token_ids": pack_tokens([1] * 300), "num_prompt_tokens": 300}, "token_ids"),
    "2**32 - 1 draft tokens": ({"max_draft_tokens": 2**32 - 1}, "max_draft_tokens"),
    "2**32 - 1 log-probabilities": ({"logprobs": 2**32 - 1}, "logprobs"),
    "a verification that nobody knows": ({"verification": 77}, "verification"),
    "a reason that nobody knows": ({"no_drafter_reason": -5}, "no_drafter_reason"),
}


async def test_wrong_order_and_alien_sequences_on_a_gateways_stream(running: Running) -> None:
    """Catches frames that cost other sequences of the same stream anything."""
    target, _ = running.pair
    client = running.client
    client.reuses_ids = True
    prompt = BYSTANDERS[1]
    own_id, own = client.open(prompt, drafter=running.drafter, max_tokens=80)

    async def ended(sequence_id: int, frame: Frame) -> verifier_pb2.Ended:
        client.results.pop(sequence_id, None)
        client.send(frame)
        await eventually(lambda: sequence_id in client.results and client.results[sequence_id].ended is not None)
        end = client.results[sequence_id].ended
        assert end is not None
        return end

    # Closed before it was opened, twice, and never opened at all; then everything in one frame.
    client.send(Frame(closes=[900, 900, 2**64 - 1, 0]))
    client.send(Frame(opens=[opening(901, max_tokens=200)], closes=[901, 901]))
    end = await ended(902, Frame(opens=[opening(902, max_tokens=200), opening(902)]))
    assert end.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "sequence_id" in end.error.message
    for name, (fields, field_name) in BAD_OPENINGS.items():
        end = await ended(903, Frame(opens=[opening(903, running.drafter, **fields)]))
        assert end.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], name
        assert end.error.message.startswith(field_name), name
    end = await ended(2**64 - 1, Frame(opens=[opening(2**64 - 1, running.drafter)]))
    assert end.finish_reason
    end = await ended(0, Frame(opens=[opening(0, "nowhere:1", max_tokens=2**32 - 1)], closes=[903]))
    assert end.finish_reason
    # More than there is room for, most of it closed at once.
    many = [opening(1000 + number, running.drafter, max_tokens=100) for number in range(60)]
    client.send(Frame(opens=many, closes=[one.sequence_id for one in many[1:]]))
    client.send(Frame(closes=[1000]))
    await eventually(lambda: own.ended is not None)
    assert own.token_ids == greedy(target, prompt, 80)
    assert own.reasons == []
    client.send(Frame(closes=[own_id]))


def verdict(sequence_id: int, num_committed: int, token_ids: Sequence[int]) -> drafter_pb2.Verdicts:
    return pack_verdicts([Verdict(sequence_id, num_committed, token_ids)])


# Of a sequence of four tokens that was just opened.
BAD_VERDICTS: dict[str, tuple[int, list[int]]] = {
    "a gap": (9, [1]),
    "what is committed already": (4, [1]),
    "the last position of all": (2**64 - 1, [1]),
    "an unknown token": (5, [VOCABULARY]),
    "nothing": (4, []),
}
BAD_DRAFTS: dict[str, drafter_pb2.DraftRequest] = {
    "a verdict before the opening": drafter_pb2.DraftRequest(verdicts=verdict(7, 5, [1])),
    "no prompt": drafter_pb2.DraftRequest(opens=[draft_opening(7, num_prompt_tokens=0)]),
    "more prompt than tokens": drafter_pb2.DraftRequest(opens=[draft_opening(7, num_prompt_tokens=2**32 - 1)]),
    "no draft tokens": drafter_pb2.DraftRequest(opens=[draft_opening(7, max_draft_tokens=0)]),
    "too many draft tokens": drafter_pb2.DraftRequest(opens=[draft_opening(7, max_draft_tokens=2**32 - 1)]),
    "an unknown token": drafter_pb2.DraftRequest(opens=[draft_opening(7, token_ids=pack_tokens([2**32 - 1]))]),
    "no rule": drafter_pb2.DraftRequest(opens=[draft_opening(7, verification=0)]),
    "opened twice": drafter_pb2.DraftRequest(opens=[draft_opening(7), draft_opening(7)]),
    **{
        f"opened, then {name}": drafter_pb2.DraftRequest(opens=[draft_opening(7)], verdicts=verdict(7, *fields))
        for name, fields in BAD_VERDICTS.items()
    },
}


async def test_wrong_order_on_a_verifiers_stream(running: Running) -> None:
    """Catches a message for one sequence that ends the stream, or another sequence's drafts."""
    async with running.bystanders(), grpc.aio.insecure_channel(running.drafter, options=LOCAL) as channel:
        call: Any = channel.stream_stream(
            DRAFT, drafter_pb2.DraftRequest.SerializeToString, drafter_pb2.DraftResponse.FromString
        )(None)
        await call.write(hello())
        assert not (await call.read()).expansions

        async def next_answer(sequence_id: int) -> Any:
            """The next expansions or refusal for the sequence."""
            async with asyncio.timeout(10):
                while True:
                    frame = await call.read()
                    for refusal in frame.refusals:
                        if refusal.sequence_id == sequence_id:
                            return refusal
                    found = read_expansions(frame.expansions, VOCABULARY, LIMITS)
                    for answer in found:
                        if answer.sequence_id == sequence_id:
                            return answer

        await call.write(drafter_pb2.DraftRequest(opens=[draft_opening(1)]))
        num_committed = 4
        token = 1
        for name, frame in BAD_DRAFTS.items():
            num_committed += 1
            # Forgotten twice over, and never known.
            closes = [drafter_pb2.CloseSequence(sequence_id=one) for one in (7, 7, 2**64 - 1)]
            verdicts = verdict(1, num_committed, [token])
            await call.write(drafter_pb2.DraftRequest(closes=closes, verdicts=verdicts))
            drafts = await next_answer(1)
            assert isinstance(drafts, SequenceExpansions), name
            assert drafts.num_committed == num_committed, name
            # Another token than was drafted next.
            token = (drafts.rows.first_children[drafts.start] + 1) % VOCABULARY
            await call.write(frame)
            answer = await next_answer(7)
            assert isinstance(answer, drafter_pb2.Refusal), name
            assert answer.reason == (UNKNOWN_SEQUENCE if "before" in name else BAD_MESSAGE), name
        call.cancel()


@pytest.mark.parametrize("num_bytes", [1, 3])
async def test_verdicts_that_do_not_fit_end_a_verifiers_stream(running: Running, num_bytes: int) -> None:
    """Catches tokens that are taken for another sequence's."""
    async with running.bystanders():
        bad = verdict(1, 5, [7])
        bad.token_ids = bad.token_ids[num_bytes:]
        frames = [hello(), drafter_pb2.DraftRequest(opens=[draft_opening(1)], verdicts=bad)]
        assert await running.stream(DRAFT, [frame.SerializeToString() for frame in frames]) == "INVALID_ARGUMENT"


async def test_drafters_that_are_no_addresses_or_too_many(running: Running) -> None:
    """Catches dialling whatever a frame says, and as many connections as a frame has room for."""
    bad = ["", "127.0.0.1", "127.0.0.1:99999", ":1", "a b:1", "\0:1", "unix:///x:1", "h" * 300 + ":1"]
    many = [f"10.0.{number // 250}.{number % 250}:1" for number in range(2000)]
    async with running.bystanders():
        for addresses in [*(["127.0.0.1:1", address] for address in bad), many]:
            frame = Frame(drafters=verifier_pb2.DrafterPool(addresses=addresses))
            assert await running.stream(DECODE, [frame.SerializeToString()]) == "INVALID_ARGUMENT", addresses
