"""Load on a gateway: waves of requests sent at the same moment, and what came of them."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.client import AsyncClient, Chunk, Finished, TokenOrigin, Verification


@dataclass(frozen=True)
class Workload:
    """What a wave asks for: `batch_size` requests at once, end-of-sequence tokens ignored."""

    batch_size: int
    temperature: float
    num_draft_tokens: int | None  # K; None: without speculation
    num_prompt_tokens: int = 128
    num_output_tokens: int = 256
    verification: Verification = Verification.REJECTION  # above temperature 0; named, as requests have seeds

    @property
    def is_speculative(self) -> bool:
        """Whether drafts are wanted."""
        return self.num_draft_tokens is not None

    @property
    def name(self) -> str:
        """For progress lines."""
        return f"batch {self.batch_size}, temperature {self.temperature:g}, {self.mode}"

    @property
    def mode(self) -> str:
        """How it decodes, as tables and plots call it."""
        return mode_name(self.num_draft_tokens, self.temperature, self.verification)


def mode_name(num_draft_tokens: int | None, temperature: float, verification: str) -> str:
    """plain, or K and, where there is a choice, the rule."""
    if num_draft_tokens is None:
        return "plain"
    return f"K = {num_draft_tokens}" + (f", {verification}" if temperature else "")


@dataclass
class Request:
    """One request's outcome; times on time.perf_counter's clock."""

    sent: float
    chunk_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    # Of each token, and of the likeliest tokens at its position; only where they were asked for.
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def outcome(self) -> Finished:
        """The last message."""
        assert self.finished is not None
        return self.finished


@dataclass(frozen=True)
class Wave:
    """One wave's requests, and how long it took from the first request's start to the last one's end, seconds."""

    requests: Sequence[Request]
    seconds: float


def random_prompts(workload: Workload, vocab_size: int, *, seed: int) -> list[list[int]]:
    """Prompts of random token ids."""
    numbers = random.Random(seed)
    return [
        [numbers.randrange(vocab_size) for _ in range(workload.num_prompt_tokens)] for _ in range(workload.batch_size)
    ]


async def run_wave(
    client: AsyncClient,
    workload: Workload,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    timeout_seconds: float,
    num_logprobs: int | None = None,
) -> Wave:
    """Send all requests at once and wait for all. Raises ClientError when one fails."""
    start = time.perf_counter()
    tasks = [
        asyncio.create_task(run_request(client, workload, prompt, seed + index, timeout_seconds, num_logprobs))
        for index, prompt in enumerate(prompts)
    ]
    try:
        requests = await asyncio.gather(*tasks)
    finally:
        # After an error the others are of no use any more.
        for task in tasks:
            task.cancel()
    return Wave(requests, time.perf_counter() - start)


async def run_request(
    client: AsyncClient,
    workload: Workload,
    prompt: Sequence[int],
    seed: int,
    timeout_seconds: float,
    num_logprobs: int | None = None,
) -> Request:
    """One request, from its start to its end. Raises ClientError when it fails."""
    request = Request(time.perf_counter())
    async for event in client.stream(
        token_ids=prompt,
        max_tokens=workload.num_output_tokens,
        temperature=workload.temperature,
        seed=seed,
        ignore_eos=True,
        speculation=workload.is_speculative,
        max_draft_tokens=workload.num_draft_tokens,
        verification=workload.verification,
        logprobs=num_logprobs,
        timeout=timeout_seconds,
    ):
        match event:
            case Chunk() if event.tokens:
                request.chunk_times.append(time.perf_counter())
                request.token_ids += [token.id for token in event.tokens]
                request.origins += [token.origin for token in event.tokens]
                if num_logprobs is not None:
                    request.logprobs += [token.logprob or 0.0 for token in event.tokens]
                    request.top_logprobs += [
                        {top.token_id: top.logprob for top in token.top_logprobs} for token in event.tokens
                    ]
            case Finished():
                request.finished = event
    return request


def statistics_of(workload: Workload, waves: Sequence[Wave]) -> dict[str, Any]:
    """What is reported of a workload's waves, with why it is void if it is."""
    requests = [request for wave in waves for request in wave.requests]
    speculation = [request.outcome.speculation for request in requests]
    num_tokens = sum(len(request.token_ids) for request in requests)
    num_drafted = sum(one.num_draft_tokens for one in speculation)
    num_accepted = sum(one.num_accepted_tokens for one in speculation)
    # The first token falls to the prompt's own forward pass, which verifies no drafts.
    num_decode_steps = sum(one.num_steps for one in speculation) - len(requests)
    gaps = [later - earlier for request in requests for earlier, later in itertools.pairwise(request.chunk_times)]
    decode_seconds = [request.chunk_times[-1] - request.chunk_times[0] for request in requests]
    origins = Counter(str(origin) for request in requests for origin in request.origins)
    fallbacks = Counter(str(item.reason) for one in speculation for item in one.fallbacks)
    num_fallen_back = sum(bool(one.fallbacks) for one in speculation)
    result = {
        "num_waves": len(waves),
        "num_requests": len(requests),
        "total_output_tokens": num_tokens,
        "tokens_per_second": statistics.median(
            sum(len(request.token_ids) for request in wave.requests) / wave.seconds for wave in waves
        ),
        "wave_seconds": [round(wave.seconds, 4) for wave in waves],
        "acceptance_rate": num_accepted / num_drafted if num_drafted else None,
        "first_acceptance_rate": _first_acceptance(workload, requests),
        "acceptance_length": (num_tokens - len(requests)) / num_decode_steps if num_decode_steps else None,
        "num_drafted_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
        "time_to_first_token_ms": 1e3 * statistics.median(r.chunk_times[0] - r.sent for r in requests),
        "queue_ms": 1e3 * statistics.median(r.outcome.timings.queue_seconds for r in requests),
        "prefill_ms": 1e3 * statistics.median(r.outcome.timings.prefill_seconds for r in requests),
        "inter_token_ms": 1e3
        * statistics.median(
            seconds / max(len(r.token_ids) - 1, 1) for seconds, r in zip(decode_seconds, requests, strict=True)
        ),
        "chunk_gap_p99_ms": 1e3 * statistics.quantiles(gaps, n=100)[98] if len(gaps) > 1 else None,
        # One draft, transport, forward, sampling and host round: decoding's time over its steps.
        "cycle_ms": 1e3 * sum(decode_seconds) / num_decode_steps if num_decode_steps else None,
        "origins": dict(origins),
        "fallbacks": dict(fallbacks),
    }
    return {**result, "void": why_void(workload, result, num_fallen_back)}


def why_void(workload: Workload, result: dict[str, Any], num_fallen_back: int) -> str | None:
    """Why a run says nothing about what it was to measure; None where it does."""
    expected = result["num_requests"] * workload.num_output_tokens
    if result["total_output_tokens"] != expected:
        return f"{result['total_output_tokens']} tokens came, not {expected}"
    if not workload.is_speculative:
        return "there were drafts in a plain run" if result["num_drafted_tokens"] else None
    if not result["num_drafted_tokens"]:
        return f"nothing was drafted: {result['fallbacks'] or 'no reason given'}"
    if not result["num_accepted_tokens"]:
        return "no draft token was accepted"
    if num_fallen_back:
        return f"{num_fallen_back} of {result['num_requests']} sequences fell back: {result['fallbacks']}"
    num_plain = result["origins"].get(TokenOrigin.PLAIN.value, 0) - result["num_requests"]
    # Where a drafter runs ahead, some steps find no drafts.
    if num_plain > 0.5 * result["total_output_tokens"]:
        return f"{num_plain} of {result['total_output_tokens']} tokens came from steps without drafts"
    return None


def _first_acceptance(workload: Workload, requests: Sequence[Request]) -> float | None:
    """How often a chain's first token was accepted, what the pair's agreement predicts; None where it is not known.

    Chains are taken for K long. Those of a drafter that runs ahead may be shorter, and how many there were is not told.
    """
    if workload.num_draft_tokens is None:
        return None
    num_proposals = sum(
        request.outcome.speculation.num_draft_tokens / workload.num_draft_tokens for request in requests
    )
    counts = [request.outcome.speculation.num_accepted_per_position[:1] for request in requests]
    rate = sum(count for first in counts for count in first) / num_proposals if num_proposals else None
    return rate if rate is not None and rate <= 1 else None
