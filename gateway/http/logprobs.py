"""Log-probabilities in both shapes of OpenAI's API. They are the target's own, before temperature and filters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.token_bytes import token_text
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2, generation_pb2

# JSON has no infinities; this is what clients of other servers find for a probability of zero.
LOWEST = -9999.0


class TokenNames:
    """How tokens are shown; by their ids alone where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def data(self, token_id: int) -> bytes:
        """The token's bytes."""
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """The token's text."""
        return token_text(self.data(token_id))


def completion_logprobs(
    tokens: Iterable[generation_pb2.Token], names: TokenNames, num_characters: int
) -> dict[str, list[Any]]:
    """The `logprobs` object of a completion: parallel lists. `num_characters` of the text stand before the tokens."""
    logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        logprobs["tokens"].append(names.text(token.id))
        logprobs["token_logprobs"].append(_number(token.logprobs.chosen))
        logprobs["top_logprobs"].append({names.text(top.token_id): _number(top) for top in token.logprobs.top})
        logprobs["text_offset"].append(num_characters)
        num_characters += len(token.text)
    return logprobs


def chat_logprobs(tokens: Iterable[generation_pb2.Token], names: TokenNames) -> dict[str, Any]:
    """The `logprobs` object of a chat completion: one entry a token."""
    content = [
        {
            **_entry(token.logprobs.chosen, names),
            "top_logprobs": [_entry(top, names) for top in token.logprobs.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(logprob: common_pb2.TokenLogprob, names: TokenNames) -> dict[str, Any]:
    data = names.data(logprob.token_id)
    return {"token": token_text(data), "logprob": _number(logprob), "bytes": list(data)}


def _number(logprob: common_pb2.TokenLogprob) -> float:
    return max(logprob.logprob, LOWEST)
