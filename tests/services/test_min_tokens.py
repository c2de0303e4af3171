"""Tokens that end a sequence have no probability below its minimum, with and without a drafter, and all of it above."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
import torch

from outrider.v1 import common_pb2
from tests.services.conftest import Pair
from tests.services.harness import (
    decode_client,
    drafter_settings,
    replay,
    running_drafter,
    running_verifier,
    scripted_drafter,
    verifier_settings,
)
from tests.services.reference import Shape, greedy, prompts, shaped_greedy
from tests.services.test_decode_sampling import (
    NUM_CHECKED,
    PROMPT,
    SIGNIFICANCE,
    WHOLE,
    Case,
    check_branches,
    continuations,
    p_values,
    sample,
    sampling_client,
)

MIN_TOKENS = 12


def ban(token_ids: Sequence[int], *, prompt: Sequence[int], below: int) -> Shape:
    """Leaves the tokens no probability while the output is shorter than that."""

    def shape(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        if len(tokens) - len(prompt) >= below:
            return logits
        return logits.index_fill(0, torch.tensor(list(token_ids)), -torch.inf)

    return shape


@pytest.mark.parametrize("kind", ["none", "model", "free", "exact"])
async def test_greedy_goes_on_to_the_minimum(pair: Pair, kind: str) -> None:
    """Catches a sequence that ends too early, one that avoids its end for longer, and one that ends without a token.

    The drafters propose ends where they are banned (`free`), or exactly what is to come, the minimum included.
    """
    target, draft = pair
    prompt = prompts(3)[2]
    free = greedy(target, prompt, 40)
    stops = sorted(set(free[2:6]))
    wanted = shaped_greedy(target, prompt, 60, ban(stops, prompt=prompt, below=MIN_TOKENS))
    end = next(index for index in range(MIN_TOKENS, 60) if wanted[index] in stops)
    assert not set(wanted[:MIN_TOKENS]) & set(stops)
    async with AsyncExitStack() as stack:
        match kind:
            case "model":
                drafter = await stack.enter_async_context(running_drafter(drafter_settings(model=draft)))
            case "free":

                def ends(token_ids: Sequence[int], count: int) -> Sequence[int]:
                    return (stops * count)[:count]

                drafter = await stack.enter_async_context(scripted_drafter(ends))
            case _:
                drafter = await stack.enter_async_context(scripted_drafter(replay([*prompt, *wanted])))
        verifier, _ = await stack.enter_async_context(running_verifier(verifier_settings(target)))
        client = await stack.enter_async_context(decode_client(verifier.address))
        await client.use_drafters(drafter.address)
        address = "" if kind == "none" else drafter.address
        fields = {"drafter": address, "stop_token_ids": stops, "min_tokens": MIN_TOKENS, "max_tokens": 60}
        result = await client.decode(prompt, **fields)
        assert result.token_ids == wanted[: end + 1]
        assert result.finish == "STOP_TOKEN"
        if kind == "exact":
            # Of the last step's drafts some may stand behind the end.
            assert result.num_accepted > 0
            assert common_pb2.TOKEN_ORIGIN_RECOVERED not in result.origins
        if kind == "free":
            assert common_pb2.TOKEN_ORIGIN_RECOVERED in result.origins
        # What another verifier has committed counts.
        resumed = await client.decode([*prompt, *wanted[:5]], num_prompt_tokens=len(prompt), **fields)
        assert resumed.token_ids == wanted[5 : end + 1]
        # A minimum that is reached already changes nothing.
        late = await client.decode([*prompt, *wanted[:5]], num_prompt_tokens=len(prompt), **{**fields, "min_tokens": 5})
        assert late.token_ids[-1] in stops


async def test_the_limit_still_ends_a_sequence(pair: Pair) -> None:
    """Catches a minimum that outlives the limit, or bans where nothing could end the sequence."""
    target, _ = pair
    prompt = prompts(1)[0]
    stops = greedy(target, prompt, 4)
    wanted = shaped_greedy(target, prompt, 30, ban(stops, prompt=prompt, below=30))
    async with (
        scripted_drafter(replay([*prompt, *wanted])) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        nothing_ends = await client.decode(prompt, max_tokens=20, min_tokens=1 << 31)
        assert nothing_ends.token_ids == greedy(target, prompt, 20)
        assert nothing_ends.finish == "LENGTH"
        fields = {"drafter": drafter.address, "max_tokens": 18, "min_tokens": 1 << 31, "stop_token_ids": stops}
        banned = await client.decode(prompt, **fields)
        assert banned.token_ids == wanted[:18]
        assert banned.finish == "LENGTH"
        # In steps of 1, 4, 5, 5 and 3 tokens: no draft token is verified that could not be kept.
        assert banned.num_drafted == banned.num_accepted == 13


@pytest.mark.slow
async def test_tokens_are_distributed_as_the_target_would_without_its_ends(narrow_pair: Pair) -> None:
    """Catches an end that is banned in a place behind the minimum because its step began before, or that stays banned.

    The last place that is checked is the first one behind the minimum.
    """
    target, draft = narrow_pair
    minimum = NUM_CHECKED - 1
    by_token: Counter[int] = Counter()
    for tokens, probability in continuations(target, WHOLE).items():
        by_token[tokens[minimum]] += probability  # type: ignore[assignment]
    stops = [token_id for token_id, _ in by_token.most_common(2)]
    case = Case("a minimum", {"temperature": 1.0}, before=ban(stops, prompt=PROMPT, below=minimum))
    settings = drafter_settings(model=draft, max_sequences=4096)
    async with running_drafter(settings) as drafter, sampling_client(target, drafter.address) as client:
        fields = {"stop_token_ids": stops, "min_tokens": minimum}
        results = await sample(client, drafter.address, case, first_seed=3_000_000, **fields)
    check_branches(results)
    assert min(len(result.token_ids) for result in results) == NUM_CHECKED
    assert {name: p for name, p in p_values(results, target, case).items() if p < SIGNIFICANCE} == {}
