"""What the two kinds of completion answer with: whole, and piece by piece."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.http.errors import api_name
from gateway.http.logprobs import TokenNames, chat_logprobs, completion_logprobs
from gateway.request_trace import FINISH_REASONS
from outrider.protocol.verification import Verification
from outrider.protocol.words import word
from outrider.v1 import common_pb2, generation_pb2


@dataclass
class Choice:
    """One completion as it comes in; its text and tokens are kept for an answer in one piece alone."""

    index: int
    # Text that stands before the completion: the prompt, where it is to be echoed.
    prefix: str = ""
    started: generation_pb2.Started = field(default_factory=generation_pb2.Started)
    finished: generation_pb2.Finished = field(default_factory=generation_pb2.Finished)
    texts: list[str] = field(default_factory=list)
    tokens: list[generation_pb2.Token] = field(default_factory=list)
    # Of the text that a stream has shown, the prefix included.
    num_characters: int = 0

    def __post_init__(self) -> None:
        self.num_characters = len(self.prefix)


class Answer(ABC):
    """The JSON objects of one request's answer, made from the events of its choices."""

    object_name: str
    chunk_name: str
    id_prefix: str
    # Whether each choice has a prompt of its own, as far as the answer shows.
    has_prompts: bool

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        fingerprint: str,
        names: TokenNames,
        prefixes: Sequence[str],
        num_choices: int,
        has_logprobs: bool,
        has_tokens: bool,
        has_token_ids: bool = False,
    ) -> None:
        """`prefixes` has the text before each choice; `num_choices` of them in a row share a prompt."""
        self._head = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._fingerprint = fingerprint
        self._names = names
        self._num_choices = num_choices
        self._has_logprobs = has_logprobs
        self._has_tokens = has_tokens
        self._has_token_ids = has_token_ids
        self._keeps_tokens = has_logprobs or has_tokens or has_token_ids
        self.choices = [Choice(index, prefix) for index, prefix in enumerate(prefixes)]

    @abstractmethod
    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The parts of a choice's first object in a stream, None where there is nothing to say yet."""

    @abstractmethod
    def piece(self, text: str) -> dict[str, Any]:
        """The part of a choice in a stream that holds new text."""

    @abstractmethod
    def complete(self, text: str) -> dict[str, Any]:
        """The part of a whole choice that holds its text."""

    @abstractmethod
    def logprobs(self, choice: Choice, tokens: Sequence[generation_pb2.Token]) -> dict[str, Any]:
        """The log-probabilities of tokens behind `choice.num_characters`."""

    def keep(self, choice: Choice, chunk: generation_pb2.Chunk) -> None:
        """Take new tokens of a choice, for the answer in one piece."""
        choice.texts.append(chunk.text)
        if self._keeps_tokens:
            choice.tokens.extend(chunk.tokens)

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, once every choice is finished."""
        choices = []
        for choice in self.choices:
            item = {"index": choice.index, **self.complete(choice.prefix + "".join(choice.texts))}
            item |= self._details(choice, choice.tokens) | self._ending(choice)
            choices.append(item | self._prompt(choice, is_of_choice=True))
        prompt = self._prompt(self.choices[0], is_of_choice=False)
        return self._object(self.object_name, choices) | prompt | {"usage": self.usage()}

    def starts(self, choice: Choice) -> dict[str, Any] | None:
        """The first object of a choice in a stream."""
        opening = self.opening(choice)
        if opening is None:
            return None
        item = {"index": choice.index, **opening, "logprobs": None, "finish_reason": None}
        item |= self._prompt(choice, is_of_choice=True)
        return self._object(self.chunk_name, [item]) | self._prompt(choice, is_of_choice=False)

    def continues(self, choice: Choice, chunk: generation_pb2.Chunk) -> dict[str, Any] | None:
        """The object of a stream for new tokens, None where there is nothing to show yet."""
        if not chunk.text and not (chunk.tokens and self._keeps_tokens):
            return None
        item = {
            "index": choice.index,
            **self.piece(chunk.text),
            **self._details(choice, chunk.tokens),
            "finish_reason": None,
        }
        choice.num_characters += len(chunk.text)
        return self._object(self.chunk_name, [item])

    def ends(self, choice: Choice) -> dict[str, Any]:
        """The last object of a choice in a stream."""
        item = {"index": choice.index, **self.piece(""), "logprobs": None, **self._ending(choice)}
        return self._object(self.chunk_name, [item])

    def usage_piece(self) -> dict[str, Any]:
        """The object of a stream that holds the usage alone."""
        return self._object(self.chunk_name, []) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once, however many completions it has.

        A predicted token is a draft token. Rejected ones are not among the completion's.
        """
        prompts = sum(choice.finished.usage.num_prompt_tokens for choice in self.choices[:: self._num_choices])
        outputs = sum(choice.finished.usage.num_output_tokens for choice in self.choices)
        drafted = sum(choice.finished.speculation.num_draft_tokens for choice in self.choices)
        accepted = sum(choice.finished.speculation.num_accepted_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": outputs,
            "total_tokens": prompts + outputs,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": name, "system_fingerprint": self._fingerprint, "choices": choices}

    def _details(self, choice: Choice, tokens: Sequence[generation_pb2.Token]) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": self.logprobs(choice, tokens) if self._has_logprobs else None}
        if self._has_tokens:
            details["tokens"] = [
                {"id": token.id, "text": token.text, "origin": word(common_pb2.TokenOrigin, token.origin)}
                for token in tokens
            ]
        if self._has_token_ids:
            details["token_ids"] = [token.id for token in tokens]
        return details

    def _prompt(self, choice: Choice, *, is_of_choice: bool) -> dict[str, Any]:
        """A choice's prompt where token ids were asked for and this is the object to show it."""
        if not self._has_token_ids or is_of_choice != self.has_prompts:
            return {}
        return {"prompt_token_ids": list(choice.started.prompt_token_ids)}

    def _ending(self, choice: Choice) -> dict[str, Any]:
        finished = choice.finished
        return {"finish_reason": FINISH_REASONS[finished.finish_reason], "outrider": _report(choice.started, finished)}


class CompletionAnswer(Answer):
    """Of `/v1/completions`."""

    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"
    has_prompts = True

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return {"text": choice.prefix} if choice.prefix or self._has_token_ids else None

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    complete = piece

    def logprobs(self, choice: Choice, tokens: Sequence[generation_pb2.Token]) -> dict[str, Any]:
        return completion_logprobs(tokens, self._names, choice.num_characters)


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    has_prompts = False

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def complete(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, choice: Choice, tokens: Sequence[generation_pb2.Token]) -> dict[str, Any]:
        return chat_logprobs(tokens, self._names)


def _report(started: generation_pb2.Started, finished: generation_pb2.Finished) -> dict[str, Any]:
    """What OpenAI's API has no place for: how to repeat the choice, and what speculation did."""
    speculation, timings = finished.speculation, finished.timings
    return {
        "seed": started.seed,
        "finish_reason": word(generation_pb2.FinishReason, finished.finish_reason),
        "stop_string": finished.stop_string or None,
        "adjustments": [
            {"field": api_name(adjustment.field), "detail": adjustment.detail} for adjustment in started.adjustments
        ],
        "speculation": {
            "verification": Verification.from_message(speculation.verification),
            "steps": speculation.num_steps,
            "drafted": speculation.num_draft_tokens,
            "accepted": speculation.num_accepted_tokens,
            "accepted_per_position": list(speculation.num_accepted_per_position),
            "fallbacks": [
                {"reason": word(common_pb2.FallbackReason, fallback.reason), "position": fallback.position}
                for fallback in speculation.fallbacks
            ],
        },
        "timing": {
            "queue_seconds": timings.queue_seconds,
            "prefill_seconds": timings.prefill_seconds,
            "time_to_first_token_seconds": timings.time_to_first_token_seconds,
            "total_seconds": timings.total_seconds,
        },
    }
