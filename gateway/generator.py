"""Runs one request from its check to its last event; the same for every front that clients speak to."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

import grpc

from gateway.adjustments import adjust
from gateway.admission import Admission, Place
from gateway.auth import ANONYMOUS, Caller
from gateway.metrics import GatewayMetrics
from gateway.output_text import OutputText
from gateway.request_metrics import RequestMetrics
from gateway.request_trace import RequestTrace
from gateway.sequence import Sequence
from gateway.tokenizer import Tokenizer
from gateway.validation import check_prompt, check_request, kept_tokens
from gateway.verifier_pool import Route, VerifierPool
from gateway.watcher import Event as Event
from gateway.watcher import Watcher
from outrider.protocol.errors import OutriderError
from outrider.protocol.wire import pack_tokens
from outrider.service.logs import Subject, about
from outrider.v1 import generation_pb2, verifier_pb2

logger = logging.getLogger(__name__)

# Statuses that say something about the verifier and nothing about the request: another verifier may do better.
ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class Generator:
    """Generates completions: checks, waits for a place, tokenizes, routes, decodes, and turns tokens into text."""

    def __init__(
        self,
        *,
        pool: VerifierPool,
        admission: Admission,
        tokenizer: Tokenizer | None,
        model_name: str | None = None,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        self._pool = pool
        self._admission = admission
        self._tokenizer = tokenizer
        self._model_name = model_name
        # None where nobody reads them.
        self._metrics = metrics
        # None is ever used again.
        self._sequence_ids = itertools.count(1)
        # Who looks on, if anybody.
        self.watcher: Watcher | None = None

    @property
    def model_name(self) -> str:
        """The model's name for clients. Raises UnavailableError before a verifier has connected."""
        return self._model_name or self._pool.model.name

    async def generate(
        self,
        request: generation_pb2.GenerateRequest,
        request_trace: RequestTrace,
        *,
        caller: Caller = ANONYMOUS,
        seconds_left: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """The events of one completion: Started, Chunks, Finished. Raises OutriderError.

        What is cheap to check is checked before the request waits for a place; tokenizing is not cheap. Nothing comes
        before the verifier's first answer, so that a sequence it refuses can still go elsewhere. Closing the generator
        at any point closes the sequence at the verifier. `seconds_left` is the time until the call's deadline.
        """
        arrived, arrived_ns = time.monotonic(), time.time_ns()
        if self._metrics is not None:
            request_trace.metrics = RequestMetrics(self._metrics, request_trace.operation, self.model_name)
        request_trace.called_by(caller.name)
        check_request(request, self._pool.model, has_tokenizer=self._tokenizer is not None)
        adjustments = adjust(request)
        try:
            place = await self._admission.place(caller, seconds_left=seconds_left)
        finally:
            request_trace.queued(arrived_ns, time.time_ns())
        with place:
            prompt_token_ids = await self._tokenize(request, place, request_trace)
            sequence = Sequence(
                next(self._sequence_ids),
                prompt_token_ids,
                self._output_text(request),
                arrived,
                has_token_texts=request.token_texts,
            )
            place.spend(len(prompt_token_ids))
            started = generation_pb2.Started(
                request_id=request.request_id or uuid.uuid4().hex,
                model=self.model_name,
                num_prompt_tokens=len(prompt_token_ids),
                seed=request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(63),
                adjustments=adjustments,
                prompt_token_ids=prompt_token_ids if request.prompt_token_ids else (),
            )
            if request_trace.metrics is not None:
                request_trace.metrics.tokenized(len(prompt_token_ids))
            request_trace.requested(request, request_id=started.request_id)
            subject = Subject(started.request_id, sequence.sequence_id, request_trace.traceparent)
            with about(subject), self._watched(sequence) as watcher:
                async with aclosing(self._decode(request, sequence, started, place, request_trace)) as events:
                    async for event in events:
                        if watcher is not None:
                            watcher.saw(sequence, event)
                            if not request.token_texts and isinstance(event, generation_pb2.Chunk):
                                # They were made for the watcher alone.
                                for token in event.tokens:
                                    token.ClearField("text")
                        yield event

    @contextmanager
    def _watched(self, sequence: Sequence) -> Iterator[Watcher | None]:
        watcher = self.watcher
        if watcher is None:
            yield None
            return
        sequence.has_token_texts |= watcher.wants_texts
        try:
            yield watcher
        finally:
            watcher.left(sequence)

    def _output_text(self, request: generation_pb2.GenerateRequest) -> OutputText:
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = self._tokenizer.detokenizer(shows_special=request.show_special_tokens)
        stopping = request.stopping
        return OutputText(
            detokenizer, stopping.stop, min_tokens=stopping.min_tokens, includes_stop=stopping.include_stop
        )

    async def _tokenize(
        self, request: generation_pb2.GenerateRequest, place: Place, request_trace: RequestTrace
    ) -> list[int]:
        """The prompt's tokens, those left out that the request does not want."""
        if request.WhichOneof("input") == "token_ids":
            return list(kept_tokens(request, request.token_ids.ids, self._pool.model))
        assert self._tokenizer is not None
        began = time.time_ns()
        encoding = asyncio.ensure_future(
            self._tokenizer.encode(request.prompt, add_special_tokens=not request.has_special_tokens)
        )
        # A long text is tokenized in a thread, which goes on when the client has left.
        place.holds_for(encoding)
        token_ids = await asyncio.shield(encoding)
        request_trace.tokenized(began, time.time_ns(), len(token_ids))
        kept = list(kept_tokens(request, token_ids, self._pool.model))
        check_prompt("prompt", kept, self._pool.model)
        return kept

    async def _decode(
        self,
        request: generation_pb2.GenerateRequest,
        sequence: Sequence,
        started: generation_pb2.Started,
        place: Place,
        request_trace: RequestTrace,
    ) -> AsyncGenerator[Event, None]:
        """Decode on the best verifier; on a second one when the first fails before anything was sent."""
        route = self._pool.route(request.speculation.mode)
        has_sent = False
        try:
            async with aclosing(self._decode_on(route, request, sequence, started, place, request_trace)) as events:
                async for event in events:
                    has_sent = True
                    yield event
            return
        except OutriderError as error:
            if has_sent or error.code not in ELSEWHERE:
                raise
            refused = route
            refused.link.shun()
            try:
                route = self._pool.route(request.speculation.mode, without=(refused.link,))
            except OutriderError:
                raise error from None
            request_trace.refused_by(refused.link.address, error)
            logger.info("going on to verifier %s: %s", route.link.address, error)
            sequence.restart()
        async with aclosing(self._decode_on(route, request, sequence, started, place, request_trace)) as events:
            async for event in events:
                yield event

    async def _decode_on(
        self,
        route: Route,
        request: generation_pb2.GenerateRequest,
        sequence: Sequence,
        started: generation_pb2.Started,
        place: Place,
        request_trace: RequestTrace,
    ) -> AsyncGenerator[Event, None]:
        request_trace.routed(route.link.address, route.drafter_address)
        has_started = False
        texts: list[str] = []
        with self._pool.open(route, _opening(route, request, sequence, started, request_trace)) as updates:
            sequence.opened = time.monotonic()
            while not sequence.is_over:
                num_fallbacks = len(sequence.counts.fallbacks)
                chunk = sequence.apply(await updates.take())
                if sequence.is_over:
                    # At once, and not when a slow client has read the last events.
                    updates.close()
                    if sequence.error is None:
                        # After an error another verifier may be asked, which takes the place.
                        place.free()
                for fallback in sequence.counts.fallbacks[num_fallbacks:]:
                    request_trace.fell_back(fallback)
                if sequence.error is not None and not has_started and chunk is None:
                    raise sequence.error
                if not has_started:
                    has_started = True
                    yield started
                if chunk is not None:
                    place.spend(len(chunk.tokens))
                    if request_trace.has_prompts:
                        texts.append(chunk.text)
                    if request_trace.metrics is not None:
                        request_trace.metrics.delivered(chunk)
                    since = request_trace.sending()
                    yield chunk
                    request_trace.sent(since)
        if sequence.error is not None:
            raise sequence.error
        finished = sequence.finished()
        request_trace.finished(finished, started.model, "".join(texts))
        yield finished


def _opening(
    route: Route,
    request: generation_pb2.GenerateRequest,
    sequence: Sequence,
    started: generation_pb2.Started,
    request_trace: RequestTrace,
) -> verifier_pb2.OpenDecoding:
    opening = verifier_pb2.OpenDecoding(
        sequence_id=sequence.sequence_id,
        token_ids=pack_tokens(sequence.prompt_token_ids + sequence.committed_token_ids),
        num_prompt_tokens=len(sequence.prompt_token_ids),
        sampling=request.sampling,
        max_tokens=request.stopping.max_tokens,
        stop_token_ids=request.stopping.stop_token_ids,
        ignore_eos=request.stopping.ignore_eos,
        min_tokens=request.stopping.min_tokens,
        drafter_address=route.drafter_address,
        no_drafter_reason=route.no_drafter_reason,
        max_draft_tokens=request.speculation.max_draft_tokens,
        verification=request.speculation.verification,
        is_seeded=request.sampling.HasField("seed"),
        traceparent=request_trace.traceparent,
        request_id=started.request_id,
    )
    opening.sampling.seed = started.seed
    if request.HasField("logprobs"):
        opening.logprobs = request.logprobs
    return opening
