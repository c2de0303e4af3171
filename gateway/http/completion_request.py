"""`POST /v1/completions`: its fields, and the generations that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainValidator

from gateway.http.common_request import MAX_CHOICES, CommonRequest, UInt32
from gateway.http.unsupported import COMPLETION
from outrider.protocol.errors import Reason
from outrider.protocol.violations import Violations
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

    needs_special_tokens = True

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: UInt32 | None = None
    echo: bool | None = None

    @property
    def unsupported(self) -> Mapping[str, tuple[Any, ...]]:
        return {**COMPLETION, "best_of": (None, self.num_choices)}

    @property
    def limit(self) -> int | None:
        return DEFAULT_MAX_TOKENS if super().limit is None else super().limit

    def note_violations(self, violations: Violations) -> None:
        super().note_violations(violations)
        if self.echo and self.logprobs is not None:
            problem = "does not go with logprobs: a prompt's are not computed"
            violations.add("echo", problem, Reason.NOT_SUPPORTED)
        if len(self.prompt) * self.num_choices > MAX_CHOICES:
            problem = f"for each of {len(self.prompt)} prompts is more than {MAX_CHOICES} completions"
            violations.add("n", f"{self.num_choices} {problem}")

    def sample(self) -> generation_pb2.GenerateRequest:
        return self._generation(0, self.prompt[0])

    def generations(self) -> list[generation_pb2.GenerateRequest]:
        """One for each choice, in order of their indices: all of the first prompt, all of the second, and so on."""
        prompts = [prompt for prompt in self.prompt for _ in range(self.num_choices)]
        return [self._generation(index, prompt) for index, prompt in enumerate(prompts)]

    def _generation(self, index: int, prompt: Prompt) -> generation_pb2.GenerateRequest:
        request = self.options(index=index)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.token_ids.ids.extend(prompt)
        if self.logprobs is not None:
            # Where a token stands in the text is seen from each token's own part of it.
            request.logprobs, request.token_texts = self.logprobs, True
        return request
