"""The drafter's face to verifiers, spoken to directly: handshake, what it answers, what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from kernels.random import RANDOM_SCHEME
from outrider.protocol.expansions import ROOT, unpack_expansions
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.verdicts import Verdict, pack_verdicts
from outrider.protocol.wire import PROTOCOL_VERSION, pack_tokens
from outrider.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc
from tests.services.conftest import Pair
from tests.services.harness import (
    drafter_is_empty,
    drafter_settings,
    eventually,
    running_drafter,
    scripted_drafter,
)
from tests.services.reference import greedy, prompts

PROMPT = prompts(3)[2]
Reason = drafter_pb2.RefusalReason
LIMITS = DraftLimits(max_draft_tokens=4, max_candidates=64, num_children=4, takes_turns=True)
# What a drafter that answers with chains agrees to.
AGREED = replace(LIMITS, num_children=1)
REJECTION = common_pb2.VERIFICATION_REJECTION


def target_identity(**fields: Any) -> common_pb2.ModelIdentity:
    defaults: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "random_scheme": RANDOM_SCHEME,
        "vocabulary_size": 64,
    }
    return common_pb2.ModelIdentity(**(defaults | fields))


@dataclass
class Chain:
    """What answers a verdict in turns: a new root, and first children behind it."""

    sequence_id: int
    num_committed: int
    first_id: int
    token_ids: list[int]
    q: list[dict[int, int]]  # of each token, weights by candidate; those without weight are left out
    num_candidates: int


def read_chains(frame: drafter_pb2.DraftResponse, limits: DraftLimits = LIMITS) -> list[Chain]:
    """The chains in a frame, which keeps the rules."""
    found = []
    for message in frame.expansions:
        expansions, errors = unpack_expansions(message, vocabulary_size=64, limits=limits)
        assert errors == {}
        starts = expansions.ends - expansions.num_expansions
        for index, (start, end) in enumerate(zip(starts.tolist(), expansions.ends.tolist(), strict=True)):
            first_id = int(expansions.first_ids[index])
            assert expansions.parents[start:end].tolist() == [ROOT, *range(first_id, first_id + end - start - 1)]
            rows = zip(
                expansions.candidate_ids[start:end].tolist(),
                expansions.candidate_weights[start:end].tolist(),
                strict=True,
            )
            found.append(
                Chain(
                    int(expansions.sequence_ids[index]),
                    int(expansions.num_committed[index]),
                    first_id,
                    expansions.child_ids[start:end, 0].tolist(),
                    [{token: weight for token, weight in zip(*row, strict=True) if weight} for row in rows],
                    expansions.candidate_ids.shape[1],
                )
            )
    return found


class VerifierEnd:
    """A Draft stream in the hands of a test."""

    def __init__(self, stub: drafter_pb2_grpc.DrafterServiceAsyncStub) -> None:
        self._call = stub.Draft(None)
        self.limits = LIMITS

    async def send(self, *verdicts: Verdict, **fields: Any) -> None:
        if verdicts:
            fields["verdicts"] = pack_verdicts(verdicts)
        await self._call.write(drafter_pb2.DraftRequest(**fields))

    async def frame(self) -> drafter_pb2.DraftResponse:
        async with asyncio.timeout(10):
            frame = await self._call.read()
        assert isinstance(frame, drafter_pb2.DraftResponse), frame
        return frame

    async def chain(self) -> Chain:
        """The next chain; frames that are only a sign of life are passed over."""
        while True:
            frame = await self.frame()
            assert not frame.refusals, frame
            if frame.expansions:
                (chain,) = read_chains(frame, self.limits)
                return chain

    async def refusal(self) -> drafter_pb2.Refusal:
        while True:
            frame = await self.frame()
            if frame.refusals:
                (refusal,) = frame.refusals
                return refusal

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def verifier_end(
    address: str,
    identity: common_pb2.ModelIdentity | None = None,
    *,
    limits: DraftLimits = LIMITS,
    agreed: DraftLimits | None = None,
) -> AsyncIterator[VerifierEnd]:
    """A stream that the drafter has accepted, with limits that it has `agreed` to."""
    async with grpc.aio.insecure_channel(address) as channel:
        end = VerifierEnd(drafter_pb2_grpc.DrafterServiceStub(channel))
        await end.send(identity=identity or target_identity(), limits=limits.to_message())
        hello = await end.frame()
        assert hello == drafter_pb2.DraftResponse(limits=hello.limits)
        assert agreed is None or hello.limits == agreed.to_message()
        end.limits = limits.with_answer(hello.limits)
        yield end
        end.cancel()


def opening(sequence_id: int = 1, tokens: list[int] = PROMPT, **fields: Any) -> drafter_pb2.OpenSequence:
    defaults: dict[str, Any] = {
        "token_ids": pack_tokens(tokens),
        "num_prompt_tokens": len(tokens),
        "sampling": common_pb2.SamplingParameters(temperature=0.0, seed=1),
        "verification": common_pb2.VERIFICATION_GREEDY,
        "max_draft_tokens": 4,
    }
    return drafter_pb2.OpenSequence(sequence_id=sequence_id, **(defaults | fields))


def first_verdict(token_id: int = 5, sequence_id: int = 1, prompt: list[int] = PROMPT) -> Verdict:
    return Verdict(sequence_id, len(prompt) + 1, [token_id])


async def test_a_conversation(pair: Pair) -> None:
    """Catches a draft model that goes on behind a prefix that was not committed, whatever its cache holds."""
    _, draft = pair
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        committed, next_id = list(PROMPT), 0
        tokens: list[int] = []
        await verifier.send(opens=[opening()])
        # How many of the draft tokens are accepted, and what follows: a bonus token, a recovered one, or nothing, as if
        # the step had tested no more.
        for number_right, extra in ((0, 5), (2, 5), (0, 9), (4, 33), (4, 34), (1, 60), (2, None), (3, 2), (1, None)):
            new = [*tokens[:number_right], *([] if extra is None else [extra])]
            if extra is not None and number_right < len(tokens):
                assert extra != tokens[number_right]
            committed += new
            await verifier.send(Verdict(1, len(committed), new))
            chain = await verifier.chain()
            assert (chain.sequence_id, chain.num_committed, chain.first_id) == (1, len(committed), next_id)
            assert chain.token_ids == greedy(draft, committed, 4)
            assert chain.num_candidates == 0
            tokens, next_id = chain.token_ids, next_id + 4
        await verifier.send(closes=[drafter_pb2.CloseSequence(sequence_id=1)])
        await eventually(lambda: drafter_is_empty(drafter.address))


async def test_the_distribution_that_was_sampled_from_travels_with_the_tokens(pair: Pair) -> None:
    _, draft = pair
    sampling = common_pb2.SamplingParameters(temperature=1.0, seed=3)
    async with (
        running_drafter(drafter_settings(model=draft, num_candidates=9)) as drafter,
        verifier_end(drafter.address) as verifier,
    ):
        await verifier.send(first_verdict(), opens=[opening(sampling=sampling, verification=REJECTION)])
        chain = await verifier.chain()
        assert chain.num_candidates == 9
        assert [sum(row.values()) for row in chain.q] == [1 << 16] * 4
        assert all(token in row for token, row in zip(chain.token_ids, chain.q, strict=True))
        await verifier.send(first_verdict(sequence_id=2), opens=[opening(2, sampling=sampling)])
        assert (await verifier.chain()).num_candidates == 0, "nobody would look at them"


@pytest.mark.parametrize("most", [1, 3, 8, 9, 20])
async def test_a_verifier_that_takes_fewer_candidates_gets_a_q_of_fewer(pair: Pair, most: int) -> None:
    """Catches a q that is cut when the token is drawn already, which would bias what the target makes of it.

    It is the very q, and are the very tokens, of a drafter that keeps no more by itself.
    """
    _, draft = pair
    sampling = common_pb2.SamplingParameters(temperature=1.5, seed=3)
    chains = []
    for num_candidates, max_candidates in ((9, most), (min(9, most), 64)):
        settings = drafter_settings(model=draft, num_candidates=num_candidates)
        agreed = replace(AGREED, max_candidates=min(9, most))
        offer = replace(LIMITS, max_candidates=max_candidates)
        async with (
            running_drafter(settings) as drafter,
            verifier_end(drafter.address, limits=offer, agreed=agreed) as verifier,
        ):
            await verifier.send(first_verdict(), opens=[opening(sampling=sampling, verification=REJECTION)])
            chains.append(await verifier.chain())
    assert chains[0] == chains[1]
    assert chains[0].num_candidates == min(9, most)
    # Of a single candidate, each token is certain: all weights are zero.
    assert [sum(row.values()) for row in chains[0].q] == [0 if most == 1 else 1 << 16] * 4
    assert all(most == 1 or token in row for token, row in zip(chains[0].token_ids, chains[0].q, strict=True))


async def test_verifiers_of_different_limits_share_a_drafter(pair: Pair) -> None:
    """Catches limits of one stream that are taken for another's, whose sequences are drafted in the same round."""
    _, draft = pair
    sampling = common_pb2.SamplingParameters(temperature=1.0, seed=3)
    wide, narrow = replace(LIMITS, max_candidates=9), replace(AGREED, max_draft_tokens=2, max_candidates=3)
    async with (
        running_drafter(drafter_settings(model=draft, num_candidates=9)) as drafter,
        verifier_end(drafter.address, limits=wide, agreed=replace(AGREED, max_candidates=9)) as one,
        verifier_end(drafter.address, limits=narrow, agreed=narrow) as other,
    ):
        fields: dict[str, Any] = {"sampling": sampling, "verification": REJECTION}
        await one.send(first_verdict(), opens=[opening(**fields)])
        await other.send(first_verdict(), opens=[opening(**fields, max_draft_tokens=2)])
        for end, limits in ((one, wide), (other, narrow)):
            chain = await end.chain()
            assert len(chain.token_ids) == limits.max_draft_tokens
            assert chain.num_candidates == limits.max_candidates
        await other.send(opens=[opening(2, max_draft_tokens=3)])
        refusal = await other.refusal()
        assert (refusal.sequence_id, refusal.detail) == (2, "open.max_draft_tokens: must be from 1 to 2")


async def test_a_drafter_without_a_model_sends_no_candidates() -> None:
    async with (
        scripted_drafter(lambda tokens, count: [7] * count) as drafter,
        verifier_end(
            drafter.address,
            limits=replace(LIMITS, max_draft_tokens=3),
            agreed=replace(AGREED, max_draft_tokens=3, max_candidates=0),
        ) as verifier,
    ):
        await verifier.send(first_verdict(), opens=[opening(max_draft_tokens=3, verification=REJECTION)])
        chain = await verifier.chain()
        assert (chain.token_ids, chain.num_candidates) == ([7, 7, 7], 0)


async def test_a_drafter_that_may_run_ahead_waits_for_no_verdict() -> None:
    """Catches a prompt whose continuation is not drafted until it is known."""
    ahead = replace(LIMITS, takes_turns=False)
    async with (
        scripted_drafter(lambda tokens, count: [len(tokens)] * count) as drafter,
        verifier_end(drafter.address, limits=ahead) as verifier,
    ):
        assert not verifier.limits.takes_turns
        await verifier.send(opens=[opening()])
        assert (await verifier.chain()).num_committed == len(PROMPT)
        await verifier.send(first_verdict())
        chain = await verifier.chain()
        assert (chain.num_committed, chain.token_ids) == (len(PROMPT) + 1, [len(PROMPT) + 1] * 4)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("token_ids", {"token_ids": b""}),
    ("token_ids", {"token_ids": b"\1\0\0\0\1"}),
    ("token_ids", {"token_ids": pack_tokens([64])}),
    ("num_prompt_tokens", {"num_prompt_tokens": 0}),
    ("num_prompt_tokens", {"num_prompt_tokens": 99}),
    ("max_draft_tokens", {"max_draft_tokens": 0}),
    ("max_draft_tokens", {"max_draft_tokens": 33}),
    ("verification", {"verification": common_pb2.VERIFICATION_UNSPECIFIED}),
    ("verification", {"verification": 77}),
    ("sampling.temperature", {"sampling": common_pb2.SamplingParameters(temperature=float("nan"))}),
    ("sampling.top_p", {"sampling": common_pb2.SamplingParameters(top_p=7)}),
    ("sampling.logit_bias", {"sampling": common_pb2.SamplingParameters(logit_bias={1: 101})}),
]


async def test_a_bad_message_ends_one_sequence_and_names_the_field(pair: Pair) -> None:
    _, draft = pair
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        await verifier.send(first_verdict(sequence_id=1000), opens=[opening(1000)])
        good = await verifier.chain()
        for number, (field, fields) in enumerate(BAD):
            await verifier.send(opens=[opening(number, **fields)])
            refusal = await verifier.refusal()
            assert (refusal.sequence_id, refusal.reason) == (number, Reason.REFUSAL_REASON_BAD_MESSAGE)
            assert refusal.detail.startswith(f"open.{field}: "), refusal
        length = len(PROMPT)
        for number, (tokens, num_committed, field) in enumerate(
            [
                ([], length, "num_tokens"),
                ([64], length + 1, "token_ids"),
                ([1], length + 2, "num_committed"),
                ([1], length, "num_committed"),
                ([1, 2], length + 1, "num_committed"),
                ([1], 2**64 - 1, "num_committed"),
            ]
        ):
            await verifier.send(opens=[opening(100 + number)])
            await verifier.send(Verdict(100 + number, num_committed, tokens))
            refusal = await verifier.refusal()
            assert (refusal.sequence_id, refusal.reason) == (100 + number, Reason.REFUSAL_REASON_BAD_MESSAGE)
            assert refusal.detail.startswith(f"verdicts.{field}: "), refusal
        await verifier.send(first_verdict(sequence_id=200), opens=[opening(200)])
        await verifier.chain()
        await verifier.send(opens=[opening(200)])
        refusal = await verifier.refusal()
        assert (refusal.reason, refusal.detail) == (
            Reason.REFUSAL_REASON_BAD_MESSAGE,
            "open.sequence_id: is open already",
        )
        await verifier.send(Verdict(200, length + 2, [1]))
        assert (await verifier.refusal()).reason == Reason.REFUSAL_REASON_UNKNOWN_SEQUENCE
        await verifier.send(closes=[drafter_pb2.CloseSequence(sequence_id=i) for i in (200, 4711)])
        # The first sequence has not noticed.
        await verifier.send(Verdict(1000, length + 6, [*good.token_ids, 0]))
        assert (await verifier.chain()).num_committed == length + 6


async def test_arrays_that_do_not_fit_each_other_end_their_stream_only(pair: Pair) -> None:
    """Nobody can tell whose the tokens are; it is said before anything of the frame is taken in."""
    _, draft = pair
    bad = pack_verdicts([first_verdict()])
    bad.token_ids += b"\0"
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        await verifier.send(opens=[opening()])
        async with verifier_end(drafter.address) as other:
            await other.send(opens=[opening()])
            await other.send(verdicts=bad)
            with pytest.raises(grpc.aio.AioRpcError, match=r"verdicts\.token_ids") as caught:
                await other.refusal()
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await verifier.send(first_verdict())
        assert (await verifier.chain()).token_ids == greedy(draft, [*PROMPT, 5], 4)
        verifier.cancel()
        await eventually(lambda: drafter_is_empty(drafter.address))


async def test_the_first_frame_must_fit(pair: Pair) -> None:
    _, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft, target_revision="this one")) as drafter,
        grpc.aio.insecure_channel(drafter.address) as channel,
    ):
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        right = {"identity": target_identity(revision="this one")}
        for fields, code, problem in (
            (right, grpc.StatusCode.INVALID_ARGUMENT, "limits.max_draft_tokens"),
            (
                right | {"limits": DraftLimits(4, 0).to_message()},
                grpc.StatusCode.INVALID_ARGUMENT,
                "limits.max_candidates",
            ),
            (
                right | {"limits": DraftLimits(4, 4, 1, max_expansions=63).to_message()},
                grpc.StatusCode.INVALID_ARGUMENT,
                "limits.max_expansions",
            ),
            (
                right | {"limits": LIMITS.to_message(), "verdicts": drafter_pb2.Verdicts(num_tokens=b"\1")},
                grpc.StatusCode.INVALID_ARGUMENT,
                "verdicts.num_tokens",
            ),
            ({}, grpc.StatusCode.INVALID_ARGUMENT, "identity"),
            ({"identity": target_identity(revision="x")}, grpc.StatusCode.FAILED_PRECONDITION, "revision"),
            (
                {"identity": target_identity(revision="this one", vocabulary_size=65)},
                grpc.StatusCode.FAILED_PRECONDITION,
                "vocabulary_size",
            ),
        ):
            end = VerifierEnd(stub)
            await end.send(**fields)
            with pytest.raises(grpc.aio.AioRpcError, match=problem) as caught:
                await end.frame()
            assert caught.value.code() == code
        async with verifier_end(drafter.address, target_identity(revision="this one")) as verifier:
            await verifier.send(first_verdict(), opens=[opening()])
            await verifier.chain()


async def test_a_frame_that_does_not_parse_ends_its_stream_only(pair: Pair) -> None:
    _, draft = pair
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        await verifier.send(first_verdict(), opens=[opening()])
        async with grpc.aio.insecure_channel(drafter.address) as channel:
            first = drafter_pb2.DraftRequest(
                identity=target_identity(), limits=LIMITS.to_message(), opens=[opening()]
            ).SerializeToString()
            call = channel.stream_stream("/outrider.v1.DrafterService/Draft", None, None)(iter([first, b"\xff\xff"]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            request = drafter_pb2.DrafterServiceGetInfoRequest()

            async def num_sequences_is_one() -> bool:
                return (await stub.GetInfo(request)).num_sequences == 1

            await eventually(num_sequences_is_one)
        await verifier.chain()
        verifier.cancel()
        await eventually(lambda: drafter_is_empty(drafter.address))


async def test_sequences_of_two_verifiers_may_have_the_same_id(pair: Pair) -> None:
    _, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        verifier_end(drafter.address) as one,
        verifier_end(drafter.address) as other,
    ):
        await one.send(Verdict(1, 3, [3]), opens=[opening(1, [1, 2])])
        await other.send(Verdict(1, 4, [6, 7]), opens=[opening(1, [4, 5])])
        assert (await one.chain()).token_ids == greedy(draft, [1, 2, 3], 4)
        assert (await other.chain()).token_ids == greedy(draft, [4, 5, 6, 7], 4)


async def test_the_end_of_the_drafters_context(pair: Pair) -> None:
    """Catches draft tokens at positions that the model does not have."""
    _, draft = pair
    tokens = prompts(15, step=18)[14]
    assert len(tokens) == 255
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        await verifier.send(Verdict(1, 255, tokens[254:]), opens=[opening(1, tokens[:254])])
        assert len((await verifier.chain()).token_ids) == 1, "one draft token has room"
        await verifier.send(Verdict(1, 256, [1]))
        refusal = await verifier.refusal()
        assert refusal.reason == Reason.REFUSAL_REASON_MAX_LENGTH
        await verifier.send(opens=[opening(2, [*tokens, 1])])
        refusal = await verifier.refusal()
        assert (refusal.sequence_id, refusal.reason) == (2, Reason.REFUSAL_REASON_MAX_LENGTH)
        await eventually(lambda: drafter_is_empty(drafter.address))


async def test_no_match_is_not_final() -> None:
    async with (
        scripted_drafter(lambda tokens, count: [7] if len(tokens) % 2 else []) as drafter,
        verifier_end(drafter.address) as verifier,
    ):
        await verifier.send(Verdict(1, 2, [2]), opens=[opening(1, [1])])
        refusal = await verifier.refusal()
        assert (refusal.reason, refusal.num_committed) == (Reason.REFUSAL_REASON_NO_MATCH, 2)
        await verifier.send(Verdict(1, 3, [3]))
        assert (await verifier.chain()).num_committed == 3


async def test_verdicts_that_are_faster_than_the_prompt_are_answered_by_one_chain(pair: Pair) -> None:
    """Catches a frame for each of them, and an answer behind less than is committed."""
    _, draft = pair
    right = greedy(draft, PROMPT, 3)
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        for sequence_id, tokens in ((1, right), (2, [right[0] + 1, 7, 8])):
            length = len(PROMPT)
            await verifier.send(Verdict(sequence_id, length + 2, tokens[:2]), opens=[opening(sequence_id)])
            chain = await verifier.chain()
            assert (chain.sequence_id, chain.num_committed) == (sequence_id, length + 2)
            await verifier.send(Verdict(sequence_id, length + 3, tokens[2:]))
            chain = await verifier.chain()
            assert (chain.num_committed, chain.token_ids) == (length + 3, greedy(draft, [*PROMPT, *tokens], 4))
        await verifier.send(closes=[drafter_pb2.CloseSequence(sequence_id=i) for i in (1, 2)])
        await eventually(lambda: drafter_is_empty(drafter.address))
