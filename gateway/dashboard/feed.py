"""What happens in the gateway, told to those who look on: counts of all requests, and tokens as they come."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.sequence import Sequence
from gateway.watcher import Event
from outrider.protocol.words import ORIGINS, word
from outrider.v1 import common_pb2, generation_pb2

# Pages that may look on at a time: each costs the event loop a little.
MAX_SUBSCRIBERS = 8
# Tokens kept for a page between two looks; a page that is too slow for them misses some.
MAX_PENDING_TOKENS = 4000
MAX_RECENT_REQUESTS = 20
RATE_SECONDS = 10


def origin_name(token: generation_pb2.Token) -> str:
    """The word for where a token came from."""
    return ORIGINS.get(token.origin, "plain")


def pieces(chunk: generation_pb2.Chunk) -> list[list[str]]:
    """[text, origin] of each token; text that was held back until the end of the completion goes to the last one."""
    found = [[token.text, origin_name(token)] for token in chunk.tokens]
    rest = chunk.text[sum(len(token.text) for token in chunk.tokens) :]
    if rest and found:
        found[-1][0] += rest
    elif rest:
        found.append([rest, "plain"])
    return found


@dataclass
class Totals:
    """Counts since the gateway started."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_steps: int = 0
    tokens_by_origin: Counter[str] = field(default_factory=Counter)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    fallbacks_by_reason: Counter[str] = field(default_factory=Counter)
    ends_by_reason: Counter[str] = field(default_factory=Counter)

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that is over, but for its tokens, which were counted as they came."""
        counts = sequence.counts
        self.num_steps += counts.num_steps
        _add(self.drafted_by_position, counts.num_drafted_per_position)
        _add(self.accepted_by_position, counts.num_accepted_per_position)
        for fallback in counts.fallbacks:
            self.fallbacks_by_reason[word(common_pb2.FallbackReason, fallback.reason)] += 1
        if sequence.finish_reason:
            name = word(generation_pb2.FinishReason, sequence.finish_reason)
        else:
            name = "ERROR" if sequence.error is not None else "CANCELLED"
        self.ends_by_reason[name] += 1


class Subscription:
    """What one page has not been told yet."""

    def __init__(self) -> None:
        self._news: dict[int, list[list[str]]] = {}
        self._ended: list[int] = []
        self._num_pending = 0

    def tell(self, sequence_id: int, found: list[list[str]]) -> None:
        """Tokens of a sequence."""
        if self._num_pending < MAX_PENDING_TOKENS:
            self._num_pending += len(found)
            self._news.setdefault(sequence_id, []).extend(found)

    def end(self, sequence_id: int) -> None:
        """A sequence is over."""
        self._ended.append(sequence_id)

    def take(self) -> dict[str, Any] | None:
        """Everything since the last call, None when nothing has happened."""
        if not self._news and not self._ended:
            return None
        news = {"tokens": {str(key): found for key, found in self._news.items()}, "ended": self._ended}
        self._news, self._ended, self._num_pending = {}, [], 0
        return news


class LiveFeed:
    """Watches the gateway's requests. Their text is shown only where `shows_texts` is set."""

    def __init__(self, *, shows_texts: bool) -> None:
        self.totals = Totals()
        self._shows_texts = shows_texts
        self._running: dict[int, dict[str, Any]] = {}
        self._sequences: dict[int, Sequence] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=MAX_RECENT_REQUESTS)
        self._subscriptions: set[Subscription] = set()
        self._by_second: deque[tuple[int, Counter[str]]] = deque(maxlen=RATE_SECONDS + 1)

    @property
    def wants_texts(self) -> bool:
        """Whether somebody looks on, and may read."""
        return self._shows_texts and bool(self._subscriptions)

    @property
    def is_full(self) -> bool:
        """Whether no more pages may look on."""
        return len(self._subscriptions) >= MAX_SUBSCRIBERS

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Be told of what happens while the context lasts."""
        subscription = Subscription()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def saw(self, sequence: Sequence, event: Event) -> None:
        """An event of a request."""
        match event:
            case generation_pb2.Started():
                self.totals.num_requests += 1
                self.totals.num_prompt_tokens += event.num_prompt_tokens
                self._sequences[sequence.sequence_id] = sequence
                self._running[sequence.sequence_id] = {
                    "id": sequence.sequence_id,
                    "request_id": event.request_id,
                    "num_prompt_tokens": event.num_prompt_tokens,
                    "time": time.time(),
                }
            case generation_pb2.Chunk():
                self._count(event)
                if self._subscriptions:
                    shown = pieces(event) if self._shows_texts else [["", origin_name(token)] for token in event.tokens]
                    for subscription in self._subscriptions:
                        subscription.tell(sequence.sequence_id, shown)

    def left(self, sequence: Sequence) -> None:
        """A request is over."""
        self.totals.add(sequence)
        self._sequences.pop(sequence.sequence_id, None)
        request = self._running.pop(sequence.sequence_id, None)
        if request is not None:
            counts = sequence.counts
            self._recent.appendleft(
                {
                    **request,
                    "seconds": time.time() - request["time"],
                    "num_output_tokens": len(sequence.committed_token_ids),
                    "num_draft_tokens": counts.num_draft_tokens,
                    "num_accepted_tokens": counts.num_accepted_tokens,
                }
            )
        for subscription in self._subscriptions:
            subscription.end(sequence.sequence_id)

    def state(self) -> dict[str, Any]:
        """The counts, those of running requests included, and who runs."""
        totals = self.totals
        num_steps = totals.num_steps
        drafted, accepted = list(totals.drafted_by_position), list(totals.accepted_by_position)
        for sequence in self._sequences.values():
            num_steps += sequence.counts.num_steps
            _add(drafted, sequence.counts.num_drafted_per_position)
            _add(accepted, sequence.counts.num_accepted_per_position)
        return {
            "totals": {
                "num_requests": totals.num_requests,
                "num_prompt_tokens": totals.num_prompt_tokens,
                "num_steps": num_steps,
                "tokens_by_origin": dict(totals.tokens_by_origin),
                "drafted_by_position": drafted,
                "accepted_by_position": accepted,
                "fallbacks_by_reason": dict(totals.fallbacks_by_reason),
                "ends_by_reason": dict(totals.ends_by_reason),
            },
            "tokens_per_second": self._rate(),
            "running": list(self._running.values())[-MAX_RECENT_REQUESTS:],
            "num_running": len(self._running),
            "recent": list(self._recent),
            "shows_texts": self._shows_texts,
        }

    def _count(self, chunk: generation_pb2.Chunk) -> None:
        found = Counter(origin_name(token) for token in chunk.tokens)
        self.totals.tokens_by_origin.update(found)
        second = int(time.monotonic())
        if not self._by_second or self._by_second[-1][0] != second:
            self._by_second.append((second, Counter()))
        self._by_second[-1][1].update(found)

    def _rate(self) -> dict[str, float]:
        """Tokens of the last whole second, by origin."""
        last = int(time.monotonic()) - 1
        found = next((counts for second, counts in self._by_second if second == last), Counter[str]())
        return {origin: float(found[origin]) for origin in ORIGINS.values()}


def _add(totals: list[int], counts: list[int]) -> None:
    for index, (total, count) in enumerate(itertools.zip_longest(list(totals), counts, fillvalue=0)):
        if index < len(totals):
            totals[index] = total + count
        else:
            totals.append(count)
