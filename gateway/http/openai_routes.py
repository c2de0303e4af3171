"""`/v1/…`: OpenAI's API over the gateway's own generation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth import Caller
from gateway.http.answer import Answer, ChatAnswer, CompletionAnswer
from gateway.http.chat_request import ChatRequest
from gateway.http.chat_template import BadTemplateError, ChatTemplate
from gateway.http.choices import ChoiceRunner
from gateway.http.common_request import CommonRequest
from gateway.http.completion_request import CompletionRequest
from gateway.http.disconnect import ClientLeftError
from gateway.http.errors import ApiError, from_exception
from gateway.http.exchange import Exchange
from gateway.http.host import check_host
from gateway.http.ignored_fields import note_ignored, refuse_unknown
from gateway.http.logprobs import TokenNames
from gateway.http.request_body import parse_body, read_body
from gateway.validation import MAX_REQUEST_ID_LENGTH
from outrider.service.settings import BadSettingsError
from outrider.v1 import generation_pb2

if TYPE_CHECKING:
    from gateway.http.app import Front

MODELS, COMPLETIONS, CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"
# Room for what tells the choices of a request apart.
MAX_ID_LENGTH = MAX_REQUEST_ID_LENGTH - len("-127")

# What handles a request: with its id and its caller, to an answer that is an ASGI application.
Handler = Callable[[Request, str, Caller], Awaitable[ASGIApp]]

R = TypeVar("R", CompletionRequest, ChatRequest)


def openai_routes(front: Front) -> list[BaseRoute]:
    """For the application. Raises BadSettingsError when the chat template that the settings name is not usable."""
    api = _Api(front)
    return [
        Route(MODELS, _Endpoint(front, api.models), methods=["GET"]),
        Route(MODELS + "/{model:path}", _Endpoint(front, api.model), methods=["GET"]),
        Route(COMPLETIONS, _Endpoint(front, api.completions), methods=["POST"]),
        Route(CHAT, _Endpoint(front, api.chat), methods=["POST"]),
    ]


class _Api:
    """The handlers. Each raises ApiError or OutriderError."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())
        self._names = TokenNames(front.tokenizer)
        self._template: ChatTemplate | None = None
        self._no_template = "this gateway has no tokenizer"
        if front.tokenizer is not None:
            self._no_template = "the model has no chat template, use /v1/completions"
            try:
                self._template = ChatTemplate.load(front.settings.tokenizer, front.settings.chat_template)
            except BadTemplateError as error:
                if front.settings.chat_template is not None:
                    raise BadSettingsError(f"chat_template: {error}") from error
                # What a model came with does not keep it from completing text.
                self._no_template = str(error)

    async def models(self, request: Request, request_id: str, caller: Caller) -> ASGIApp:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request, request_id: str, caller: Caller) -> ASGIApp:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def completions(self, request: Request, request_id: str, caller: Caller) -> ASGIApp:
        asked = await self._parsed(request, CompletionRequest)
        prefixes = [""] * len(asked.prompt)
        if asked.echo:
            prefixes = [prompt if isinstance(prompt, str) else self._text(prompt) for prompt in asked.prompt]
        answer = CompletionAnswer(
            request_id=request_id,
            model=self._front.generator.model_name,
            fingerprint=self._fingerprint(),
            names=self._names,
            prefixes=[prefix for prefix in prefixes for _ in range(asked.num_choices)],
            num_choices=asked.num_choices,
            has_logprobs=asked.logprobs is not None,
            has_tokens=bool(asked.return_tokens),
            has_token_ids=bool(asked.return_token_ids),
        )
        runner = self._runner(request, asked, caller, COMPLETIONS, "text_completion")
        return self._exchange(runner, asked, asked.generations(), answer, request_id)

    async def chat(self, request: Request, request_id: str, caller: Caller) -> ASGIApp:
        asked = await self._parsed(request, ChatRequest)
        if self._template is None:
            raise ApiError(400, f"chat completions are not to be had: {self._no_template}", code="no_chat_template")
        prompt = await self._template.render(
            [message.for_template() for message in asked.messages],
            asked.chat_template_kwargs or {},
            begins_message=asked.begins_message,
            continues_message=bool(asked.continue_final_message),
        )
        answer = ChatAnswer(
            request_id=request_id,
            model=self._front.generator.model_name,
            fingerprint=self._fingerprint(),
            names=self._names,
            prefixes=[""] * asked.num_choices,
            num_choices=asked.num_choices,
            has_logprobs=bool(asked.logprobs),
            has_tokens=bool(asked.return_tokens),
            has_token_ids=bool(asked.return_token_ids),
        )
        runner = self._runner(request, asked, caller, CHAT, "chat")
        return self._exchange(runner, asked, asked.generations(prompt), answer, request_id)

    def _exchange(
        self,
        runner: ChoiceRunner,
        asked: CommonRequest,
        requests: list[generation_pb2.GenerateRequest],
        answer: Answer,
        request_id: str,
    ) -> ASGIApp:
        for index, request in enumerate(requests):
            request.request_id = request_id if len(requests) == 1 else f"{request_id}-{index}"
        exchange = Exchange(
            runner,
            requests,
            answer,
            is_stream=bool(asked.stream),
            has_usage=asked.has_usage,
            names=asked.field_names(),
        )
        return _adding_headers(exchange, note_ignored(request_id, asked.ignored_fields()))

    def _runner(
        self, request: Request, asked: CommonRequest, caller: Caller, route: str, operation: str
    ) -> ChoiceRunner:
        return ChoiceRunner(
            generator=self._front.generator,
            telemetry=self._front.telemetry,
            caller=caller,
            route=route,
            operation=operation,
            parent=request.headers.get("traceparent", ""),
            trace_prompts=self._front.settings.trace_prompts,
            attributes={"gen_ai.request.stream": bool(asked.stream)},
        )

    async def _parsed(self, request: Request, kind: type[R]) -> R:
        """The request in the body, checked for all that shows before it is rendered or tokenized."""
        settings = self._front.settings
        asked = await parse_body(await read_body(request, settings.http_max_body_bytes), kind)
        if settings.strict_requests:
            refuse_unknown(asked.ignored_fields())
        self._check_model(asked.model)
        asked.check(self._front.pool.model, has_tokenizer=self._front.tokenizer is not None)
        return asked

    def _check_model(self, name: str | None) -> None:
        served = self._front.generator.model_name
        if name is not None and name != served:
            message = f"The model {name!r} does not exist: this gateway serves {served!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _text(self, token_ids: list[int]) -> str:
        tokenizer = self._front.tokenizer
        if tokenizer is None:
            raise ApiError(400, "echo: this gateway has no tokenizer", param="echo")
        return tokenizer.decode(token_ids)

    def _fingerprint(self) -> str:
        return f"fp_{self._front.pool.model.revision[:12]}"

    def _model(self) -> dict[str, object]:
        return {
            "id": self._front.generator.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            # As vLLM reports it; null where the model has no limit.
            "max_model_len": self._front.pool.model.context_length or None,
        }


class _Endpoint:
    """What every route of the API does around its handler: who calls, the request's id, errors in the API's shape."""

    def __init__(self, front: Front, handle: Handler) -> None:
        self._front = front
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        request_id = uuid.uuid4().hex
        headers = {"x-request-id": request_id}
        try:
            request_id = headers["x-request-id"] = _request_id(request) or request_id
            check_host(request, self._front.host)
            caller = self._front.authenticate(request.headers.get("authorization"))
            answer = await self._handle(request, request_id, caller)
            await answer(scope, receive, _with_headers(send, headers))
        except (ClientLeftError, ClientDisconnect):
            # There is nobody to answer; what the request held is given back.
            pass
        except Exception as error:
            await from_exception(error, {}).response()(scope, receive, _with_headers(send, headers))


def _request_id(request: Request) -> str:
    request_id = request.headers.get("x-request-id", "")
    if not (request_id.isascii() and request_id.isprintable()):
        raise ApiError(400, "x-request-id: must be printable ASCII characters", param="x-request-id")
    if len(request_id) > MAX_ID_LENGTH:
        message = f"x-request-id: has {len(request_id)} characters, at most {MAX_ID_LENGTH} are taken"
        raise ApiError(400, message, param="x-request-id")
    return request_id


def _adding_headers(answer: ASGIApp, headers: Mapping[str, str]) -> ASGIApp:
    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(scope, receive, _with_headers(send, headers))

    return answering


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return sending
