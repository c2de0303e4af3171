"""Requests as users send them: prompts and outputs of mixed lengths, mixed sampling, at random moments.

Everything is drawn from the seed and a request's number alone: request 7 is the same one whatever the rate, the mode or
the share of special requests, so that two runs can be compared request by request.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from outrider.request import GenerateOptions, build_request

Special = Literal["", "penalties", "logprobs"]

# What a special request asks for beside its temperature.
SPECIAL_OPTIONS: dict[Special, GenerateOptions] = {
    "": {},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 5},
}


@dataclass(frozen=True)
class PlannedRequest:
    """One request, before it is known when it is sent and whether it speculates."""

    number: int
    num_prompt_tokens: int
    num_output_tokens: int
    temperature: float
    special: Special
    seed: int

    def message(self, vocab_size: int, num_draft_tokens: int | None) -> bytes:
        """The serialized GenerateRequest: random token ids, end of sequence ignored. None: without speculation."""
        prompt = random.Random(self.seed).choices(range(vocab_size), k=self.num_prompt_tokens)
        options: GenerateOptions = {
            "max_tokens": self.num_output_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            # Named, as a seed alone would ask for coupling.
            "verification": "rejection",
            "ignore_eos": True,
            "speculation": num_draft_tokens is not None,
            "max_draft_tokens": num_draft_tokens,
            **SPECIAL_OPTIONS[self.special],
        }
        return build_request(None, prompt, **options).SerializeToString()


@dataclass(frozen=True)
class Traffic:
    """What the requests are like. Lengths are log-uniform: as many between 32 and 64 as between 1,024 and 2,048."""

    prompt_tokens: tuple[int, int] = (32, 2048)  # least and most
    output_tokens: tuple[int, int] = (16, 512)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # equally often
    special_share: float = 0.1  # of the requests; half of these with penalties, half with log-probabilities
    seed: int = 0

    @property
    def name(self) -> str:
        """mixed, or uniform where no request is special."""
        return "mixed" if self.special_share else "uniform"

    def uniform(self) -> Self:
        """The same requests, none of them with penalties or log-probabilities."""
        return replace(self, special_share=0.0)

    def requests(self) -> Iterator[PlannedRequest]:
        """The requests in the order in which they are sent, without end."""
        return map(self.request, itertools.count())

    def request(self, number: int) -> PlannedRequest:
        """Request `number`, counted from 0."""
        numbers = random.Random(f"outrider {self.seed} {number}")
        num_prompt_tokens = _log_uniform(numbers, self.prompt_tokens)
        num_output_tokens = _log_uniform(numbers, self.output_tokens)
        temperature = numbers.choice(self.temperatures)
        # Drawn in any case, so that what follows is the same in traffic without special requests.
        is_special, has_penalties = numbers.random() < self.special_share, numbers.random() < 0.5
        special: Special = "" if not is_special else "penalties" if has_penalties else "logprobs"
        return PlannedRequest(
            number, num_prompt_tokens, num_output_tokens, temperature, special, numbers.getrandbits(32)
        )

    def arrival_times(self, rate: float, seconds: float) -> list[float]:
        """When requests arrive, seconds from the start: a Poisson process of `rate` requests a second.

        At another rate they arrive in the same pattern, faster or slower.
        """
        numbers = random.Random(f"outrider {self.seed} arrivals")
        gaps = (numbers.expovariate(1.0) / rate for _ in itertools.count())
        return list(itertools.takewhile(lambda due: due < seconds, itertools.accumulate(gaps)))

    def mean_output_tokens(self) -> float:
        """Output tokens of a request, the mean over the first thousand."""
        return statistics.fmean(self.request(number).num_output_tokens for number in range(1000))


def _log_uniform(numbers: random.Random, limits: tuple[int, int]) -> int:
    low, high = limits
    return min(high, round(math.exp(numbers.uniform(math.log(low), math.log(high)))))
