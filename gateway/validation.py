"""What a request must hold to: every rule that the proto's comments state, checked before anything is spent on it."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.served_model import ServedModel
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.v1 import common_pb2, generation_pb2

MAX_REQUEST_ID_LENGTH = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_DRAFT_TOKENS = 32
MAX_LOGPROBS = 20


class PromptTooLongError(InvalidArgumentError):
    """The prompt does not fit the model's context."""


def check_request(request: generation_pb2.GenerateRequest, model: ServedModel, *, has_tokenizer: bool) -> None:
    """Raise InvalidArgumentError, naming the field as in the request, for all that shows without tokenizing."""
    if len(request.request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidArgumentError(
            "request_id", f"has {len(request.request_id)} characters, at most {MAX_REQUEST_ID_LENGTH} are taken"
        )
    _check_input(request, model, has_tokenizer=has_tokenizer)
    sampling = SamplingParameters.from_message(request.sampling, vocabulary_size=model.vocabulary_size)
    _check_stopping(request.stopping, model, has_tokenizer=has_tokenizer)
    _check_speculation(request.speculation, is_greedy=sampling.is_greedy)
    if request.HasField("logprobs") and request.logprobs > MAX_LOGPROBS:
        raise InvalidArgumentError("logprobs", f"must be at most {MAX_LOGPROBS}, is {request.logprobs}")


def check_prompt(field: str, token_ids: Sequence[int], model: ServedModel) -> None:
    """Raise InvalidArgumentError, naming `field`, unless the model can generate a token behind the prompt.

    One that is too long raises PromptTooLongError.
    """
    if not token_ids:
        raise InvalidArgumentError(field, "must hold at least one token")
    length, context = len(token_ids), model.context_length
    if context and length > context:
        raise PromptTooLongError(field, f"has {length} tokens, the model's context length is {context}")
    if context and length == context:
        raise PromptTooLongError(
            field, f"has {length} tokens and fills the model's context length of {context}: no token can be generated"
        )
    if max(token_ids) >= model.vocabulary_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= model.vocabulary_size)
        _check_known(field, token_ids[index], model, where=f" at index {index}")


def _check_input(request: generation_pb2.GenerateRequest, model: ServedModel, *, has_tokenizer: bool) -> None:
    match request.WhichOneof("input"):
        case "prompt":
            if not request.prompt:
                raise InvalidArgumentError("prompt", "must not be empty")
            if not has_tokenizer:
                raise InvalidArgumentError("prompt", "this gateway has no tokenizer, send token_ids")
        case "token_ids":
            check_prompt("token_ids", request.token_ids.ids, model)
        case _:
            raise InvalidArgumentError("prompt", "one of prompt and token_ids must be set")


def _check_stopping(stopping: generation_pb2.StoppingParameters, model: ServedModel, *, has_tokenizer: bool) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise InvalidArgumentError("stopping.max_tokens", "must be at least 1")
    if len(stopping.stop) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(
            "stopping.stop", f"has {len(stopping.stop)} strings, at most {MAX_STOP_STRINGS} are taken"
        )
    for index, stop in enumerate(stopping.stop):
        if not 1 <= len(stop) <= MAX_STOP_STRING_LENGTH:
            raise InvalidArgumentError(
                "stopping.stop",
                f"the string at index {index} has {len(stop)} characters, must have 1 to {MAX_STOP_STRING_LENGTH}",
            )
    if stopping.stop and not has_tokenizer:
        raise InvalidArgumentError("stopping.stop", "this gateway has no tokenizer, send stop_token_ids")
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgumentError(
            "stopping.stop_token_ids",
            f"has {len(stopping.stop_token_ids)} token ids, at most {MAX_STOP_TOKEN_IDS} are taken",
        )
    for token_id in stopping.stop_token_ids:
        _check_known("stopping.stop_token_ids", token_id, model)


def _check_speculation(speculation: generation_pb2.SpeculationParameters, *, is_greedy: bool) -> None:
    # An enum of proto3 is open: a number from a newer client arrives as it was sent.
    if speculation.mode not in generation_pb2.SpeculationMode.values():
        raise InvalidArgumentError("speculation.mode", f"{speculation.mode} is not a known mode")
    if speculation.HasField("max_draft_tokens") and not 1 <= speculation.max_draft_tokens <= MAX_DRAFT_TOKENS:
        raise InvalidArgumentError(
            "speculation.max_draft_tokens", f"must be from 1 to {MAX_DRAFT_TOKENS}, is {speculation.max_draft_tokens}"
        )
    if speculation.verification not in common_pb2.Verification.values():
        raise InvalidArgumentError(
            "speculation.verification", f"{speculation.verification} is not a known way of verifying"
        )
    if speculation.verification == common_pb2.VERIFICATION_GREEDY and not is_greedy:
        raise InvalidArgumentError("speculation.verification", "GREEDY is valid with sampling.temperature 0 only")


def _check_known(field: str, token_id: int, model: ServedModel, *, where: str = "") -> None:
    if token_id >= model.vocabulary_size:
        raise InvalidArgumentError(
            field, f"token id {token_id}{where} is not below the vocabulary size {model.vocabulary_size}"
        )
