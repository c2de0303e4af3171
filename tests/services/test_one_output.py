"""Greedy and coupled sequences have one output, token for token: whatever drafts for them, in whatever company, on
whatever verifier."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drafter_service.drafter import Drafter, Drafts
from drafter_service.factory import make_drafter
from drafter_service.model_drafter import ModelDrafter
from engine.step import Pass, Row, Sampled
from outrider.v1 import common_pb2
from tests.service_device import SERVICE_DEVICE, graph_pool
from tests.services.conftest import Pair
from tests.services.harness import (
    DecodeClient,
    Result,
    decode_client,
    drafter_settings,
    eventually,
    running_drafter,
    running_verifier,
    scripted_drafter,
    verifier_settings,
)
from tests.services.reference import greedy, prompts
from verifier_service.executor import TargetExecutor
from verifier_service.settings import VerifierSettings
from verifier_service.target import Target

NUM_TOKENS = 40
COUPLED = common_pb2.VERIFICATION_COUPLED
# The same random numbers for all: what one gets of another's would show.
SAMPLINGS: list[dict[str, Any]] = [
    {"sampling": {"temperature": 0.0}},
    {"sampling": {"temperature": 1.0}, "verification": COUPLED},
    {"sampling": {"temperature": 0.7, "top_p": 0.9}, "is_seeded": True},
    {"sampling": {"temperature": 1.2, "top_k": 20, "min_p": 0.02}, "is_seeded": True, "logprobs": 2},
    {
        "sampling": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}},
        "verification": COUPLED,
    },
    {"sampling": {"temperature": 1.0, "presence_penalty": 0.8}, "is_seeded": True, "max_draft_tokens": 2},
]
REQUESTS = [
    {"token_ids": prompt, "seed": 3, **fields} for prompt, fields in zip(prompts(6, step=9), SAMPLINGS, strict=True)
]


def nonsense(token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
    return [(7 * len(token_ids) + 13 * place) % 64 for place in range(max_draft_tokens)]


def slow_drafter(draft: Path) -> Drafter:
    """The draft model, whose answers take so long that nobody is done when it goes."""
    drafter = make_drafter(drafter_settings(model=draft, takes_turns=True))
    make_drafts = drafter.draft

    def slowly() -> Drafts:
        time.sleep(0.05)
        return make_drafts()

    drafter.draft = slowly  # type: ignore[method-assign]
    return drafter


async def alone(decode: Callable[..., Any]) -> list[Result]:
    return [await decode(**fields) for fields in REQUESTS]


async def together(decode: Callable[..., Any]) -> list[Result]:
    company = [{**fields, "seed": 90 + number} for number, fields in enumerate(REQUESTS)]
    results = await asyncio.gather(*(decode(**fields) for fields in [*company, *REQUESTS]))
    return results[len(company) :]


async def with_a_drafter_that_dies(
    client: DecodeClient, draft: Path, requests: Sequence[dict[str, Any]]
) -> list[Result]:
    """What becomes of requests whose drafter goes when each has some tokens."""
    async with running_drafter(
        drafter_settings(model=draft, drain_seconds=0.05), drafter=slow_drafter(draft)
    ) as drafter:
        await client.use_drafters(drafter.address)
        opened = [client.open(drafter=drafter.address, max_tokens=NUM_TOKENS, **fields) for fields in requests]
        await eventually(lambda: all(len(result.token_ids) >= 5 for _, result in opened))
    for _, result in opened:
        async with asyncio.timeout(30):
            await result.done.wait()
        assert result.reasons == ["DRAFTER_LOST"]
        assert result.num_drafted > 0
    return [result for _, result in opened]


@asynccontextmanager
async def verifier_client(
    settings: VerifierSettings, monkeypatch: pytest.MonkeyPatch, *, has_graphs: bool, step_seconds: float
) -> AsyncIterator[DecodeClient]:
    """A client of a verifier, whose decoding runs in graphs, recorded or not, or one kernel at a time.

    Its steps take as long as those of a large target beside its drafter: `step_seconds` and the little that they need.
    """
    load = Target.load

    def load_graphs(target: Target) -> None:
        load(target)
        executor = target.executor
        assert isinstance(executor, TargetExecutor)
        if has_graphs and not executor.has_graphs:
            executor.use_graphs(graph_pool())
        submit = executor.submit

        def slowly(rows: Sequence[Row]) -> list[Pass[Sampled]]:
            time.sleep(step_seconds)
            return submit(rows)

        executor.submit = slowly  # type: ignore[method-assign]

    async with AsyncExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(Target, "load", load_graphs)
            verifier, _ = await stack.enter_async_context(running_verifier(settings))
        yield await stack.enter_async_context(decode_client(verifier.address))


@pytest.mark.slow
@pytest.mark.skipif(SERVICE_DEVICE != "cpu", reason="on a GPU, a product of another shape rounds otherwise")
async def test_one_output(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a token that depends on what was drafted, on the batch, or on the verifier: its limits, its rule for
    others, how its steps run."""
    target, draft = pair
    outputs: dict[str, list[list[int]]] = {}
    counts: Counter[str] = Counter()
    verifiers = {
        "one": (verifier_settings(target, drafting="ahead"), False),
        "another": (
            verifier_settings(
                target,
                drafting="ahead",
                max_draft_tokens=7,
                max_num_batched_tokens=64,
                max_running=9,
                split_from=3,
                verification="coupled",
            ),
            True,
        ),
    }
    async with (
        running_drafter(drafter_settings(model=draft, takes_turns=True)) as model,
        running_drafter(drafter_settings(model=draft, takes_turns=False)) as model_ahead,
        running_drafter(drafter_settings(kind="ngram")) as lookup,
        scripted_drafter(nonsense) as script,
    ):
        drafters = {
            "a model": model.address,
            "a model that runs ahead": model_ahead.address,
            "look-up": lookup.address,
            "nonsense": script.address,
            "none": "",
        }
        for verifier, (settings, has_graphs) in verifiers.items():
            async with verifier_client(settings, monkeypatch, has_graphs=has_graphs, step_seconds=0.01) as client:
                for drafter, address in drafters.items():
                    await client.use_drafters(*filter(None, drafters.values()))

                    async def decode(address: str = address, **fields: Any) -> Result:
                        return await client.decode(drafter=address, max_tokens=NUM_TOKENS, **fields)

                    for run in (alone, together):
                        results = await run(decode)
                        outputs[f"{verifier} verifier, {drafter}, {run.__name__}"] = [r.token_ids for r in results]
                        counts[drafter] += sum(result.num_accepted for result in results)
                        counts[f"{drafter}, rejected"] += sum(r.num_drafted - r.num_accepted for r in results)
                for requests in (REQUESTS[2:3], REQUESTS):
                    results = await with_a_drafter_that_dies(client, draft, requests)
                    name = f"{verifier} verifier, a model that dies, {len(requests)} at once"
                    outputs[name] = [result.token_ids for result in results]
    expected = outputs["one verifier, none, alone"]
    assert expected[0] == greedy(target, REQUESTS[0]["token_ids"], NUM_TOKENS)
    assert len(set(map(tuple, expected))) == len(REQUESTS)
    for name, output in outputs.items():
        assert output == (expected if len(output) > 1 else expected[2:3]), name
    # Without acceptances and rejections all of this would prove nothing.
    assert counts["a model"] > NUM_TOKENS < counts["a model, rejected"], counts
    assert counts["a model that runs ahead"] > 0 < counts["a model that runs ahead, rejected"], counts
    assert counts["look-up"] > 0 < counts["nonsense, rejected"], counts
    assert counts["none"] == counts["none, rejected"] == 0


@pytest.mark.parametrize("has_graphs", [False, True])
async def test_a_drafter_with_the_targets_own_model_is_always_right(pair: Pair, has_graphs: bool) -> None:
    """Catches drafts that are drawn with other random numbers than the target's, for another position, or from a
    distribution without the request's filters, temperature and penalties."""
    target, _ = pair
    drafter = make_drafter(drafter_settings(model=target, takes_turns=True, cuda_graphs=False))
    assert isinstance(drafter, ModelDrafter)
    load = drafter.load

    def load_graphs() -> None:
        load()
        drafter._executor.capture(graph_pool(), takes_turns=True)

    if has_graphs:
        drafter.load = load_graphs  # type: ignore[method-assign]
    async with (
        running_drafter(drafter_settings(model=target), drafter=drafter) as server,
        running_verifier(verifier_settings(target)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(server.address)
        for fields in REQUESTS:
            # The drafter's penalties do not count what is drafted and not committed, which the target's do.
            is_penalized = any("penalty" in name for name in fields["sampling"])
            result = await client.decode(drafter=server.address, max_tokens=NUM_TOKENS, **fields)
            assert result.num_drafted > 0
            share = result.num_accepted / result.num_drafted
            assert share > 0.5 if is_penalized or SERVICE_DEVICE != "cpu" else share == 1, fields
