"""Whatever a drafter sends, the output stays right, and only the sequence concerned loses its drafter."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from drafter_service.sequence import DraftSequence
from outrider.protocol.wire import pack_tokens, unpack_tokens
from outrider.v1 import drafter_pb2, verifier_pb2
from tests.services.conftest import Pair
from tests.services.fake_drafter import Wire, answers, fake_drafter, frame
from tests.services.harness import (
    DecodeClient,
    decode_client,
    eventually,
    replay,
    running_verifier,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.reference import greedy, prompts

VICTIM, BYSTANDER = prompts(5)[2], prompts(5)[4]
NUM_TOKENS = 40

Proposal = drafter_pb2.Proposal
Change = Callable[[Proposal], list[Wire]]


def changed(**fields: object) -> Change:
    """The proposal with some fields replaced."""

    def change(proposal: Proposal) -> list[Wire]:
        bad = Proposal()
        bad.CopyFrom(proposal)
        for name, value in fields.items():
            setattr(bad, name, value)
        return [frame(bad)]

    return change


def refused(reason: int) -> Change:
    def change(proposal: Proposal) -> list[Wire]:
        none = drafter_pb2.NoProposal(
            sequence_id=proposal.sequence_id,
            reason=reason,  # type: ignore[arg-type]  # it need not be one of the enum
            position=proposal.position,
        )
        return [drafter_pb2.DraftResponse(no_proposals=[none])]

    return change


def with_q(ids: list[int], weights: list[int]) -> Change:
    """One draft token and this q for it."""

    def change(proposal: Proposal) -> list[Wire]:
        fields = {"token_ids": proposal.token_ids[:4], "candidate_ids": pack_tokens(ids)}
        return changed(**fields, candidate_weights=b"".join(w.to_bytes(2, "little") for w in weights))(proposal)

    return change


LOST = ["DRAFTER_LOST"]
# One of each kind, from the wire to the answer: test_proposals, test_speculation and test_drafting have the others.
CASES: dict[str, tuple[Change, list[str]]] = {
    "token ids beyond the vocabulary": (changed(token_ids=pack_tokens([64, 2**32 - 1])), LOST),
    "a million draft tokens": (changed(token_ids=pack_tokens([1] * 1_000_000)), LOST),
    "an epoch from the future": (lambda p: changed(epoch=p.epoch + 1)(p), LOST),
    "a position behind a gap": (lambda p: changed(position=p.position + 7)(p), LOST),
    "a q that does not sum": (with_q([1, 2], [1, 2]), LOST),
    "the same proposal twice in a frame": (lambda p: [frame(p, p)], LOST),
    "proposals without end": (lambda p: [frame(p), *(frame(ahead(p, i)) for i in range(1, 90))], LOST),
    "MAX_LENGTH": (refused(drafter_pb2.NO_PROPOSAL_REASON_MAX_LENGTH), ["DRAFTER_MAX_LENGTH"]),
    "OVERLOADED": (refused(drafter_pb2.NO_PROPOSAL_REASON_OVERLOADED), ["DRAFTER_OVERLOADED"]),
    "INTERNAL": (refused(drafter_pb2.NO_PROPOSAL_REASON_INTERNAL), LOST),
    "a reason that nobody knows": (refused(77), LOST),
    # These cost draft tokens, and the drafter stays.
    "NO_MATCH": (refused(drafter_pb2.NO_PROPOSAL_REASON_NO_MATCH), []),
    "other tokens": (changed(token_ids=pack_tokens([1, 2, 3, 4])), []),
    "other tokens as candidates": (with_q([70, 71, 0], [0, 0, 0]), []),
    "a sequence that nobody opened": (lambda p: [*changed(sequence_id=2**64 - 1)(p), frame(p)], []),
    "a refusal for a sequence that nobody opened": (
        lambda p: [*(refused(5)(Proposal(sequence_id=p.sequence_id + 1000))), frame(p)],
        [],
    ),
    "an old epoch": (lambda p: [*(changed(epoch=p.epoch - 1)(p) if p.epoch else []), frame(p)], []),
    "empty frames": (lambda p: [*[frame()] * 100, frame(p)], []),
}


def ahead(proposal: Proposal, count: int) -> Proposal:
    """The same draft tokens again, so many times further on."""
    length = len(unpack_tokens(proposal.token_ids))
    return Proposal(
        sequence_id=proposal.sequence_id,
        epoch=proposal.epoch,
        position=proposal.position + count * length,
        token_ids=proposal.token_ids,
    )


def remember(wires: list[Wire], proposal: Proposal, sequence: DraftSequence) -> None:
    """Let the drafter compare verdicts with what was sent, as far as that makes sense."""
    for wire in wires:
        assert isinstance(wire, drafter_pb2.DraftResponse)
        for sent in wire.proposals:
            key = (sent.sequence_id, sent.epoch, sent.position)
            if key == (proposal.sequence_id, proposal.epoch, proposal.position) and len(sent.token_ids) % 4 == 0:
                sequence.proposing.propose(unpack_tokens(sent.token_ids))
        if any(none.sequence_id == sequence.sequence_id for none in wire.no_proposals):
            sequence.proposing.propose([])


async def check_the_bystander(client: DecodeClient, address: str, pair: Pair) -> None:
    result = await client.decode(BYSTANDER, drafter=address, max_tokens=NUM_TOKENS)
    assert result.token_ids == greedy(pair[0], BYSTANDER, NUM_TOKENS)
    assert result.reasons == []
    assert result.num_accepted > 20


async def test_one_sequences_proposals_are_nobody_elses_business(pair: Pair) -> None:
    """Catches messages that the verifier believes, or that cost more than the sequence that they name its drafter."""
    target, _ = pair
    script = replay(*([*prompt, *greedy(target, prompt, 60)] for prompt in (VICTIM, BYSTANDER)))
    change: Change = CASES["NO_MATCH"][0]

    def hook(proposal: Proposal, sequence: DraftSequence) -> list[Wire]:
        if sequence.token_ids[: len(VICTIM)] != VICTIM or sequence.length <= len(VICTIM) + 12:
            return [frame(proposal)]  # the first proposals are honest
        wires = change(proposal)
        remember(wires, proposal, sequence)
        return wires

    async with (
        fake_drafter(script, hook) as drafter,
        running_verifier(verifier_settings(target, draft_timeout_seconds=2)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        for name, (case, reasons) in CASES.items():
            change = case
            _, result = client.open(VICTIM, drafter=drafter.address, max_tokens=NUM_TOKENS)
            await check_the_bystander(client, drafter.address, pair)
            await eventually(result.done.is_set)
            assert result.token_ids == greedy(target, VICTIM, NUM_TOKENS), name
            assert result.reasons == reasons, name
            assert result.num_accepted > 5, name
        assert drafter.num_streams == 1
        assert await verifier_is_empty(client)
        await eventually(lambda: len(drafter.closed) >= len(drafter.opened) - 1)


async def test_a_drafter_speaks_for_its_own_sequences_only(pair: Pair) -> None:
    """Catches a drafter that can end, or replace, the speculation of another drafter's sequences."""
    target, _ = pair
    script = replay([*BYSTANDER, *greedy(target, BYSTANDER, 60)])

    def meddle(proposal: Proposal, sequence: DraftSequence) -> list[Wire]:
        ids = range(1, 30)
        false = [frame(Proposal(sequence_id=i, position=i, epoch=9, token_ids=b"????")) for i in ids]
        none = [
            drafter_pb2.NoProposal(sequence_id=i, reason=drafter_pb2.NO_PROPOSAL_REASON_BAD_MESSAGE)
            for i in ids
            if i != proposal.sequence_id
        ]
        return [*false, drafter_pb2.DraftResponse(no_proposals=none)]

    async with (
        fake_drafter(script) as honest,
        fake_drafter(replay([*VICTIM, *greedy(target, VICTIM, 60)]), meddle) as meddler,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(honest.address, meddler.address)
        _, result = client.open(BYSTANDER, drafter=honest.address, max_tokens=NUM_TOKENS)
        for _ in range(3):
            victim = await client.decode(VICTIM, drafter=meddler.address, max_tokens=5)
            assert victim.reasons == ["DRAFTER_LOST"]
        await eventually(result.done.is_set)
        assert result.reasons == []
        assert result.token_ids == greedy(target, BYSTANDER, NUM_TOKENS)


@pytest.mark.parametrize("wire", [b"\xff\xff\xff\xff", b"\x0a\x05abc"], ids=["no fields", "cut off"])
async def test_bytes_that_are_no_message_end_the_connection(pair: Pair, wire: bytes) -> None:
    """Catches the engine's thread, and with it the verifier, dying of a frame that gRPC could not parse."""
    target, _ = pair
    script = replay([*VICTIM, *greedy(target, VICTIM, 60)])
    async with (
        fake_drafter(script) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        drafter.hook = answers(wire)
        result = await client.decode(VICTIM, drafter=drafter.address, max_tokens=NUM_TOKENS)
        assert result.token_ids == greedy(target, VICTIM, NUM_TOKENS)
        assert result.reasons == ["DRAFTER_LOST"]
        drafter.hook = None
        await eventually(lambda: drafter.num_streams == 2)
        await client.drafters_become(verifier_pb2.DRAFTER_STATE_READY, drafter.address)
        result = await client.decode(VICTIM, drafter=drafter.address, max_tokens=NUM_TOKENS)
        assert result.reasons == []


async def test_a_handshake_that_is_no_message(pair: Pair) -> None:
    """Catches a link that is never dialled again after an answer that did not parse."""
    target, _ = pair
    async with (
        fake_drafter(replay([*VICTIM, *greedy(target, VICTIM, 60)]), info=b"\xff\xff") as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address, state=verifier_pb2.DRAFTER_STATE_CONNECTING)
        await eventually(lambda: "no message" in client.drafters[drafter.address].detail)
        drafter.info = None
        await client.drafters_become(verifier_pb2.DRAFTER_STATE_READY, drafter.address)
        result = await client.decode(VICTIM, drafter=drafter.address, max_tokens=10)
        assert result.reasons == []


async def test_random_frames(pair: Pair) -> None:
    """Catches what nobody thought of: frames of random fields, of which many are nearly right."""
    target, _ = pair
    chance = random.Random(3)
    script = replay(*([*prompt, *greedy(target, prompt, 60)] for prompt in (VICTIM, BYSTANDER)))

    def noise(proposal: Proposal, sequence: DraftSequence) -> list[Wire]:
        def one() -> Proposal:
            ids = [chance.choice([0, 1, 63, 64, 2**32 - 1]) for _ in range(chance.randint(0, 5))]
            m = chance.randint(0, 3) * len(ids)
            return Proposal(
                sequence_id=proposal.sequence_id + chance.choice([0, 0, 0, 1, -1]),
                epoch=max(0, sequence.proposing.epoch + chance.choice([0, 0, 0, 1, -1])),
                position=max(0, sequence.length + chance.choice([0, 0, 0, 1, -1, -9])),
                token_ids=chance.choice([proposal.token_ids, pack_tokens(ids), chance.randbytes(4)]),
                candidate_ids=pack_tokens([chance.randint(0, 66) for _ in range(m)]),
                candidate_weights=chance.choice([b"", b"\0\0" * m, b"\xff\xff\1\0" * (m // 2), chance.randbytes(m)]),
            )

        none = [
            drafter_pb2.NoProposal(
                sequence_id=proposal.sequence_id,
                reason=chance.choice([1, 1, 3, 7]),  # type: ignore[arg-type]  # nobody knows 7
            )
            for _ in range(chance.choice([0, 0, 0, 1]))
        ]
        noisy = drafter_pb2.DraftResponse(proposals=[one() for _ in range(chance.randint(0, 3))], no_proposals=none)
        return [noisy, frame(proposal)] if chance.random() < 0.3 else [frame(proposal)]

    async with (
        fake_drafter(script, noise) as drafter,
        running_verifier(verifier_settings(target, draft_timeout_seconds=2)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        num_accepted = 0
        for _ in range(60):
            prompt = chance.choice([VICTIM, BYSTANDER])
            result = await client.decode(prompt, drafter=drafter.address, max_tokens=20)
            assert result.token_ids == greedy(target, prompt, 20)
            num_accepted += result.num_accepted
        assert num_accepted > 100
        assert await verifier_is_empty(client)
