"""What a request must hold to: every rule that the proto's comments state, checked before anything is spent on it."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.served_model import ServedModel
from outrider.protocol.errors import InvalidArgumentError, Reason
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.violations import Violations
from outrider.v1 import common_pb2, generation_pb2

MAX_REQUEST_ID_LENGTH = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_DRAFT_TOKENS = 32
MAX_LOGPROBS = 20


def check_request(request: generation_pb2.GenerateRequest, model: ServedModel, *, has_tokenizer: bool) -> None:
    """Raise InvalidArgumentError, naming every bad field as in the request, for all that shows without tokenizing."""
    violations = Violations()
    with violations.collecting():
        _check_input(request, model, has_tokenizer=has_tokenizer)
    with violations.collecting():
        check_options(request, model, has_tokenizer=has_tokenizer)
    violations.check()


def check_options(request: generation_pb2.GenerateRequest, model: ServedModel, *, has_tokenizer: bool) -> None:
    """The same for all but the prompt."""
    violations = Violations()
    if len(request.request_id) > MAX_REQUEST_ID_LENGTH:
        violations.add(
            "request_id", f"has {len(request.request_id)} characters, at most {MAX_REQUEST_ID_LENGTH} are taken"
        )
    with violations.collecting():
        SamplingParameters.from_message(request.sampling, vocabulary_size=model.vocabulary_size)
    _check_stopping(request.stopping, model, violations, has_tokenizer=has_tokenizer)
    is_greedy = request.sampling.HasField("temperature") and request.sampling.temperature == 0
    _check_speculation(request.speculation, violations, is_greedy=is_greedy)
    if request.HasField("logprobs") and request.logprobs > MAX_LOGPROBS:
        violations.add("logprobs", f"must be at most {MAX_LOGPROBS}, is {request.logprobs}")
    violations.check()


def kept_tokens(request: generation_pb2.GenerateRequest, token_ids: Sequence[int], model: ServedModel) -> Sequence[int]:
    """What is left of a prompt: its last tokens, as many as the request says, or all."""
    if not request.HasField("truncate_prompt_tokens"):
        return token_ids
    num_kept = request.truncate_prompt_tokens
    if num_kept == 0:
        if not model.context_length:
            return token_ids
        num_kept = max(1, model.context_length - max(1, request.stopping.max_tokens))
    return token_ids[-num_kept:]


def check_prompt(field: str, token_ids: Sequence[int], model: ServedModel) -> None:
    """Raise InvalidArgumentError, naming `field`, unless the model can generate a token behind the prompt."""
    if not token_ids:
        raise InvalidArgumentError(field, "must hold at least one token")
    length, context = len(token_ids), model.context_length
    if context and length > context:
        problem = f"has {length} tokens, the model's context length is {context}"
        raise InvalidArgumentError(field, problem, Reason.CONTEXT_LENGTH_EXCEEDED)
    if context and length == context:
        problem = f"has {length} tokens and fills the model's context length of {context}: no token can be generated"
        raise InvalidArgumentError(field, problem, Reason.CONTEXT_LENGTH_EXCEEDED)
    if max(token_ids) >= model.vocabulary_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= model.vocabulary_size)
        problem = f"token id {token_ids[index]} at index {index} is not below the vocabulary size"
        raise InvalidArgumentError(field, f"{problem} {model.vocabulary_size}", Reason.UNKNOWN_TOKEN_ID)


def _check_input(request: generation_pb2.GenerateRequest, model: ServedModel, *, has_tokenizer: bool) -> None:
    match request.WhichOneof("input"):
        case "prompt":
            if not request.prompt:
                raise InvalidArgumentError("prompt", "must not be empty")
            if not has_tokenizer:
                problem = "this gateway has no tokenizer, send token_ids"
                raise InvalidArgumentError("prompt", problem, Reason.NO_TOKENIZER)
        case "token_ids":
            check_prompt("token_ids", kept_tokens(request, request.token_ids.ids, model), model)
        case _:
            raise InvalidArgumentError("prompt", "one of prompt and token_ids must be set", Reason.MISSING_FIELD)


def _check_stopping(
    stopping: generation_pb2.StoppingParameters, model: ServedModel, violations: Violations, *, has_tokenizer: bool
) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        violations.add("stopping.max_tokens", "must be at least 1")
    elif stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
        violations.add("stopping.min_tokens", f"{stopping.min_tokens} is above max_tokens, {stopping.max_tokens}")
    with violations.collecting():
        _check_stop_strings(stopping.stop, has_tokenizer=has_tokenizer)
    with violations.collecting():
        _check_stop_token_ids(stopping.stop_token_ids, model)


def _check_stop_strings(strings: Sequence[str], *, has_tokenizer: bool) -> None:
    name = "stopping.stop"
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(name, f"has {len(strings)} strings, at most {MAX_STOP_STRINGS} are taken")
    for index, stop in enumerate(strings):
        if not 1 <= len(stop) <= MAX_STOP_STRING_LENGTH:
            limits = f"must have 1 to {MAX_STOP_STRING_LENGTH}"
            raise InvalidArgumentError(name, f"the string at index {index} has {len(stop)} characters, {limits}")
    if strings and not has_tokenizer:
        raise InvalidArgumentError(name, "this gateway has no tokenizer, send stop_token_ids", Reason.NO_TOKENIZER)


def _check_stop_token_ids(token_ids: Sequence[int], model: ServedModel) -> None:
    name = "stopping.stop_token_ids"
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgumentError(name, f"has {len(token_ids)} token ids, at most {MAX_STOP_TOKEN_IDS} are taken")
    for token_id in token_ids:
        if token_id >= model.vocabulary_size:
            problem = f"token id {token_id} is not below the vocabulary size {model.vocabulary_size}"
            raise InvalidArgumentError(name, problem, Reason.UNKNOWN_TOKEN_ID)


def _check_speculation(
    speculation: generation_pb2.SpeculationParameters, violations: Violations, *, is_greedy: bool
) -> None:
    # An enum of proto3 is open: a number from a newer client arrives as it was sent.
    if speculation.mode not in generation_pb2.SpeculationMode.values():
        violations.add("speculation.mode", f"{speculation.mode} is not a known mode")
    if speculation.HasField("max_draft_tokens") and not 1 <= speculation.max_draft_tokens <= MAX_DRAFT_TOKENS:
        violations.add(
            "speculation.max_draft_tokens", f"must be from 1 to {MAX_DRAFT_TOKENS}, is {speculation.max_draft_tokens}"
        )
    if speculation.verification not in common_pb2.Verification.values():
        violations.add("speculation.verification", f"{speculation.verification} is not a known way of verifying")
    if speculation.verification == common_pb2.VERIFICATION_GREEDY and not is_greedy:
        violations.add("speculation.verification", "GREEDY is valid with sampling.temperature 0 only")
