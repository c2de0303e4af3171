"""Every rule of the request, each broken alone, with the field's name as in the request."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.served_model import ServedModel
from gateway.validation import check_prompt, check_request
from outrider.protocol.errors import InvalidArgumentError
from outrider.v1 import common_pb2, generation_pb2

MODEL = ServedModel("m", "r", context_length=32, vocabulary_size=100, tokenizer_fingerprint="")


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    """A valid request with some fields replaced; `a__b` is field b of message a."""
    message = generation_pb2.GenerateRequest(prompt="x")
    for name, value in fields.items():
        target: Any = message
        *path, last = name.split("__")
        for part in path:
            target = getattr(target, part)
        if isinstance(value, list):
            getattr(target, last).extend(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                getattr(target, last)[key] = item
        else:
            setattr(target, last, value)
    return message


BAD = [
    ("request_id", {"request_id": "x" * 129}),
    ("prompt", {"prompt": ""}),
    ("token_ids", {"token_ids__ids": []}),
    *[(f"sampling.{name}", {f"sampling__{name}": value}) for name, values in {
        "temperature": (-0.1, math.nan, math.inf),
        "top_p": (0.0, -1.0, 1.01, math.nan),
        "min_p": (-0.01, 1.01, math.nan),
        "repetition_penalty": (0.0, -1.0, 10.1, math.inf),
        "presence_penalty": (-2.1, 2.1, math.nan),
        "frequency_penalty": (-2.1, 2.1, -math.inf),
        "logit_bias": ({5: 100.5}, {5: math.nan}, {100: 1.0}, dict.fromkeys(range(301), 1.0)),
    }.items() for value in values],
    ("stopping.max_tokens", {"stopping__max_tokens": 0}),
    ("stopping.stop", {"stopping__stop": ["x"] * 17}),
    ("stopping.stop", {"stopping__stop": ["x", ""]}),
    ("stopping.stop", {"stopping__stop": ["x" * 1025]}),
    ("stopping.stop_token_ids", {"stopping__stop_token_ids": [1] * 65}),
    ("stopping.stop_token_ids", {"stopping__stop_token_ids": [100]}),
    ("speculation.mode", {"speculation__mode": 9}),
    ("speculation.max_draft_tokens", {"speculation__max_draft_tokens": 0}),
    ("speculation.max_draft_tokens", {"speculation__max_draft_tokens": 33}),
    ("speculation.verification", {"speculation__verification": 9}),
    ("speculation.verification", {"speculation__verification": common_pb2.VERIFICATION_GREEDY}),
    ("speculation.verification", {
        "speculation__verification": common_pb2.VERIFICATION_GREEDY, "sampling__temperature": 0.5}),
    ("logprobs", {"logprobs": 21}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_field_is_named(field: str, fields: dict[str, Any]) -> None:
    message = request(**fields)
    if field == "token_ids":
        message.token_ids.SetInParent()
    with pytest.raises(InvalidArgumentError) as caught:
        check_request(message, MODEL, has_tokenizer=True)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


GOOD: list[dict[str, Any]] = [
    {},
    {"request_id": "x" * 128},
    {"token_ids__ids": [99]},
    {"sampling__temperature": 0.0, "speculation__verification": common_pb2.VERIFICATION_GREEDY},
    {"sampling__top_p": 1.0, "sampling__min_p": 1.0, "sampling__repetition_penalty": 10.0, "sampling__top_k": 10**6},
    {"sampling__presence_penalty": -2.0, "sampling__frequency_penalty": 2.0, "sampling__seed": 2**64 - 1},
    {"sampling__logit_bias": dict.fromkeys(range(100), -100.0)},
    {"stopping__max_tokens": 1, "stopping__stop": ["x" * 1024] * 16, "stopping__stop_token_ids": [99] * 64},
    {"speculation__max_draft_tokens": 32, "speculation__mode": generation_pb2.SPECULATION_MODE_OFF},
    {"logprobs": 20},
]


@pytest.mark.parametrize("fields", GOOD)
def test_values_at_their_limits_pass(fields: dict[str, Any]) -> None:
    check_request(request(**fields), MODEL, has_tokenizer=True)


def test_input_must_be_set() -> None:
    with pytest.raises(InvalidArgumentError, match="one of prompt and token_ids"):
        check_request(generation_pb2.GenerateRequest(), MODEL, has_tokenizer=True)


@pytest.mark.parametrize("field", ["prompt", "stopping.stop"])
def test_text_needs_a_tokenizer(field: str) -> None:
    message = request() if field == "prompt" else request(token_ids__ids=[1], stopping__stop=["x"])
    with pytest.raises(InvalidArgumentError, match="no tokenizer") as caught:
        check_request(message, MODEL, has_tokenizer=False)
    assert caught.value.field == field


def test_prompt_must_leave_room_for_a_token() -> None:
    check_prompt("prompt", [1] * 31, MODEL)
    with pytest.raises(
        InvalidArgumentError, match=r"^prompt: has 32 tokens .* length of 32: no token can be generated"
    ):
        check_prompt("prompt", [1] * 32, MODEL)
    with pytest.raises(InvalidArgumentError, match=r"^token_ids: has 50 tokens, .* length is 32$"):
        check_prompt("token_ids", [1] * 50, MODEL)
    unlimited = ServedModel("m", "r", context_length=0, vocabulary_size=100, tokenizer_fingerprint="")
    check_prompt("prompt", [1] * 5000, unlimited)


def test_unknown_token_id_is_named_with_its_place() -> None:
    with pytest.raises(InvalidArgumentError, match=r"token_ids: token id 100 at index 2 is not below .* 100"):
        check_prompt("token_ids", [1, 99, 100, 101], MODEL)
    with pytest.raises(InvalidArgumentError, match="prompt: must hold at least one token"):
        check_prompt("prompt", [], MODEL)
