"""`POST /v1/completions`: its fields, and the generations that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainValidator

from gateway.http.common_request import MAX_CHOICES, CommonRequest, UInt32
from gateway.http.unsupported import COMPLETION, refuse
from outrider.protocol.errors import InvalidArgumentError
from outrider.v1 import generation_pb2

DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """The prompts of a string, a list of token ids, or a list of either."""
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    if isinstance(value, list) and value:
        are_prompts = all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value)
        if are_prompts:
            return value
    raise ValueError("must be a string, a list of token ids, or a list of either, and not empty")


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < 1 << 32 for item in value)


class CompletionRequest(CommonRequest):
    """The body of `/v1/completions`."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: UInt32 | None = None
    echo: bool | None = None

    @property
    def unsupported(self) -> Mapping[str, tuple[Any, ...]]:
        return {**COMPLETION, "best_of": (None, self.num_choices)}

    def check(self) -> None:
        """Raise InvalidArgumentError for what fits no field alone, or is not supported."""
        self.check_stream_options()
        refuse(self.extra, self.unsupported)
        if self.echo and self.logprobs is not None:
            raise InvalidArgumentError("echo", "does not go with logprobs: a prompt's are not computed")
        if len(self.prompt) * self.num_choices > MAX_CHOICES:
            raise InvalidArgumentError(
                "n", f"{self.num_choices} for each of {len(self.prompt)} prompts is more than {MAX_CHOICES} completions"
            )

    def generations(self) -> list[generation_pb2.GenerateRequest]:
        """One for each choice, in order of their indices: all of the first prompt, all of the second, and so on."""
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        requests: list[generation_pb2.GenerateRequest] = []
        for prompt in self.prompt:
            for _ in range(self.num_choices):
                request = self.message(index=len(requests), max_tokens=max_tokens)
                if isinstance(prompt, str):
                    request.prompt = prompt
                else:
                    request.token_ids.ids.extend(prompt)
                if self.logprobs is not None:
                    # Where a token stands in the text is seen from each token's own part of it.
                    request.logprobs, request.token_texts = self.logprobs, True
                requests.append(request)
        return requests
