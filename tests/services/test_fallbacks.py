"""Decoding goes on without a drafter, per sequence, with the reason and the position at which it began."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from drafter_service.drafter import Drafter, Drafts
from drafter_service.factory import make_drafter
from drafter_service.model_drafter import ModelDrafter
from drafter_service.sequence import DraftSequence
from outrider.protocol.fingerprint import model_revision
from outrider.v1 import common_pb2, drafter_pb2, verifier_pb2
from tests.services.conftest import Pair
from tests.services.fake_drafter import fake_drafter, frame, identity
from tests.services.harness import (
    DecodeClient,
    decode_client,
    drafter_is_empty,
    drafter_settings,
    eventually,
    fail_once,
    replay,
    running_drafter,
    running_verifier,
    scripted_drafter,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.reference import greedy, prompts
from tests.tiny_models import save_tiny_llama
from verifier_service import speculation

INCOMPATIBLE = verifier_pb2.DRAFTER_STATE_INCOMPATIBLE
CONNECTING = verifier_pb2.DRAFTER_STATE_CONNECTING
PROMPT = prompts(3)[2]


async def test_the_gateways_own_reason_is_passed_on(pair: Pair) -> None:
    target, _ = pair
    async with running_verifier(verifier_settings(target)) as (verifier, _), decode_client(verifier.address) as client:
        for reason in (common_pb2.FALLBACK_REASON_CLIENT_DISABLED, common_pb2.FALLBACK_REASON_NO_DRAFTER):
            result = await client.decode(PROMPT, max_tokens=5, no_drafter_reason=reason)
            assert result.fallbacks == [(reason, len(PROMPT))]
            assert result.token_ids == greedy(target, PROMPT, 5)


async def test_an_address_that_nobody_dialled_or_nobody_answers(pair: Pair) -> None:
    target, _ = pair
    async with running_verifier(verifier_settings(target)) as (verifier, _), decode_client(verifier.address) as client:
        await client.use_drafters("127.0.0.1:1", state=CONNECTING)
        for address in ("127.0.0.1:1", "127.0.0.1:2", "nonsense"):
            result = await client.decode(PROMPT, drafter=address, max_tokens=5)
            assert result.reasons == ["NO_DRAFTER"]
            assert result.token_ids == greedy(target, PROMPT, 5)
        await client.use_drafters("nonsense.invalid:1", "127.0.0.1:1", "[::1]:1", state=CONNECTING)


def add_tokenizer(path: Path, *tokens: str) -> None:
    Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0])).save(
        str(path / "tokenizer.json")
    )


@pytest.mark.parametrize(
    ("other", "field"), [("vocabulary", "vocabulary_size"), ("tokenizer", "tokenizer_fingerprint"), ("revision", "rev")]
)
async def test_a_drafter_for_another_target(pair: Pair, tmp_path: Path, other: str, field: str) -> None:
    """Catches a drafter whose token ids mean something else, which no statistic of ours would see."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    shutil.copytree(pair[0], target)
    shutil.copytree(pair[1], draft)
    add_tokenizer(target, "a", "b")
    add_tokenizer(draft, "a", "b")
    fields: dict[str, Any] = {}
    match other:
        case "vocabulary":
            save_tiny_llama(draft, vocab_size=65, num_layers=1)
            # Without one, nothing says that the ids mean the same tokens.
            (draft / "tokenizer.json").unlink()
        case "tokenizer":
            add_tokenizer(draft, "b", "a")
        case "revision":
            fields["target_revision"] = "another"
    async with (
        running_drafter(drafter_settings(model=draft, **fields)) as drafter,
        running_drafter(drafter_settings(model=pair[1], target_revision=model_revision(target))) as good,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address, state=INCOMPATIBLE)
        assert field in client.drafters[drafter.address].detail
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=10)
        assert result.fallbacks == [(common_pb2.FALLBACK_REASON_INCOMPATIBLE_DRAFTER, len(PROMPT))]
        assert result.token_ids == greedy(pair[0], PROMPT, 10)
        # One that names this target, and has no tokenizer to compare, is as good as ever.
        await client.use_drafters(good.address)
        assert (await client.decode(PROMPT, drafter=good.address, max_tokens=10)).reasons == []


@pytest.mark.parametrize("field", ["protocol_version", "random_scheme"])
async def test_a_drafter_of_another_version(pair: Pair, field: str) -> None:
    target, _ = pair
    other = identity(**{field: 99 if field == "protocol_version" else "dice"})
    async with (
        fake_drafter(identity=other) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address, state=INCOMPATIBLE)
        assert field in client.drafters[drafter.address].detail
        assert drafter.num_streams == 0


async def test_the_drafters_context_ends_in_mid_sequence(pair: Pair, tmp_path: Path) -> None:
    """Catches drafts beyond the draft model's positions, and a sequence that stops there."""
    target, _ = pair
    short = save_tiny_llama(tmp_path / "short", num_layers=1, max_length=64, seed=2)
    async with (
        running_drafter(drafter_settings(model=short)) as drafter,
        scripted_drafter(replay([*PROMPT, *greedy(target, PROMPT, 90)])) as unlimited,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address, unlimited.address)
        assert client.drafters[drafter.address].max_length == 64
        assert client.drafters[unlimited.address].max_length == 0
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=80)
        assert result.token_ids == greedy(target, PROMPT, 80)
        ((reason, position),) = result.fallbacks
        assert reason == common_pb2.FALLBACK_REASON_DRAFTER_MAX_LENGTH
        # The first position from which four more tokens would not fit.
        assert 61 <= position <= 64
        assert set(result.origins[position - len(PROMPT) :]) == {common_pb2.TOKEN_ORIGIN_PLAIN}
        assert result.num_drafted > 0

        long = prompts(12)[11]
        result = await client.decode(long, drafter=drafter.address, max_tokens=10)
        assert result.fallbacks == [(reason, len(long))]
        assert result.token_ids == greedy(target, long, 10)
        await eventually(lambda: drafter_is_empty(drafter.address))

        result = await client.decode(PROMPT, drafter=unlimited.address, max_tokens=80)
        assert result.fallbacks == []
        assert result.token_ids == greedy(target, PROMPT, 80)


async def test_a_full_drafter(pair: Pair) -> None:
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft, max_sequences=1)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        results = await asyncio.gather(
            *(client.decode(prompt, drafter=drafter.address, max_tokens=30) for prompt in prompts(3))
        )
        for prompt, result in zip(prompts(3), results, strict=True):
            assert result.token_ids == greedy(target, prompt, 30)
        assert sorted(result.reasons for result in results) == [[], ["DRAFTER_OVERLOADED"], ["DRAFTER_OVERLOADED"]]
        await eventually(lambda: drafter_is_empty(drafter.address))
        again = await client.decode(PROMPT, drafter=drafter.address, max_tokens=5)
        assert again.reasons == []


async def wait_for_tokens(client: DecodeClient, sequence_id: int, count: int) -> None:
    await eventually(lambda: len(client.results[sequence_id].token_ids) >= count)


def slow_drafter(draft: Path) -> Drafter:
    """The draft model, with 20 ms more a round."""
    drafter = make_drafter(drafter_settings(model=draft))
    make_drafts = drafter.draft

    def slowly() -> Drafts:
        time.sleep(0.02)
        return make_drafts()

    drafter.draft = slowly  # type: ignore[method-assign]
    return drafter


async def test_a_drafter_that_goes_in_mid_stream_and_comes_back(pair: Pair) -> None:
    """Catches output that changes with the loss, a sequence that hangs on it, and a link that is never mended."""
    target, draft = pair
    async with (
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        # Slow enough that nobody is done when it goes, whatever the device.
        async with running_drafter(drafter_settings(model=draft), drafter=slow_drafter(draft)) as drafter:
            address = drafter.address
            await client.use_drafters(address)
            opened = [client.open(prompt, drafter=address, max_tokens=150) for prompt in prompts(4)]
            for sequence_id, _ in opened:
                await wait_for_tokens(client, sequence_id, 10)
        for prompt, (_, result) in zip(prompts(4), opened, strict=True):
            async with asyncio.timeout(30):
                await result.done.wait()
            assert result.token_ids == greedy(target, prompt, 150)
            ((reason, position),) = result.fallbacks
            assert reason == common_pb2.FALLBACK_REASON_DRAFTER_LOST
            assert len(prompt) + 10 <= position < len(prompt) + 150
            assert result.num_accepted > 0
        await client.drafters_become(CONNECTING, address)
        result = await client.decode(PROMPT, drafter=address, max_tokens=5)
        assert result.reasons == ["NO_DRAFTER"]
        async with running_drafter(drafter_settings(model=draft, listen=address)):
            await client.drafters_become(verifier_pb2.DRAFTER_STATE_READY, address)
            result = await client.decode(PROMPT, drafter=address, max_tokens=30)
            assert result.token_ids == greedy(target, PROMPT, 30)
            assert result.reasons == []
            assert result.num_accepted > 0
        assert await verifier_is_empty(client)


async def test_a_drafter_that_accepts_and_never_answers(pair: Pair) -> None:
    """Catches a sequence that waits longer than once for a drafter that hangs."""
    target, _ = pair
    async with (
        fake_drafter(replay([*PROMPT, *greedy(target, PROMPT, 60)]), lambda *_: ()) as drafter,
        running_verifier(verifier_settings(target, draft_timeout_seconds=0.3)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        start = time.monotonic()
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=50)
        assert time.monotonic() - start < 3
        assert result.token_ids == greedy(target, PROMPT, 50)
        # The first token waits for nobody.
        assert result.fallbacks == [(common_pb2.FALLBACK_REASON_DRAFTER_LOST, len(PROMPT) + 1)]
        # A connection that has fallen silent is given up and dialled anew.
        await eventually(lambda: drafter.num_streams == 2)
        await client.drafters_become(verifier_pb2.DRAFTER_STATE_READY, drafter.address)


async def test_a_drafter_that_does_not_even_accept(pair: Pair) -> None:
    """Catches sequences that are sent to a drafter whose stream never worked."""
    target, _ = pair
    async with (
        fake_drafter(says_hello=False) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address, state=CONNECTING)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=5)
        assert result.reasons == ["NO_DRAFTER"]
        await eventually(lambda: "does not answer" in client.drafters[drafter.address].detail)


async def test_a_drafter_that_is_busy_with_something_else(pair: Pair) -> None:
    """Catches a target that pauses at every token for as long as its drafter computes a long prompt."""
    target, _ = pair
    script = replay([*PROMPT, *greedy(target, PROMPT, 60)])

    async def hook(*_: object) -> list[Any]:
        return [frame()] * 50  # signs of life

    async with (
        fake_drafter(script, hook) as drafter,
        running_verifier(verifier_settings(target, draft_timeout_seconds=0.5)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        start = time.monotonic()
        _, result = client.open(PROMPT, drafter=drafter.address, max_tokens=50)
        while not result.done.is_set():
            # The drafter lives: another sequence's drafts go on.
            await client.decode(PROMPT[:3], drafter=drafter.address, max_tokens=1)
            await asyncio.sleep(0.05)
        assert time.monotonic() - start < 10, "50 tokens, and a pause of half a second before each"
        assert result.token_ids == greedy(target, PROMPT, 50)
        assert set(result.reasons) <= {"DRAFTER_OVERLOADED"}


async def test_a_drafter_that_lives_and_is_late(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a sequence that keeps a drafter of no use, and a drafter that is taken for lost although it speaks."""
    target, _ = pair
    monkeypatch.setattr(speculation, "MAX_LATE_IN_A_ROW", 1)

    async def hook(expansions: drafter_pb2.Expansions, sequence: DraftSequence) -> list[Any]:
        if sequence.length <= len(PROMPT) + 1:
            return [frame(expansions)]
        await asyncio.sleep(0.2)
        return [frame()]  # a sign of life, and no answer

    async with (
        fake_drafter(replay([*PROMPT, *greedy(target, PROMPT, 60)]), hook) as drafter,
        running_verifier(verifier_settings(target, draft_timeout_seconds=0.4)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=50)
        assert result.token_ids == greedy(target, PROMPT, 50)
        assert result.reasons == ["DRAFTER_OVERLOADED"]
        assert result.num_accepted > 0


async def test_a_drafter_that_nobody_wants_any_more(pair: Pair) -> None:
    """Catches a running sequence that loses its drafter to a change of the list, and a link that stays for good."""
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        sequence_id, result = client.open(PROMPT, drafter=drafter.address, max_tokens=150)
        await wait_for_tokens(client, sequence_id, 10)
        await client.use_drafters()
        async with asyncio.timeout(30):
            await result.done.wait()
        assert result.token_ids == greedy(target, PROMPT, 150)
        assert result.reasons == []
        assert result.num_accepted > 0

        async def is_forgotten() -> bool:
            return not (await client.stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest())).drafters

        await eventually(is_forgotten)
        await eventually(lambda: drafter_is_empty(drafter.address))
        # The same address again is another connection.
        client.drafters.clear()
        await client.use_drafters(drafter.address)
        again = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20)
        assert again.reasons == []
        assert again.token_ids == greedy(target, PROMPT, 20)


async def test_a_drafter_that_is_wanted_again_in_time(pair: Pair) -> None:
    """Catches a link that is closed although a gateway has named its drafter again."""
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, service),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        link = service._links[drafter.address]
        sequence_id, result = client.open(PROMPT, drafter=drafter.address, max_tokens=150)
        await wait_for_tokens(client, sequence_id, 10)
        await client.use_drafters()
        await eventually(lambda: drafter.address in service._retired)
        # Another gateway names it, and is told what it is worth.
        async with decode_client(verifier.address) as other:
            await other.use_drafters(drafter.address)
            await result.done.wait()
            assert (await other.decode(PROMPT, drafter=drafter.address, max_tokens=20)).reasons == []
            assert service._links[drafter.address] is link
        assert result.reasons == []
        await eventually(lambda: not service._links)


async def test_an_exception_in_the_draft_model(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a drafter that dies of one bad step, sequences that wait for it, and blocks that it never frees."""
    target, draft = pair
    settings = drafter_settings(model=draft, cuda_graphs=False)
    honest = make_drafter(settings)
    assert isinstance(honest, ModelDrafter)
    async with (
        running_drafter(settings, drafter=honest) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        fail_once(monkeypatch, honest._runner, at_call=12, method="forward")
        results = await asyncio.gather(
            *(client.decode(prompt, drafter=drafter.address, max_tokens=40) for prompt in prompts(3))
        )
        for prompt, result in zip(prompts(3), results, strict=True):
            assert result.token_ids == greedy(target, prompt, 40)
        assert ["DRAFTER_LOST"] in [result.reasons for result in results]
        await eventually(lambda: drafter_is_empty(drafter.address))
        again = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20)
        assert again.reasons == []
        assert again.num_accepted > 0


async def test_a_draft_model_that_fails_for_good(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a drafter that stays up without an engine, and takes sequences that it will never draft for."""
    target, draft = pair
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    settings = drafter_settings(model=draft, drain_seconds=20)
    honest = make_drafter(settings)
    assert isinstance(honest, ModelDrafter)
    async with (
        running_drafter(settings, drafter=honest) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        fail_once(monkeypatch, honest._runner, at_call=1, times=1000)
        for _ in range(3):
            result = await client.decode(PROMPT, drafter=drafter.address, max_tokens=20)
            assert result.token_ids == greedy(target, PROMPT, 20)
            assert result.reasons == ["DRAFTER_LOST"]
        await eventually(lambda: signals == [15])
        await client.drafters_become(CONNECTING, drafter.address)
        async with asyncio.timeout(5):
            await drafter.stop()
