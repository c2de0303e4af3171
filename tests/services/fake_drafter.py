"""A drafter that can do wrong whatever a drafter can: honest by itself, with a hook for each answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from drafter_service.scripted_drafter import Script
from drafter_service.sequence import DraftSequence
from kernels.limits import MAX_DRAFT_TOKENS
from kernels.random import RANDOM_SCHEME
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.expansions import ROOT, Expansions, pack_expansions
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.verdicts import unpack_verdicts
from outrider.protocol.wire import MAX_CANDIDATES, MAX_CHILDREN, PROTOCOL_VERSION, unpack_tokens
from outrider.v1 import common_pb2, drafter_pb2

LIMITS = DraftLimits(MAX_DRAFT_TOKENS, MAX_CANDIDATES, num_children=MAX_CHILDREN)
# What goes on the wire: a frame, or bytes as they are.
Wire = drafter_pb2.DraftResponse | bytes
# Changes what is sent for one sequence, a root and a chain; the sequence is as it was when it was made.
Hook = Callable[[drafter_pb2.Expansions, DraftSequence], Awaitable[Iterable[Wire]] | Iterable[Wire]]


def frame(*expansions: drafter_pb2.Expansions) -> drafter_pb2.DraftResponse:
    return drafter_pb2.DraftResponse(expansions=expansions)


def refusal(sequence: DraftSequence, reason: drafter_pb2.RefusalReason) -> drafter_pb2.DraftResponse:
    none = drafter_pb2.Refusal(sequence_id=sequence.sequence_id, reason=reason, num_committed=sequence.length)
    return drafter_pb2.DraftResponse(refusals=[none])


def chain_of(
    sequence_id: int, token_ids: Sequence[int], *, num_committed: int, first_id: int, **fields: Any
) -> drafter_pb2.Expansions:
    """A root and a chain of certain first children behind it; `fields` take the place of its arrays."""
    num_nodes = len(token_ids)
    arrays: dict[str, Any] = {
        "sequence_ids": np.array([sequence_id], np.uint64),
        "num_committed": np.array([num_committed]),
        "num_expansions": np.array([num_nodes]),
        "first_ids": np.array([first_id]),
        "parents": np.array([ROOT, *range(first_id, first_id + num_nodes - 1)], np.int32),
        "ranks": np.zeros(num_nodes, np.uint8),
        "child_ids": np.array(token_ids).astype(np.int32)[:, None],
        "probabilities": np.zeros((num_nodes, 1), np.uint16),
        "candidate_ids": np.empty((num_nodes, 0), np.int32),
        "candidate_weights": np.empty((num_nodes, 0), np.uint16),
    }
    return pack_expansions(Expansions(**(arrays | fields)))


def identity(**fields: Any) -> common_pb2.ModelIdentity:
    """The identity of a drafter without a model, which fits every target."""
    defaults: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "random_scheme": RANDOM_SCHEME, "name": "fake"}
    return common_pb2.ModelIdentity(**(defaults | fields))


@dataclass
class FakeDrafter:
    """Drafts what the script says; `hook` may replace what is sent. Notes what it was told."""

    script: Script
    hook: Hook | None = None
    identity: common_pb2.ModelIdentity = field(default_factory=identity)
    # Sent instead of GetInfo's answer.
    info: Wire | bytes | None = None
    says_hello: bool = True
    # Sent in the first frame; None: as a drafter should, with limits like these.
    answer: drafter_pb2.DraftLimits | None = None
    limits: DraftLimits = LIMITS
    address: str = ""
    num_streams: int = 0
    opened: list[int] = field(default_factory=list)
    # Of each sequence that was opened, the most draft tokens that were asked for.
    asked: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    _next_ids: dict[DraftSequence, int] = field(default_factory=dict)

    async def get_info(self, request: Any, context: Any) -> Any:
        return self.info or drafter_pb2.DrafterServiceGetInfoResponse(identity=self.identity, kind="fake")

    async def draft(self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Any) -> AsyncIterator[Wire]:
        self.num_streams += 1
        sequences: dict[int, DraftSequence] = {}
        limits = self.limits
        async for request in requests:
            if request.HasField("identity"):
                limits = self.limits.with_offer(request.limits)
                if self.says_hello:
                    yield drafter_pb2.DraftResponse(limits=self.answer or limits.to_message())
            for close in request.closes:
                self.closed.append(close.sequence_id)
                sequences.pop(close.sequence_id, None)
            wanting = []
            for opening in request.opens:
                self.opened.append(opening.sequence_id)
                self.asked.append(opening.max_draft_tokens)
                sequences[opening.sequence_id] = sequence = self._sequence(opening, limits)
                if not limits.takes_turns:
                    wanting.append(sequence)
            for verdict in unpack_verdicts(request.verdicts):
                found = sequences.get(verdict.sequence_id)
                if found is None:
                    continue
                try:
                    verdict.check(found.length, 0)
                except InvalidArgumentError as error:
                    raise AssertionError("the verifier contradicts itself") from error
                found.token_ids += verdict.token_ids
                wanting.append(found)
            for sequence in wanting:
                for wire in await self._draft(sequence):
                    yield wire

    async def _draft(self, sequence: DraftSequence) -> Iterable[Wire]:
        tokens = list(self.script(sequence.token_ids, sequence.max_draft_tokens))
        if not tokens:
            return [refusal(sequence, drafter_pb2.REFUSAL_REASON_NO_MATCH)]
        first_id = self._next_ids.get(sequence, 0)
        self._next_ids[sequence] = first_id + len(tokens)
        expansions = chain_of(sequence.sequence_id, tokens, num_committed=sequence.length, first_id=first_id)
        if self.hook is None:
            return [frame(expansions)]
        answer = self.hook(expansions, sequence)
        return await answer if isinstance(answer, Awaitable) else answer

    def _sequence(self, opening: drafter_pb2.OpenSequence, limits: DraftLimits) -> DraftSequence:
        return DraftSequence(
            sequence_id=opening.sequence_id,
            token_ids=unpack_tokens(opening.token_ids),
            num_prompt_tokens=opening.num_prompt_tokens,
            sampling=SamplingParameters(),
            verification=opening.verification,
            max_draft_tokens=opening.max_draft_tokens,
            limits=limits,
        )


@asynccontextmanager
async def fake_drafter(
    script: Script = lambda token_ids, count: (), hook: Hook | None = None, **fields: Any
) -> AsyncIterator[FakeDrafter]:
    """A fake drafter on a free port."""
    fake = FakeDrafter(script, hook, **fields)

    def serialize(message: Any) -> bytes:
        return message if isinstance(message, bytes) else message.SerializeToString()

    handlers = {
        "GetInfo": grpc.unary_unary_rpc_method_handler(
            fake.get_info, drafter_pb2.DrafterServiceGetInfoRequest.FromString, serialize
        ),
        "Draft": grpc.stream_stream_rpc_method_handler(fake.draft, drafter_pb2.DraftRequest.FromString, serialize),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("outrider.v1.DrafterService", handlers)])
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(grace=None)


def answers(*wires: Wire) -> Hook:
    """Send these instead of every answer."""
    return lambda expansions, sequence: wires


def late(seconds: float) -> Hook:
    """Send every answer, too late."""

    async def hook(expansions: drafter_pb2.Expansions, sequence: DraftSequence) -> Sequence[Wire]:
        await asyncio.sleep(seconds)
        return [frame(expansions)]

    return hook
