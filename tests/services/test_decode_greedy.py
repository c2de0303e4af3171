"""Greedy decoding through verifier and drafter equals the target model alone, token for token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from outrider.service.serving import Server
from outrider.v1 import common_pb2
from tests.services.conftest import Pair
from tests.services.harness import (
    Result,
    decode_client,
    drafter_is_empty,
    drafter_settings,
    eventually,
    replay,
    running_drafter,
    running_verifier,
    scripted_drafter,
    verifier_is_empty,
    verifier_settings,
)
from tests.services.reference import greedy, load_model, logprobs, prompts, shaped_greedy

PLAIN = common_pb2.TOKEN_ORIGIN_PLAIN
ACCEPTED = common_pb2.TOKEN_ORIGIN_ACCEPTED
RECOVERED = common_pb2.TOKEN_ORIGIN_RECOVERED
BONUS = common_pb2.TOKEN_ORIGIN_BONUS


def check(result: Result, target: Path, prompt: Sequence[int], num_tokens: int) -> None:
    """Whether a result is what the target alone says, and its numbers fit each other."""
    assert result.token_ids == greedy(target, prompt, num_tokens)
    assert len(result.origins) == num_tokens
    assert result.origins.count(ACCEPTED) == result.num_accepted <= result.num_drafted
    assert result.finish == "LENGTH"


def make_drafter(kind: str, pair: Pair) -> AbstractAsyncContextManager[Server]:
    target, draft = pair
    right = [[*prompt, *greedy(target, prompt, 40)] for prompt in prompts(8)]
    match kind:
        case "model":
            return running_drafter(drafter_settings(model=draft))
        case "ngram":
            return running_drafter(drafter_settings(kind="ngram", min_ngram=1))
        case "now and then":
            # Right up to a token that changes with the position.
            return scripted_drafter(lambda tokens, count: [*replay(*right)(tokens, len(tokens) % 5), 0, 1][:count])
    raise AssertionError(kind)


@pytest.mark.parametrize("drafting", ["turns", "ahead"])
@pytest.mark.parametrize("kind", ["model", "ngram", "now and then"])
async def test_speculation_changes_nothing(pair: Pair, kind: str, drafting: str) -> None:
    """Catches a token that was accepted although the target would not have chosen it, in a batch of ragged prompts."""
    target, _ = pair
    async with (
        make_drafter(kind, pair) as drafter,
        running_verifier(verifier_settings(target, drafting=drafting)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        results = await asyncio.gather(
            *(client.decode(prompt, drafter=drafter.address, max_tokens=40) for prompt in prompts(8))
        )
        for prompt, result in zip(prompts(8), results, strict=True):
            check(result, target, prompt, 40)
            assert result.reasons == []
        origins = {origin for result in results for origin in result.origins}
        # Without rejections and full acceptances the comparison would prove nothing.
        assert {ACCEPTED, RECOVERED, BONUS} <= origins
        assert await verifier_is_empty(client)
        await eventually(lambda: drafter_is_empty(drafter.address))


async def test_without_a_drafter_every_token_is_plain(pair: Pair) -> None:
    target, _ = pair
    async with running_verifier(verifier_settings(target)) as (verifier, _), decode_client(verifier.address) as client:
        for prompt in prompts(3):
            result = await client.decode(prompt, max_tokens=20)
            check(result, target, prompt, 20)
            assert set(result.origins) == {PLAIN}
            assert result.num_steps == 20
            assert result.fallbacks == [(common_pb2.FALLBACK_REASON_NO_DRAFTER, len(prompt))]


async def test_a_drafter_that_is_always_right(pair: Pair) -> None:
    """Catches acceptance that stops early, and steps that verify less than they could."""
    target, _ = pair
    prompt = prompts(2)[1]
    async with (
        scripted_drafter(replay([*prompt, *greedy(target, prompt, 60)])) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(prompt, drafter=drafter.address, max_tokens=40)
        check(result, target, prompt, 40)
        # The prompt's own last row gives the first token, and the last step has room for three draft tokens.
        assert result.origins == [PLAIN, *[*[ACCEPTED] * 4, BONUS] * 7, *[ACCEPTED] * 3, BONUS]
        assert (result.num_steps, result.num_drafted, result.num_accepted) == (9, 31, 31)


async def test_a_drafter_that_is_always_wrong(pair: Pair) -> None:
    target, _ = pair
    prompt = prompts(2)[1]
    async with (
        scripted_drafter(replay([*prompt, *greedy(target, prompt, 60)], offset=1)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(prompt, drafter=drafter.address, max_tokens=40)
        check(result, target, prompt, 40)
        # For the very last token no draft token could be of use.
        assert result.origins == [PLAIN, *[RECOVERED] * 38, PLAIN]
        assert (result.num_steps, result.num_accepted) == (40, 0)


@pytest.mark.parametrize(("max_draft_tokens", "num_steps"), [(1, 21), (32, 3)])
async def test_the_shortest_and_the_longest_chains(pair: Pair, max_draft_tokens: int, num_steps: int) -> None:
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        scripted_drafter(replay(*([*prompt, *greedy(target, prompt, 80)] for prompt in prompts(3)))) as oracle,
        running_verifier(verifier_settings(target, max_draft_tokens=32)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address, oracle.address)
        for address, num_tokens in ((drafter.address, 16), (oracle.address, 40)):
            fields = {"drafter": address, "max_tokens": num_tokens, "max_draft_tokens": max_draft_tokens}
            results = await asyncio.gather(*(client.decode(prompt, **fields) for prompt in prompts(3)))
            for prompt, result in zip(prompts(3), results, strict=True):
                check(result, target, prompt, num_tokens)
            assert sum(result.num_accepted for result in results) > 0
        # With one draft token, all but the first token come in twos; with 32, two steps do.
        assert {result.num_steps for result in results} == {num_steps}


async def test_no_request_gets_more_draft_tokens_than_the_verifier_allows(pair: Pair) -> None:
    """Catches a request that makes everybody's steps longer than the graphs were made for."""
    target, _ = pair
    prompt = prompts(1)[0]
    async with (
        scripted_drafter(replay([*prompt, *greedy(target, prompt, 80)])) as oracle,
        running_verifier(verifier_settings(target, max_draft_tokens=2)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(oracle.address)
        # Threes behind the first token, or twos.
        for asked_for, num_steps in ((0, 14), (32, 14), (1, 21)):
            result = await client.decode(prompt, drafter=oracle.address, max_tokens=40, max_draft_tokens=asked_for)
            check(result, target, prompt, 40)
            assert result.num_steps == num_steps


async def test_prompts_in_chunks(pair: Pair) -> None:
    """Catches a chunk computed at the wrong positions, in the verifier or in the drafter, and a budget overrun."""
    target, draft = pair
    long = prompts(8, step=25)
    async with (
        running_drafter(drafter_settings(model=draft, max_num_batched_tokens=64)) as drafter,
        running_verifier(verifier_settings(target, max_num_batched_tokens=64)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        results = await asyncio.gather(
            *(client.decode(prompt, drafter=drafter.address, max_tokens=30) for prompt in long)
        )
        for prompt, result in zip(long, results, strict=True):
            check(result, target, prompt, 30)
            assert result.num_accepted > 0
            assert result.reasons == []


async def test_caches_that_are_too_small(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Catches state that is lost when a sequence is preempted in the verifier or evicted from the drafter's cache."""
    caplog.set_level(logging.DEBUG, "drafter_service.model_drafter")
    target, draft = pair
    many = prompts(6, step=3)
    async with (
        running_drafter(drafter_settings(model=draft, num_blocks=6)) as drafter,
        running_verifier(verifier_settings(target, num_blocks=7)) as (verifier, service),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        results = await asyncio.gather(
            *(client.decode(prompt, drafter=drafter.address, max_tokens=50) for prompt in many)
        )
        for prompt, result in zip(many, results, strict=True):
            check(result, target, prompt, 50)
            assert result.reasons == []
            assert result.num_accepted > 0
        assert service._engine._scheduler.num_preemptions > 0
        assert await verifier_is_empty(client)
        await eventually(lambda: drafter_is_empty(drafter.address))
    assert sum("evicting" in record.message for record in caplog.records) > 5


def index_of_a_new_token(tokens: Sequence[int], start: int) -> int:
    """Where, from `start` on, a token stands for the first time, in the middle of a block of five."""
    return next(
        index for index in range(start, len(tokens)) if tokens[index] not in tokens[:index] and index % 5 in (2, 3)
    )


@pytest.mark.parametrize("ending", ["EOS", "STOP_TOKEN", "LENGTH"])
async def test_the_end_inside_an_accepted_block(pair: Pair, tmp_path: Path, ending: str) -> None:
    """Catches tokens behind the end, and draft tokens behind it that are counted as accepted."""
    target, _ = pair
    prompt = prompts(3)[2]
    tokens = greedy(target, prompt, 60)
    last = index_of_a_new_token(tokens, 6)
    fields: dict[str, object] = {"max_tokens": 50}
    if ending == "EOS":
        model = AutoModelForCausalLM.from_pretrained(target)
        model.generation_config.eos_token_id = [63 - tokens[last], tokens[last]]
        assert 63 - tokens[last] not in tokens[:last]
        model.save_pretrained(tmp_path)
        path = tmp_path
    else:
        path = target
        fields |= {"stop_token_ids": [tokens[last]]} if ending == "STOP_TOKEN" else {"max_tokens": last + 1}
    async with (
        scripted_drafter(replay([*prompt, *tokens])) as drafter,
        running_verifier(verifier_settings(path)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(prompt, drafter=drafter.address, **fields)
        assert result.token_ids == tokens[: last + 1]
        assert result.finish == ending
        assert result.num_accepted == result.origins.count(ACCEPTED)
        if ending != "LENGTH":
            assert result.origins[-1] == ACCEPTED
        if ending == "EOS":
            result = await client.decode(prompt, drafter=drafter.address, max_tokens=50, ignore_eos=True)
            assert result.token_ids == tokens[:50]
            assert result.finish == "LENGTH"
        assert await verifier_is_empty(client)


async def test_up_to_the_last_position_of_the_context(pair: Pair) -> None:
    """Catches a step that reaches behind the model's last position, and a completion that stops short of it."""
    target, draft = pair
    prompt = prompts(12, step=20)[11]
    assert len(prompt) == 223
    for make in (
        running_drafter(drafter_settings(model=draft)),
        running_drafter(drafter_settings(kind="ngram", min_ngram=1)),
    ):
        async with (
            make as drafter,
            running_verifier(verifier_settings(target)) as (verifier, _),
            decode_client(verifier.address) as client,
        ):
            await client.use_drafters(drafter.address)
            result = await client.decode(prompt, drafter=drafter.address)
            check(result, target, prompt, 256 - len(prompt))


async def test_a_resumed_sequence_counts_what_it_already_has(pair: Pair) -> None:
    """Catches max_tokens counted from the resumption, and penalties that take the output so far for prompt."""
    target, draft = pair
    prompt = prompts(3)[2]
    tokens = greedy(target, prompt, 40)
    sampling = {"frequency_penalty": 1.0}
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result = await client.decode(
            [*prompt, *tokens[:15]], num_prompt_tokens=len(prompt), drafter=drafter.address, max_tokens=40
        )
        assert result.token_ids == tokens[15:]
        assert result.num_accepted > 0
        whole = await client.decode(prompt, drafter=drafter.address, max_tokens=40, sampling=sampling)
        rest = await client.decode(
            [*prompt, *whole.token_ids[:15]],
            num_prompt_tokens=len(prompt),
            drafter=drafter.address,
            max_tokens=40,
            sampling=sampling,
        )
        assert whole.token_ids != tokens
        assert rest.token_ids == whole.token_ids[15:]


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.4},
        {"logit_bias": {3: 4.0, 7: -100.0, 11: 2.5}},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"repetition_penalty": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.9, "logit_bias": {5: 3.0}},
    ],
    ids="+".join,
)
async def test_penalties_count_the_draft_tokens_before_each_position(pair: Pair, sampling: dict[str, Any]) -> None:
    """Catches penalties that see the committed tokens only: the second token of a repetition would slip through."""
    target, draft = pair

    def shaped(prompt: list[int], num_tokens: int) -> list[int]:
        def shape(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
            so_far = torch.tensor([tokens])
            scores: torch.Tensor = logits.clone().unsqueeze(0)
            if "repetition_penalty" in sampling:
                scores = RepetitionPenaltyLogitsProcessor(sampling["repetition_penalty"])(so_far, scores)
            counts = torch.bincount(torch.tensor(tokens[len(prompt) :], dtype=torch.int64), minlength=len(logits))
            scores = scores - sampling.get("frequency_penalty", 0.0) * counts
            scores = scores - sampling.get("presence_penalty", 0.0) * (counts > 0)
            if bias := sampling.get("logit_bias"):
                biases = {(token,): value for token, value in bias.items()}
                scores = SequenceBiasLogitsProcessor(biases)(so_far, scores)  # type: ignore[arg-type]  # a dict will do
            return scores[0]

        return shaped_greedy(target, prompt, num_tokens, shape)

    expected = {tuple(prompt): shaped(prompt, 40) for prompt in prompts(3)}
    right = [[*prompt, *tokens] for prompt, tokens in expected.items()]
    for make in (running_drafter(drafter_settings(model=draft)), scripted_drafter(replay(*right))):
        async with (
            make as drafter,
            running_verifier(verifier_settings(target)) as (verifier, _),
            decode_client(verifier.address) as client,
        ):
            await client.use_drafters(drafter.address)
            results = await asyncio.gather(
                *(
                    client.decode(prompt, drafter=drafter.address, max_tokens=40, sampling=sampling)
                    for prompt in prompts(3)
                )
            )
            for prompt, result in zip(prompts(3), results, strict=True):
                assert result.token_ids == expected[tuple(prompt)]
                assert result.num_accepted > 5
    assert any(expected[tuple(prompt)] != greedy(target, prompt, 40) for prompt in prompts(3))


@pytest.mark.parametrize("num_top", [0, 3])
async def test_logprobs_are_the_targets_own(pair: Pair, num_top: int) -> None:
    """Catches log-probabilities of the wrong row, of shaped logits, or one short when a block was accepted."""
    target, draft = pair
    prompt = prompts(2)[1]
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        result, bystander = await asyncio.gather(
            client.decode(
                prompt,
                drafter=drafter.address,
                max_tokens=30,
                logprobs=num_top,
                sampling={"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2},
            ),
            client.decode(prompt[:3], drafter=drafter.address, max_tokens=30),
        )
        assert bystander.logprobs == []
        assert result.num_accepted > 0
        assert len(result.logprobs) == len(result.token_ids) == 30
        expected = logprobs(target, [*prompt, *result.token_ids])[len(prompt) - 1 :]
        for row, token_id, position in zip(expected, result.token_ids, result.logprobs, strict=False):
            assert position.chosen.token_id == token_id
            assert position.chosen.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            best = row.topk(num_top)
            assert [top.token_id for top in position.top] == best.indices.tolist()
            assert [top.logprob for top in position.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert load_model(target).config.vocab_size == 64
