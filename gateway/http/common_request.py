"""The fields that both kinds of completion request have, and what they mean to the gateway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gateway.http.errors import renamed
from gateway.http.unsupported import refuse
from gateway.served_model import ServedModel
from gateway.validation import check_options, check_request
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.verification import Verification
from outrider.protocol.violations import Violations
from outrider.v1 import generation_pb2

# Completions that one HTTP request may ask for, over all its prompts.
MAX_CHOICES = 128
_SEEDS = 1 << 64

# Ranges that mean something are checked with the request itself, for every front alike: this is what a message holds.
UInt32 = Annotated[int, Field(ge=0, lt=1 << 32)]


def listed(value: Any) -> Any:
    """A lone string as a list of one."""
    return [value] if isinstance(value, str) else value


class RequestModel(BaseModel):
    """Types as they are in JSON. Fields that nobody knows are kept apart, for `unknown_fields` to find."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    @property
    def extra(self) -> dict[str, Any]:
        """The fields that this model does not declare."""
        return self.model_extra or {}


def unknown_fields(model: RequestModel, path: str = "") -> Iterator[str]:
    """The names of all fields that nobody knows, as in `messages[1].cache_control`."""
    for name in model.extra:
        yield path + name
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, RequestModel):
            yield from unknown_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, RequestModel):
                    yield from unknown_fields(item, f"{path}{name}[{index}].")


class StreamOptions(RequestModel):
    """How a stream is written."""

    include_usage: bool | None = None
    # Padding against eavesdroppers on packet sizes, which we do not write.
    include_obfuscation: bool | None = None


class CommonRequest(RequestModel):
    """What both kinds share. None takes the default, as leaving the field out does."""

    # Whether the tokenizer's special tokens are added to a prompt where the request does not say.
    needs_special_tokens: ClassVar[bool]

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: UInt32 | None = None
    # The newer name of the same.
    max_completion_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[UInt32, float] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=_SEEDS)] | None = None
    stop: Annotated[list[str] | None, BeforeValidator(listed)] = None

    # Beyond OpenAI's API, named as in vLLM's.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[UInt32] | None = None
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    # -1: as many as fit.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    return_token_ids: bool | None = None
    # Ours.
    speculation: bool | None = None
    max_draft_tokens: UInt32 | None = None
    verification: Literal["greedy", "rejection", "coupled"] | None = None
    return_tokens: bool | None = None

    # Change nothing here: notes for the provider's own books, and hints for speed.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def unsupported(self) -> Mapping[str, tuple[Any, ...]]:
        """Parameters that we know of and cannot honour, with their harmless values."""
        return {}

    @property
    def num_choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def field_names(self) -> dict[str, str]:
        """This request's names of the gateway's fields, where they differ."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"token_ids": "prompt", "request_id": "x-request-id", "max_tokens": limit}

    def ignored_fields(self) -> list[str]:
        """What the request says and nobody reads."""
        return [name for name in unknown_fields(self) if name not in self.unsupported]

    @property
    def limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self, model: ServedModel, *, has_tokenizer: bool) -> None:
        """Raise InvalidArgumentError, naming every bad field as the request does, for all that shows so far."""
        violations = Violations()
        self.note_violations(violations)
        request = self.sample()
        check = check_request if request.WhichOneof("input") else check_options
        try:
            check(request, model, has_tokenizer=has_tokenizer)
        except InvalidArgumentError as error:
            violations.extend(renamed(error.violations, self.field_names()))
        violations.check()

    def note_violations(self, violations: Violations) -> None:
        """Note what fits no field alone, or is not supported."""
        refuse(self.extra, self.unsupported, violations)
        if self.stream_options is not None and not self.stream:
            violations.add("stream_options", "is valid with stream true only")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            problem = "is the older name of max_completion_tokens, and the two differ in this request"
            violations.add("max_tokens", problem)

        if self.truncate_prompt_tokens == 0:
            violations.add("truncate_prompt_tokens", "must be -1 or at least 1")

    def sample(self) -> generation_pb2.GenerateRequest:
        """What the first choice asks of the gateway, without an input where that is still to be rendered."""
        return self.options(index=0)

    def options(self, *, index: int) -> generation_pb2.GenerateRequest:
        """What the choice with this index asks of the gateway, but for its input.

        Choice i draws with seed + i, so that each can be repeated alone.
        """
        request = generation_pb2.GenerateRequest(token_texts=bool(self.return_tokens))
        sampling, stopping, speculation = request.sampling, request.stopping, request.speculation
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if (value := getattr(self, name)) is not None:
                setattr(sampling, name, value)
        if self.top_k is not None:
            sampling.top_k = max(self.top_k, 0)
        if self.seed is not None:
            sampling.seed = (self.seed + index) % _SEEDS
        for token_id, bias in (self.logit_bias or {}).items():
            sampling.logit_bias[token_id] = bias
        if self.limit is not None:
            stopping.max_tokens = self.limit
        stopping.stop.extend(self.stop or ())
        stopping.stop_token_ids.extend(self.stop_token_ids or ())
        stopping.ignore_eos = bool(self.ignore_eos)
        stopping.min_tokens = self.min_tokens or 0
        stopping.include_stop = bool(self.include_stop_str_in_output)
        if self.speculation is False:
            speculation.mode = generation_pb2.SPECULATION_MODE_OFF
        if self.max_draft_tokens is not None:
            speculation.max_draft_tokens = self.max_draft_tokens
        if self.verification is not None:
            speculation.verification = Verification(self.verification).to_message()
        self._set_text_options(request)
        return request

    def _set_text_options(self, request: generation_pb2.GenerateRequest) -> None:
        request.show_special_tokens = self.skip_special_tokens is False
        adds = self.needs_special_tokens if self.add_special_tokens is None else self.add_special_tokens
        request.has_special_tokens = not adds
        if self.truncate_prompt_tokens is not None:
            request.truncate_prompt_tokens = max(self.truncate_prompt_tokens, 0)
        request.prompt_token_ids = bool(self.return_token_ids)
