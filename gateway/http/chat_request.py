"""`POST /v1/chat/completions`: its fields, and the generations that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.http.common_request import CommonRequest, RequestModel, UInt32
from gateway.http.unsupported import CHAT
from outrider.protocol.violations import Violations
from outrider.v1 import generation_pb2

# Where a message's text comes in several parts.
_BETWEEN_PARTS = "\n"
# Templates know the older name alone.
_ROLES = {"developer": "system"}


class TextPart(RequestModel):
    """A part of a message; text is all that a language model reads."""

    type: Literal["text"]
    text: str


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(RequestModel):
    """One message of the conversation. What the API's own answers hold may come back with the next request."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart] | None, BeforeValidator(_parts)] = None
    name: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[None], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it."""
        text = _BETWEEN_PARTS.join(part.text for part in self.content or ())
        message = {"role": _ROLES.get(self.role, self.role), "content": text}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(CommonRequest):
    """The body of `/v1/chat/completions`."""

    # A chat template writes them itself.
    needs_special_tokens = False

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    # Variables for the model's chat template, as in vLLM's API.
    chat_template_kwargs: dict[str, Any] | None = None
    # Whether the text ends where the assistant's next message begins, or within the last message, which then goes on.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # A hint for speed.
    prediction: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def unsupported(self) -> Mapping[str, tuple[Any, ...]]:
        return {**CHAT, "best_of": (None, self.num_choices)}

    def note_violations(self, violations: Violations) -> None:
        super().note_violations(violations)
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                violations.add(f"messages[{index}].content", "must be there")
        if self.top_logprobs is not None and not self.logprobs:
            violations.add("top_logprobs", "is valid with logprobs true only")
        if self.continue_final_message and self.add_generation_prompt:
            violations.add("continue_final_message", "does not go with add_generation_prompt true")

    @property
    def begins_message(self) -> bool:
        """Whether the assistant's next message begins behind the conversation."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    def field_names(self) -> dict[str, str]:
        return {**super().field_names(), "prompt": "messages", "token_ids": "messages", "logprobs": "top_logprobs"}

    def options(self, *, index: int) -> generation_pb2.GenerateRequest:
        request = super().options(index=index)
        if self.logprobs:
            request.logprobs = self.top_logprobs or 0
        return request

    def generations(self, prompt: str) -> list[generation_pb2.GenerateRequest]:
        """One for each choice, in order of their indices, behind the rendered conversation."""
        requests = [self.options(index=index) for index in range(self.num_choices)]
        for request in requests:
            request.prompt = prompt
        return requests
