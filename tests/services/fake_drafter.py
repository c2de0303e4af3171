"""A drafter that can do wrong whatever a drafter can: honest by itself, with a hook for each proposal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from drafter_service.proposing import ANSWERED
from drafter_service.scripted_drafter import Script
from drafter_service.sequence import DraftSequence
from kernels.limits import MAX_DRAFT_TOKENS
from kernels.random import RANDOM_SCHEME
from outrider.protocol.errors import InvalidArgumentError
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.wire import MAX_CANDIDATES, PROTOCOL_VERSION, pack_tokens, unpack_tokens
from outrider.v1 import common_pb2, drafter_pb2

LIMITS = DraftLimits(MAX_DRAFT_TOKENS, MAX_CANDIDATES)
# What goes on the wire: a frame, or bytes as they are.
Wire = drafter_pb2.DraftResponse | bytes
# Changes what is sent for one proposal; the sequence is as it was when it was made.
Hook = Callable[[drafter_pb2.Proposal, DraftSequence], Awaitable[Iterable[Wire]] | Iterable[Wire]]


def frame(*proposals: drafter_pb2.Proposal) -> drafter_pb2.DraftResponse:
    return drafter_pb2.DraftResponse(proposals=proposals)


def refusal(sequence: DraftSequence, reason: drafter_pb2.NoProposalReason) -> drafter_pb2.DraftResponse:
    none = drafter_pb2.NoProposal(sequence_id=sequence.sequence_id, reason=reason, position=sequence.length)
    return drafter_pb2.DraftResponse(no_proposals=[none])


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

    async def get_info(self, request: Any, context: Any) -> Any:
        return self.info or drafter_pb2.DrafterServiceGetInfoResponse(identity=self.identity, kind="fake")

    async def draft(self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Any) -> AsyncIterator[Wire]:
        self.num_streams += 1
        sequences: dict[int, DraftSequence] = {}
        async for request in requests:
            if request.HasField("identity") and self.says_hello:
                yield drafter_pb2.DraftResponse(
                    limits=self.answer or self.limits.with_offer(request.limits).to_message()
                )
            for close in request.closes:
                self.closed.append(close.sequence_id)
                sequences.pop(close.sequence_id, None)
            for opening in request.opens:
                self.opened.append(opening.sequence_id)
                self.asked.append(opening.max_draft_tokens)
                sequences[opening.sequence_id] = self._sequence(opening)
            for verdict in request.verdicts:
                sequence = sequences.get(verdict.sequence_id)
                if sequence is None:
                    continue
                try:
                    sequence.commit(unpack_tokens(verdict.token_ids), verdict.num_committed, verdict.epoch)
                except InvalidArgumentError:
                    # What the hook sent has misled the verifier.
                    del sequences[verdict.sequence_id]
                    yield refusal(sequence, drafter_pb2.NO_PROPOSAL_REASON_BAD_MESSAGE)
            for sequence in [one for one in sequences.values() if one.proposing.state is not ANSWERED]:
                for wire in await self._propose(sequence):
                    yield wire

    async def _propose(self, sequence: DraftSequence) -> Iterable[Wire]:
        tokens = list(self.script(sequence.token_ids, sequence.max_draft_tokens))
        if not tokens:
            sequence.proposing.find_nothing()
            return [refusal(sequence, drafter_pb2.NO_PROPOSAL_REASON_NO_MATCH)]
        sequence.proposing.propose(tokens)
        proposal = drafter_pb2.Proposal(
            sequence_id=sequence.sequence_id,
            epoch=sequence.proposing.epoch,
            position=sequence.length,
            token_ids=pack_tokens(tokens),
        )
        if self.hook is None:
            return [frame(proposal)]
        answer = self.hook(proposal, sequence)
        return await answer if isinstance(answer, Awaitable) else answer

    def _sequence(self, opening: drafter_pb2.OpenSequence) -> DraftSequence:
        return DraftSequence(
            sequence_id=opening.sequence_id,
            token_ids=unpack_tokens(opening.token_ids),
            num_prompt_tokens=opening.num_prompt_tokens,
            sampling=SamplingParameters(),
            max_draft_tokens=opening.max_draft_tokens,
            wants_candidates=False,
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
    """Send these instead of every proposal."""
    return lambda proposal, sequence: wires


def late(seconds: float) -> Hook:
    """Send every proposal, too late."""

    async def hook(proposal: drafter_pb2.Proposal, sequence: DraftSequence) -> Sequence[Wire]:
        await asyncio.sleep(seconds)
        return [frame(proposal)]

    return hook
