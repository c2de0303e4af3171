"""The drafter's face to verifiers, spoken to directly: handshake, what it answers, what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from kernels.random import RANDOM_SCHEME
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.wire import PROTOCOL_VERSION, pack_tokens, unpack_candidates, unpack_tokens
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
Reason = drafter_pb2.NoProposalReason
LIMITS = DraftLimits(max_draft_tokens=4, max_candidates=64)


def target_identity(**fields: Any) -> common_pb2.ModelIdentity:
    defaults: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "random_scheme": RANDOM_SCHEME,
        "vocabulary_size": 64,
    }
    return common_pb2.ModelIdentity(**(defaults | fields))


class VerifierEnd:
    """A Draft stream in the hands of a test."""

    def __init__(self, stub: drafter_pb2_grpc.DrafterServiceAsyncStub) -> None:
        self._call = stub.Draft(None)

    async def send(self, **fields: Any) -> None:
        await self._call.write(drafter_pb2.DraftRequest(**fields))

    async def frame(self) -> drafter_pb2.DraftResponse:
        async with asyncio.timeout(10):
            frame = await self._call.read()
        assert isinstance(frame, drafter_pb2.DraftResponse), frame
        return frame

    async def proposal(self) -> drafter_pb2.Proposal:
        """The next proposal; frames that are only a sign of life are passed over."""
        while True:
            frame = await self.frame()
            assert not frame.no_proposals, frame
            if frame.proposals:
                (proposal,) = frame.proposals
                return proposal

    async def refusal(self) -> drafter_pb2.NoProposal:
        while True:
            frame = await self.frame()
            if frame.no_proposals:
                (refusal,) = frame.no_proposals
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
        yield end
        end.cancel()


def opening(sequence_id: int = 1, tokens: list[int] = PROMPT, **fields: Any) -> drafter_pb2.OpenSequence:
    defaults: dict[str, Any] = {
        "token_ids": pack_tokens(tokens),
        "num_prompt_tokens": len(tokens),
        "sampling": common_pb2.SamplingParameters(temperature=0.0, seed=1),
        "verification": common_pb2.VERIFICATION_REJECTION,
        "max_draft_tokens": 4,
    }
    return drafter_pb2.OpenSequence(sequence_id=sequence_id, **(defaults | fields))


def verdict(tokens: list[int], num_committed: int, epoch: int = 0, sequence_id: int = 1) -> drafter_pb2.Verdict:
    return drafter_pb2.Verdict(
        sequence_id=sequence_id, epoch=epoch, num_committed=num_committed, token_ids=pack_tokens(tokens)
    )


async def test_a_conversation(pair: Pair) -> None:
    """Catches a draft model that goes on behind a prefix that was not committed, whatever its cache holds."""
    _, draft = pair
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        committed, epoch = list(PROMPT), 0
        await verifier.send(opens=[opening()])
        for number_right, extra in ((2, 5), (0, 9), (4, 33), (4, 34), (1, 60), (3, 2)):
            proposal = await verifier.proposal()
            tokens = unpack_tokens(proposal.token_ids)
            assert (proposal.sequence_id, proposal.epoch, proposal.position) == (1, epoch, len(committed))
            assert tokens == greedy(draft, committed, 4)
            assert proposal.candidate_ids == proposal.candidate_weights == b""
            new = [*tokens[:number_right], extra]
            if number_right < 4:
                assert extra != tokens[number_right]
                epoch += 1
            committed += new
            await verifier.send(verdicts=[verdict(new, len(committed), epoch)])
        # A verdict that leaves a part of the proposal good is not answered.
        tokens = unpack_tokens((await verifier.proposal()).token_ids)
        await verifier.send(verdicts=[verdict(tokens[:2], len(committed) + 2, epoch)])
        await verifier.send(verdicts=[verdict(tokens[2:], len(committed) + 4, epoch)])
        assert (await verifier.proposal()).position == len(committed) + 4
        await verifier.send(closes=[drafter_pb2.CloseSequence(sequence_id=1)])
        await eventually(lambda: drafter_is_empty(drafter.address))


async def test_the_distribution_that_was_sampled_from_travels_with_the_tokens(pair: Pair) -> None:
    _, draft = pair
    sampling = common_pb2.SamplingParameters(temperature=1.0, seed=3)
    async with (
        running_drafter(drafter_settings(model=draft, num_candidates=9)) as drafter,
        verifier_end(drafter.address) as verifier,
    ):
        await verifier.send(opens=[opening(sampling=sampling)])
        proposal = await verifier.proposal()
        tokens = np.array(unpack_tokens(proposal.token_ids))
        ids, weights = unpack_candidates(proposal.candidate_ids, proposal.candidate_weights, 4)
        assert ids.shape == weights.shape == (4, 9)
        assert weights.sum(axis=1).tolist() == [1 << 16] * 4
        assert ((ids == tokens[:, None]) & (weights > 0)).any(axis=1).all()
        await verifier.send(opens=[opening(2, sampling=sampling, verification=common_pb2.VERIFICATION_GREEDY)])
        assert (await verifier.proposal()).candidate_ids == b"", "nobody would look at them"


async def test_a_coupled_sequence_is_drafted_by_ids_alone(pair: Pair) -> None:
    """Catches candidates that nobody reads, and a rule that is taken for another without a word."""
    _, draft = pair
    sampling = common_pb2.SamplingParameters(temperature=1.0, seed=3)
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        found = []
        for number, rule in enumerate((common_pb2.VERIFICATION_COUPLED, common_pb2.VERIFICATION_COUPLED), 1):
            await verifier.send(opens=[opening(number, sampling=sampling, verification=rule)])
            proposal = await verifier.proposal()
            assert proposal.candidate_ids == proposal.candidate_weights == b""
            found.append(unpack_tokens(proposal.token_ids))
        # Not the most likely ones, and the same each time.
        assert found[0] == found[1] != greedy(draft, PROMPT, 4)
        for number, rule in enumerate((common_pb2.VERIFICATION_UNSPECIFIED, 77), 3):
            await verifier.send(opens=[opening(number, verification=rule)])
            refusal = (await verifier.frame()).no_proposals[0]
            assert (refusal.sequence_id, refusal.reason) == (number, drafter_pb2.NO_PROPOSAL_REASON_BAD_MESSAGE)
            assert "open.verification" in refusal.detail


@pytest.mark.parametrize("most", [1, 3, 8, 9, 20])
async def test_a_verifier_that_takes_fewer_candidates_gets_a_q_of_fewer(pair: Pair, most: int) -> None:
    """Catches a q that is cut when the token is drawn already, which would bias what the target makes of it.

    It is the very q, and are the very tokens, of a drafter that keeps no more by itself.
    """
    _, draft = pair
    sampling = common_pb2.SamplingParameters(temperature=1.5, seed=3)
    proposals = []
    for num_candidates, max_candidates in ((9, most), (min(9, most), 64)):
        settings = drafter_settings(model=draft, num_candidates=num_candidates)
        agreed = DraftLimits(4, min(9, most))
        async with (
            running_drafter(settings) as drafter,
            verifier_end(drafter.address, limits=DraftLimits(4, max_candidates), agreed=agreed) as verifier,
        ):
            await verifier.send(opens=[opening(sampling=sampling)])
            proposals.append(await verifier.proposal())
    assert proposals[0] == proposals[1]
    tokens = np.array(unpack_tokens(proposals[0].token_ids))
    ids, weights = unpack_candidates(proposals[0].candidate_ids, proposals[0].candidate_weights, 4)
    assert ids.shape == weights.shape == (4, min(9, most))
    # Of a single candidate, each token is certain: all weights are zero.
    assert weights.sum(axis=1).tolist() == [0 if most == 1 else 1 << 16] * 4
    assert ((ids == tokens[:, None]) & ((weights > 0) | (most == 1))).any(axis=1).all()


async def test_verifiers_of_different_limits_share_a_drafter(pair: Pair) -> None:
    """Catches limits of one stream that are taken for another's, whose sequences are drafted in the same round."""
    _, draft = pair
    sampling = common_pb2.SamplingParameters(temperature=1.0, seed=3)
    wide, narrow = DraftLimits(4, 64), DraftLimits(2, 3)
    async with (
        running_drafter(drafter_settings(model=draft, num_candidates=9)) as drafter,
        verifier_end(drafter.address, limits=wide, agreed=DraftLimits(4, 9)) as one,
        verifier_end(drafter.address, limits=narrow, agreed=narrow) as other,
    ):
        await one.send(opens=[opening(sampling=sampling)])
        await other.send(opens=[opening(sampling=sampling, max_draft_tokens=2)])
        for end, limits in ((one, DraftLimits(4, 9)), (other, narrow)):
            proposal = await end.proposal()
            assert len(unpack_tokens(proposal.token_ids)) == limits.max_draft_tokens
            num_tokens = limits.max_draft_tokens
            ids, _ = unpack_candidates(proposal.candidate_ids, proposal.candidate_weights, num_tokens)
            assert ids.shape[1] == limits.max_candidates
        await other.send(opens=[opening(2, max_draft_tokens=3)])
        refusal = await other.refusal()
        assert (refusal.sequence_id, refusal.detail) == (2, "open.max_draft_tokens: must be from 1 to 2")


async def test_a_drafter_without_a_model_sends_no_candidates() -> None:
    async with (
        scripted_drafter(lambda tokens, count: [7] * count) as drafter,
        verifier_end(drafter.address, limits=DraftLimits(3, 64), agreed=DraftLimits(3, 0)) as verifier,
    ):
        await verifier.send(opens=[opening(max_draft_tokens=3)])
        assert unpack_tokens((await verifier.proposal()).token_ids) == [7, 7, 7]


BAD: list[tuple[str, dict[str, Any]]] = [
    ("token_ids", {"token_ids": b""}),
    ("token_ids", {"token_ids": b"\1\0\0\0\1"}),
    ("token_ids", {"token_ids": pack_tokens([64])}),
    ("num_prompt_tokens", {"num_prompt_tokens": 0}),
    ("num_prompt_tokens", {"num_prompt_tokens": 99}),
    ("max_draft_tokens", {"max_draft_tokens": 0}),
    ("max_draft_tokens", {"max_draft_tokens": 33}),
    ("sampling.temperature", {"sampling": common_pb2.SamplingParameters(temperature=float("nan"))}),
    ("sampling.top_p", {"sampling": common_pb2.SamplingParameters(top_p=7)}),
    ("sampling.logit_bias", {"sampling": common_pb2.SamplingParameters(logit_bias={1: 101})}),
]


async def test_a_bad_message_ends_one_sequence_and_names_the_field(pair: Pair) -> None:
    _, draft = pair
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        await verifier.send(opens=[opening(1000)])
        good = await verifier.proposal()
        for number, (field, fields) in enumerate(BAD):
            await verifier.send(opens=[opening(number, **fields)])
            refusal = await verifier.refusal()
            assert (refusal.sequence_id, refusal.reason) == (number, Reason.NO_PROPOSAL_REASON_BAD_MESSAGE)
            assert refusal.detail.startswith(f"open.{field}: "), refusal
        for number, (tokens, num_committed, epoch, field) in enumerate(
            [([], 17, 0, "token_ids"), ([64], 18, 0, "token_ids"), ([1], 19, 0, "num_committed"), ([1], 18, 9, "epoch")]
        ):
            await verifier.send(opens=[opening(100 + number)])
            await verifier.proposal()
            await verifier.send(verdicts=[verdict(tokens, num_committed, epoch, 100 + number)])
            refusal = await verifier.refusal()
            assert (refusal.sequence_id, refusal.reason) == (100 + number, Reason.NO_PROPOSAL_REASON_BAD_MESSAGE)
            assert refusal.detail.startswith(f"verdict.{field}: "), refusal
        await verifier.send(opens=[opening(200)])
        await verifier.proposal()
        await verifier.send(opens=[opening(200)])
        refusal = await verifier.refusal()
        assert (refusal.reason, refusal.detail) == (
            Reason.NO_PROPOSAL_REASON_BAD_MESSAGE,
            "open.sequence_id: is open already",
        )
        await verifier.send(verdicts=[verdict([1], 18, 0, 200)])
        assert (await verifier.refusal()).reason == Reason.NO_PROPOSAL_REASON_UNKNOWN_SEQUENCE
        await verifier.send(closes=[drafter_pb2.CloseSequence(sequence_id=i) for i in (200, 4711)])
        # The first sequence has not noticed.
        tokens = unpack_tokens(good.token_ids)
        await verifier.send(verdicts=[verdict([*tokens, 0], len(PROMPT) + 5, 0, 1000)])
        assert (await verifier.proposal()).position == len(PROMPT) + 5
    async with grpc.aio.insecure_channel(drafter.address):
        pass


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
            await verifier.send(opens=[opening()])
            await verifier.proposal()


async def test_a_frame_that_does_not_parse_ends_its_stream_only(pair: Pair) -> None:
    _, draft = pair
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        await verifier.send(opens=[opening()])
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
        await verifier.proposal()
        verifier.cancel()
        await eventually(lambda: drafter_is_empty(drafter.address))


async def test_sequences_of_two_verifiers_may_have_the_same_id(pair: Pair) -> None:
    _, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        verifier_end(drafter.address) as one,
        verifier_end(drafter.address) as other,
    ):
        await one.send(opens=[opening(1, [1, 2, 3])])
        await other.send(opens=[opening(1, [4, 5, 6, 7])])
        assert unpack_tokens((await one.proposal()).token_ids) == greedy(draft, [1, 2, 3], 4)
        assert unpack_tokens((await other.proposal()).token_ids) == greedy(draft, [4, 5, 6, 7], 4)


async def test_the_end_of_the_drafters_context(pair: Pair) -> None:
    """Catches draft tokens at positions that the model does not have."""
    _, draft = pair
    tokens = prompts(15, step=18)[14]
    assert len(tokens) == 255
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        await verifier.send(opens=[opening(1, tokens)])
        proposal = await verifier.proposal()
        assert len(proposal.token_ids) == 4, "one draft token has room"
        await verifier.send(verdicts=[verdict([1], 256, 0)])
        await verifier.send(verdicts=[verdict([1], 257, 0)])
        refusal = await verifier.refusal()
        assert refusal.reason == Reason.NO_PROPOSAL_REASON_MAX_LENGTH
        await eventually(lambda: drafter_is_empty(drafter.address))


async def test_no_match_is_not_final() -> None:
    async with (
        scripted_drafter(lambda tokens, count: [7] if len(tokens) % 2 else []) as drafter,
        verifier_end(drafter.address) as verifier,
    ):
        await verifier.send(opens=[opening(1, [1, 2])])
        refusal = await verifier.refusal()
        assert (refusal.reason, refusal.position) == (Reason.NO_PROPOSAL_REASON_NO_MATCH, 2)
        await verifier.send(verdicts=[verdict([3], 3)])
        assert (await verifier.proposal()).position == 3


async def test_a_verdict_that_is_faster_than_the_first_proposal(pair: Pair) -> None:
    """Catches draft tokens that depend on who was faster, and with them what a seed gives.

    Whether the first verdict comes before or after the answer to the opening, the same tokens are drafted.
    """
    _, draft = pair
    right = greedy(draft, PROMPT, 1)[0]
    async with running_drafter(drafter_settings(model=draft)) as drafter, verifier_end(drafter.address) as verifier:
        for sequence_id, first in ((1, right), (2, right + 1)):
            await verifier.send(
                opens=[opening(sequence_id)], verdicts=[verdict([first], len(PROMPT) + 1, 0, sequence_id)]
            )
            proposal = await verifier.proposal()
            assert (proposal.position, proposal.epoch) == (len(PROMPT), 0)
            assert unpack_tokens(proposal.token_ids)[0] == right
            if first != right:
                proposal = await verifier.proposal()
                assert (proposal.position, proposal.epoch) == (len(PROMPT) + 1, 1)
        # What was held back is held against the rules as well.
        bad = [verdict([1], 99, 0, 3), verdict([1], 100, 0, 3)]
        await verifier.send(opens=[opening(3)], verdicts=bad)
        assert (await verifier.proposal()).sequence_id == 3
        assert (await verifier.refusal()).reason == Reason.NO_PROPOSAL_REASON_BAD_MESSAGE
        await verifier.send(closes=[drafter_pb2.CloseSequence(sequence_id=i) for i in (1, 2)])
        await eventually(lambda: drafter_is_empty(drafter.address))
