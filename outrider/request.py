"""Turns keyword arguments into a GenerateRequest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from typing import Any, TypedDict

from google.protobuf.message import Message

from outrider.errors import InvalidRequestError
from outrider.protocol.verification import Verification
from outrider.v1 import common_pb2, generation_pb2


class GenerateOptions(TypedDict, total=False):
    """The keywords of `generate` and `stream`; one left out, or None, takes the service's default."""

    max_tokens: int | None
    """Most tokens to generate; default: up to the model's context length."""
    temperature: float | None
    """0 is greedy; default 1."""
    top_k: int | None
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float | None
    """Keep the smallest set of tokens with this probability."""
    min_p: float | None
    """Keep tokens with at least this share of the most likely token's probability."""
    repetition_penalty: float | None
    """1 is off."""
    presence_penalty: float | None
    """0 is off."""
    frequency_penalty: float | None
    """0 is off."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these token ids."""
    seed: int | None
    """The same seed and request give the same tokens, see `Verification.COUPLED`; default: drawn, see `Started.seed`.

    Whoever knows it can predict tokens."""
    stop: str | Sequence[str] | None
    """The text ends before the first of these strings."""
    stop_token_ids: Iterable[int] | None
    """Token ids that end the completion."""
    ignore_eos: bool
    """Go on past the model's end-of-sequence tokens."""
    min_tokens: int | None
    """So many tokens come before any that ends the completion; until then, stop strings do not count either."""
    include_stop: bool
    """The text has the stop string, or the token's text, that ended it."""
    speculation: bool
    """False decodes with the target alone; default True."""
    max_draft_tokens: int | None
    """Most draft tokens a step, 1 to 32; default: the verifier's setting."""
    verification: Verification | str | None
    """Default: greedy at temperature 0; above, coupled with a seed, and the verifier's setting without. See
    `SpeculationStatistics.verification`."""
    logprobs: int | None
    """Report log-probabilities, with those of this many most likely tokens."""
    token_texts: bool
    """Report each token's own share of the text, `Token.text`; default False."""
    show_special_tokens: bool
    """Show special tokens in the text; default False."""
    has_special_tokens: bool
    """The prompt's text has those special tokens that the tokenizer would add; default False."""
    truncate_prompt_tokens: int | None
    """Keep so many of the prompt's last tokens; 0: as many as fit. Default: a prompt that is too long is refused."""
    prompt_token_ids: bool
    """Report the prompt's token ids, `Started.prompt_token_ids`; default False."""
    request_id: str
    """For logs and traces; default: drawn, see `Started.request_id`."""


def build_request(
    prompt: str | None,
    token_ids: Iterable[int] | None,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Iterable[int] | None = None,
    ignore_eos: bool = False,
    min_tokens: int | None = None,
    include_stop: bool = False,
    speculation: bool = True,
    max_draft_tokens: int | None = None,
    verification: Verification | str | None = None,
    logprobs: int | None = None,
    token_texts: bool = False,
    show_special_tokens: bool = False,
    has_special_tokens: bool = False,
    truncate_prompt_tokens: int | None = None,
    prompt_token_ids: bool = False,
    request_id: str = "",
) -> generation_pb2.GenerateRequest:
    """The message for these options. Which values make sense is the gateway's to say: it alone knows the model.

    Raises InvalidRequestError for a value that the message cannot hold, such as a negative count.
    """
    if prompt is not None and token_ids is not None:
        raise InvalidRequestError("prompt: give a prompt or token_ids, not both")
    request = generation_pb2.GenerateRequest()
    _set(
        request,
        "",
        request_id=request_id,
        prompt=prompt,
        logprobs=logprobs,
        token_texts=token_texts,
        show_special_tokens=show_special_tokens,
        has_special_tokens=has_special_tokens,
        truncate_prompt_tokens=truncate_prompt_tokens,
        prompt_token_ids=prompt_token_ids,
    )
    if token_ids is not None:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, "token_ids", token_ids)
    _set(
        request.sampling,
        "sampling.",
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    for token_id, bias in (logit_bias or {}).items():
        try:
            request.sampling.logit_bias[token_id] = bias
        except ValueError as error:
            raise InvalidRequestError(f"sampling.logit_bias: {error}") from error
    _set(
        request.stopping,
        "stopping.",
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        include_stop=include_stop,
    )
    _extend(request.stopping.stop, "stopping.stop", [stop] if isinstance(stop, str) else stop or ())
    _extend(request.stopping.stop_token_ids, "stopping.stop_token_ids", stop_token_ids or ())
    mode = generation_pb2.SPECULATION_MODE_AUTO if speculation else generation_pb2.SPECULATION_MODE_OFF
    _set(request.speculation, "speculation.", mode=mode, max_draft_tokens=max_draft_tokens)
    if verification is not None:
        request.speculation.verification = _verification(verification)
    return request


def _verification(word: str) -> common_pb2.Verification:
    try:
        return Verification(word).to_message()
    except ValueError:
        known = ", ".join(Verification)
        raise InvalidRequestError(f"speculation.verification: {word!r} is not known, only {known}") from None


def _set(message: Message, path: str, **fields: object) -> None:
    for name, value in fields.items():
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except ValueError as error:
            raise InvalidRequestError(f"{path}{name}: {error}") from error


def _extend(values: MutableSequence[Any], field: str, more: Iterable[object]) -> None:
    try:
        values.extend(more)
    except ValueError as error:
        raise InvalidRequestError(f"{field}: {error}") from error
