"""Sampling parameters: defaults, ranges, and what reads as default although it is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.v1 import common_pb2


def parse(**fields: Any) -> SamplingParameters:
    return SamplingParameters.from_message(common_pb2.SamplingParameters(**fields), vocabulary_size=100)


def test_defaults() -> None:
    found = parse()
    assert found == SamplingParameters()
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (1.0, 0, 1.0, 0.0)
    assert not found.is_greedy
    assert not found.has_penalties


def test_zero_is_not_unset() -> None:
    """Catches a request for greedy decoding that is sampled at temperature 1."""
    assert parse(temperature=0.0).is_greedy


@pytest.mark.parametrize("value", [1e-30, 0.009, 0.01])
def test_a_temperature_that_is_too_low_is_raised(value: float) -> None:
    """Catches logits that are divided into infinities, and a request to sample that is taken as greedy."""
    found = parse(temperature=value)
    assert found.temperature == 0.01
    assert not found.is_greedy


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.1}, {"logit_bias": {3: 0.0}}],
)
def test_what_needs_the_tokens_so_far(fields: dict[str, Any]) -> None:
    assert parse(**fields).has_penalties


def test_a_message_there_and_back() -> None:
    sent = SamplingParameters(0.7, 5, 0.9, 0.1, 1.2, 0.5, -0.5, {3: 1.5, 99: -2.0}, 2**64 - 1)
    found = SamplingParameters.from_message(sent.to_message(), vocabulary_size=100)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        assert getattr(found, name) == pytest.approx(getattr(sent, name))
    assert (found.top_k, found.logit_bias, found.seed) == (5, {3: 1.5, 99: -2.0}, 2**64 - 1)
    # Once on the wire, nothing changes any more: drafter and verifier must see the same numbers.
    assert SamplingParameters.from_message(found.to_message(), vocabulary_size=100) == found


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.01, 100], [-1, 101]),
        ("top_p", [0.001, 1], [0, 1.001, -1]),
        ("min_p", [0, 1], [-0.001, 1.001]),
        ("repetition_penalty", [0.001, 10], [0, -1, 10.01]),
        ("presence_penalty", [-2, 2], [-2.01, 2.01]),
        ("frequency_penalty", [-2, 2], [-2.01, 2.01]),
    ],
)
def test_ranges(name: str, good: list[float], bad: list[float]) -> None:
    for value in good:
        assert getattr(parse(**{name: value}), name) == pytest.approx(value)
    for value in [*bad, math.nan, math.inf, -math.inf]:
        with pytest.raises(InvalidArgumentError, match=rf"^sampling\.{name}: must be"):
            parse(**{name: value})


def test_all_that_is_bad_is_named_at_once() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(temperature=-1, top_p=7, min_p=0.5, frequency_penalty=3, logit_bias={100: 1.0})
    assert [(found.field, found.reason) for found in caught.value.violations] == [
        ("sampling.temperature", "INVALID_VALUE"),
        ("sampling.top_p", "INVALID_VALUE"),
        ("sampling.frequency_penalty", "INVALID_VALUE"),
        ("sampling.logit_bias", "UNKNOWN_TOKEN_ID"),
    ]


@pytest.mark.parametrize(
    "bias", [{100: 1.0}, {1: 100.1}, {1: -100.1}, {1: math.nan}, dict.fromkeys(range(301), 0.5)], ids=str
)
def test_biases(bias: dict[int, float]) -> None:
    assert parse(logit_bias={99: 100.0, 0: -100.0}).logit_bias == {99: 100.0, 0: -100.0}
    with pytest.raises(InvalidArgumentError, match=r"^sampling\.logit_bias: "):
        parse(logit_bias=bias)


def test_the_prefix_of_a_field_and_an_unknown_vocabulary() -> None:
    message = common_pb2.SamplingParameters(top_p=7, logit_bias={10**6: 1})
    with pytest.raises(InvalidArgumentError, match=r"^open\.sampling\.top_p"):
        SamplingParameters.from_message(message, prefix="open.sampling")
    message.ClearField("top_p")
    assert SamplingParameters.from_message(message).logit_bias == {10**6: 1.0}
