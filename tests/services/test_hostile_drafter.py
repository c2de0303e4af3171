"""Whatever a drafter sends, the output stays right, and only the sequence concerned loses its drafter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from drafter_service.sequence import DraftSequence
from outrider.v1 import drafter_pb2, verifier_pb2
from tests.services.conftest import Pair
from tests.services.fake_drafter import Wire, answers, chain_of, fake_drafter, frame
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

Honest = drafter_pb2.Expansions
Change = Callable[[Honest, DraftSequence], list[Wire]]


def changed(**fields: bytes) -> Change:
    """The honest answer with some arrays replaced."""

    def change(honest: Honest, sequence: DraftSequence) -> list[Wire]:
        bad = Honest()
        bad.CopyFrom(honest)
        for name, value in fields.items():
            setattr(bad, name, value)
        return [frame(bad)]

    return change


def chained(token_ids: Sequence[int], **fields: Any) -> Change:
    """A chain of these tokens in place of the honest one; `fields` take the place of arrays."""

    def change(honest: Honest, sequence: DraftSequence) -> list[Wire]:
        first_id = int.from_bytes(honest.first_ids, "little")
        arrays = {"num_committed": sequence.length, "first_id": first_id} | fields
        return [frame(chain_of(sequence.sequence_id, token_ids, **arrays))]

    return change


def refused(reason: int, *, other: int = 0) -> Change:
    def change(honest: Honest, sequence: DraftSequence) -> list[Wire]:
        none = drafter_pb2.Refusal(
            sequence_id=sequence.sequence_id + other,
            reason=reason,  # type: ignore[arg-type]  # it need not be one of the enum
            num_committed=sequence.length,
        )
        return [drafter_pb2.DraftResponse(refusals=[none]), *([frame(honest)] if other else [])]

    return change


def with_q(ids: list[int], weights: list[int], *, token: int = 1) -> Change:
    """One draft token and this q for it."""
    arrays = {"candidate_ids": np.array([ids], np.int32), "candidate_weights": np.array([weights], np.uint16)}
    return chained([token], **arrays)


def also(*wires: Wire) -> Change:
    """These before what is honest."""
    return lambda honest, sequence: [*wires, frame(honest)]


def of_nobody(honest: Honest, sequence: DraftSequence) -> list[Wire]:
    other = chain_of(2**64 - 1, [1, 2], num_committed=sequence.length, first_id=0)
    return [frame(other), frame(honest)]


def without_end(honest: Honest, sequence: DraftSequence) -> list[Wire]:
    """A ring's worth of expansions over and over, each a child of the one before."""
    first_id = int.from_bytes(honest.first_ids, "little") + 4
    floods = [
        chain_of(
            sequence.sequence_id,
            [1] * 64,
            num_committed=sequence.length,
            first_id=first_id + 64 * i,
            parents=np.arange(first_id + 64 * i - 1, first_id + 64 * i + 63, dtype=np.int32),
        )
        for i in range(90)
    ]
    return [frame(honest), *map(frame, floods)]


LOST = ["DRAFTER_LOST"]
# One of each kind, from the wire to the answer: test_expansions, test_draft_tree and test_drafting have the others.
CASES: dict[str, tuple[Change, list[str]]] = {
    "token ids beyond the vocabulary": (chained([64, 2**32 - 1]), LOST),
    "more expansions than are kept": (chained([1] * 513), LOST),
    "an id that was used": (chained([1], first_id=0), LOST),
    "a parent that comes later": (chained([1, 2], parents=np.array([-1, 10_000], np.int32)), LOST),
    "tokens that are not committed": (chained([1], num_committed=1 << 40), LOST),
    "a q that does not sum": (with_q([1, 2], [1, 2]), LOST),
    "the same expansions twice in a frame": (lambda honest, _: [frame(honest, honest)], LOST),
    "MAX_LENGTH": (refused(drafter_pb2.REFUSAL_REASON_MAX_LENGTH), ["DRAFTER_MAX_LENGTH"]),
    "OVERLOADED": (refused(drafter_pb2.REFUSAL_REASON_OVERLOADED), ["DRAFTER_OVERLOADED"]),
    "INTERNAL": (refused(drafter_pb2.REFUSAL_REASON_INTERNAL), LOST),
    "a reason that nobody knows": (refused(77), LOST),
    # These cost draft tokens, and the drafter stays; the ids that they took are its own from then on.
    "NO_MATCH": (refused(drafter_pb2.REFUSAL_REASON_NO_MATCH), []),
    "other tokens": (chained([1, 2, 3, 4]), []),
    "other tokens as candidates": (with_q([70, 71, 0], [0, 0, 0]), []),
    "no root": (chained([1, 2], parents=np.array([0, 0], np.int32)), []),
    "a sequence that nobody opened": (of_nobody, []),
    "a refusal for a sequence that nobody opened": (refused(5, other=1000), []),
    "empty frames": (also(*[frame()] * 100), []),
}


async def check_the_bystander(client: DecodeClient, address: str, pair: Pair) -> None:
    result = await client.decode(BYSTANDER, drafter=address, max_tokens=NUM_TOKENS)
    assert result.token_ids == greedy(pair[0], BYSTANDER, NUM_TOKENS)
    assert result.reasons == []
    assert result.num_accepted > 20


async def test_one_sequences_drafts_are_nobody_elses_business(pair: Pair) -> None:
    """Catches messages that the verifier believes, or that cost more than the sequence that they name its drafter."""
    target, _ = pair
    script = replay(*([*prompt, *greedy(target, prompt, 60)] for prompt in (VICTIM, BYSTANDER)))
    change: Change = CASES["NO_MATCH"][0]

    def hook(honest: Honest, sequence: DraftSequence) -> list[Wire]:
        if sequence.token_ids[: len(VICTIM)] != VICTIM or sequence.length <= len(VICTIM) + 12:
            return [frame(honest)]  # the first answers are honest
        return change(honest, sequence)

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


async def test_expansions_without_end(pair: Pair) -> None:
    """Catches a flood that fills the verifier's memory, or that costs more than drafts."""
    target, _ = pair
    script = replay([*VICTIM, *greedy(target, VICTIM, 60)])
    async with (
        fake_drafter(script, without_end) as drafter,
        running_verifier(verifier_settings(target, drafting="ahead", max_expansions=64)) as (verifier, service),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(VICTIM, drafter=drafter.address, max_tokens=NUM_TOKENS)
        assert result.token_ids == greedy(target, VICTIM, NUM_TOKENS)
        assert service._engine._links.trees.num_expansions >= 64 * 90


async def test_arrays_that_do_not_fit_end_the_connection(pair: Pair) -> None:
    """Catches a frame of which nobody can say whose it is, and that is read all the same."""
    target, _ = pair
    script = replay([*VICTIM, *greedy(target, VICTIM, 60)])
    async with (
        fake_drafter(script, changed(ranks=b"")) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(VICTIM, drafter=drafter.address, max_tokens=NUM_TOKENS)
        assert result.token_ids == greedy(target, VICTIM, NUM_TOKENS)
        assert result.reasons == LOST
        await eventually(lambda: drafter.num_streams == 2)


async def test_a_drafter_speaks_for_its_own_sequences_only(pair: Pair) -> None:
    """Catches a drafter that can end, or replace, the speculation of another drafter's sequences."""
    target, _ = pair
    script = replay([*BYSTANDER, *greedy(target, BYSTANDER, 60)])

    def meddle(honest: Honest, sequence: DraftSequence) -> list[Wire]:
        ids = range(1, 30)
        false = [frame(chain_of(i, [63], num_committed=1, first_id=100)) for i in ids]
        bad = [frame(chain_of(i, [99], num_committed=1, first_id=0)) for i in ids]
        reason = drafter_pb2.REFUSAL_REASON_BAD_MESSAGE
        none = [drafter_pb2.Refusal(sequence_id=i, reason=reason) for i in ids if i != sequence.sequence_id]
        return [*false, *bad, drafter_pb2.DraftResponse(refusals=none)]

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


@pytest.mark.parametrize("drafting", ["turns", "ahead"])
async def test_random_frames(pair: Pair, drafting: str) -> None:
    """Catches what nobody thought of: frames of random arrays, of which many are nearly right."""
    target, _ = pair
    chance = random.Random(3)
    script = replay(*([*prompt, *greedy(target, prompt, 60)] for prompt in (VICTIM, BYSTANDER)))

    def one(honest: Honest, sequence: DraftSequence) -> Honest:
        num_nodes, width = chance.randint(1, 5), chance.choice([1, 1, 2])
        m = chance.choice([0, 0, 0, 2])
        first_id = max(int.from_bytes(honest.first_ids, "little") + chance.choice([0, 5, 5, 5, -1]), 0)
        return chain_of(
            sequence.sequence_id + chance.choice([0, 0, 0, 1]),
            [1] * num_nodes,
            num_committed=max(sequence.length + chance.choice([0, 0, 0, 1, -1, -9]), 1),
            first_id=first_id,
            parents=np.array(
                [chance.randint(-1, first_id + i - 1 + (chance.random() < 0.02)) for i in range(num_nodes)]
            ),
            ranks=np.array([int(chance.random() < 0.02) for _ in range(num_nodes)], np.uint8),
            child_ids=np.array(
                [chance.sample([0, 1, 63, *[64] * (chance.random() < 0.02)], width) for _ in range(num_nodes)]
            ),
            probabilities=np.zeros((num_nodes, width), np.uint16),
            candidate_ids=np.array([chance.sample([0, 1, 63, 66], m) for _ in range(num_nodes)]).reshape(num_nodes, m),
            candidate_weights=np.array([chance.choice([[0, 0], [65535, 1]])[:m] for _ in range(num_nodes)], np.uint16),
        )

    def noise(honest: Honest, sequence: DraftSequence) -> list[Wire]:
        none = [
            drafter_pb2.Refusal(
                sequence_id=sequence.sequence_id,
                reason=chance.choice([1, 1, 3, 7]),  # type: ignore[arg-type]  # nobody knows 7
                num_committed=sequence.length,
            )
            for _ in range(chance.choice([0, 0, 0, 1]))
        ]
        noisy = [one(honest, sequence) for _ in range(chance.randint(0, 3))]
        if noisy and chance.random() < 0.02:
            noisy[0].ranks += b"\0"
        wires: list[Wire] = [drafter_pb2.DraftResponse(expansions=noisy, refusals=none)]
        return [frame(honest), *wires] if chance.random() < 0.3 else [frame(honest)]

    settings = verifier_settings(target, draft_timeout_seconds=2, drafting=drafting)
    async with (
        fake_drafter(script, noise) as drafter,
        running_verifier(settings) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        num_accepted = 0
        for _ in range(60):
            await client.use_drafters(drafter.address)
            prompt = chance.choice([VICTIM, BYSTANDER])
            result = await client.decode(prompt, drafter=drafter.address, max_tokens=20)
            assert result.token_ids == greedy(target, prompt, 20)
            num_accepted += result.num_accepted
        assert num_accepted > 100
        assert await verifier_is_empty(client)
