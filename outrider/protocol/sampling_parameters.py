"""Sampling parameters, checked in one place for all three services."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from outrider.protocol.errors import InvalidArgumentError, Reason
from outrider.protocol.violations import Violations
from outrider.v1 import common_pb2

MAX_LOGIT_BIAS_ENTRIES = 300
# Far below it, dividing logits by the temperature leaves float32's range. Lower ones but 0 are raised to it: the most
# likely token has nearly all probability at either.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class SamplingParameters:
    """How a sequence is sampled, every default filled in; the proto describes each field and its range."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = field(default=0, repr=False)  # a secret: nothing that shows the parameters shows it

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @cached_property  # asked for each sequence of each step
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p leave anything out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far, or are biased."""
        return bool(self.logit_bias) or (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )

    def to_message(self) -> common_pb2.SamplingParameters:
        """The message that `from_message` reads back."""
        return common_pb2.SamplingParameters(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
        )

    @classmethod
    def from_message(
        cls, message: common_pb2.SamplingParameters, *, vocabulary_size: int = 0, prefix: str = "sampling"
    ) -> SamplingParameters:
        """The parameters of a request, defaults filled in, a temperature that is too low raised.

        Raises InvalidArgumentError naming each bad field as `prefix`.field. Biased token ids are held against
        `vocabulary_size` unless it is 0.
        """
        violations = Violations()

        def number(name: str, default: float, low: float, high: float, *, is_low_open: bool = False) -> float:
            if not message.HasField(name):
                return default
            value: float = getattr(message, name)
            if not math.isfinite(value) or not low <= value <= high or (is_low_open and value == low):
                bounds = f"{'above' if is_low_open else 'at least'} {low:g} and at most {high:g}"
                violations.add(f"{prefix}.{name}", f"must be a number {bounds}, is {value:g}")
            return value

        temperature = number("temperature", 1.0, 0.0, MAX_TEMPERATURE)
        parameters = cls(
            temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
            top_k=message.top_k,
            top_p=number("top_p", 1.0, 0.0, 1.0, is_low_open=True),
            min_p=number("min_p", 0.0, 0.0, 1.0),
            repetition_penalty=number("repetition_penalty", 1.0, 0.0, 10.0, is_low_open=True),
            presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
            frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
            logit_bias=dict(message.logit_bias),
            seed=message.seed,
        )
        with violations.collecting():
            _check_bias(parameters.logit_bias, vocabulary_size, f"{prefix}.logit_bias")
        violations.check()
        return parameters


def _check_bias(bias: Mapping[int, float], vocabulary_size: int, name: str) -> None:
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidArgumentError(name, f"has {len(bias)} entries, at most {MAX_LOGIT_BIAS_ENTRIES} are taken")
    for token_id, value in bias.items():
        if vocabulary_size and token_id >= vocabulary_size:
            problem = f"token id {token_id} is not below the vocabulary size {vocabulary_size}"
            raise InvalidArgumentError(name, problem, Reason.UNKNOWN_TOKEN_ID)
        if not math.isfinite(value) or not -100.0 <= value <= 100.0:
            raise InvalidArgumentError(name, f"the bias of token id {token_id} must be from -100 to 100, is {value:g}")
