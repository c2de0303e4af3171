"""Who gets a place, who waits for one, and who is told to come again later.

As many requests run as the verifiers take, a bounded number waits. A place that becomes free goes to the caller with
the fewest requests running, so that one who floods the gateway gets a fair share and no more, and a full queue makes
room for a caller with few requests by refusing the newest of the caller with the most.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from gateway.auth import Caller
from gateway.rate_limits import RateLimits
from outrider.protocol.errors import OutriderError, ResourceExhaustedError, UnavailableError

# What a client is told as long as nothing has finished that could be estimated from.
DEFAULT_DELAY_SECONDS = 1.0
MIN_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.1, 60.0
# Clients that were refused at the same moment come back spread out over this share of the delay.
SPREAD = 0.25
# How far the estimate of a wait may be out before a request that was let in is refused after all.
TOLERANCE = 2.0
# Weight of the newest request in the moving average of how long a place is held.
NEWEST = 1 / 16


class Place:
    """A request's right to run, held while the context lasts."""

    def __init__(self, admission: Admission, caller_name: str, started: float) -> None:
        self._admission = admission
        self._caller_name = caller_name
        self._started = started
        self._is_free = False
        self._work: asyncio.Future[Any] | None = None

    def holds_for(self, work: asyncio.Future[Any]) -> None:
        """Keep the place until `work` is done, even if the request has gone: what cannot be stopped still costs."""
        self._work = work

    def free(self) -> None:
        """Let the next one run: all that is left is the delivery to the client. Safe to call again."""
        if not self._is_free and self._admission.may_deliver_later():
            self._release()

    def spend(self, num_tokens: int) -> None:
        """Count tokens of the prompt or the output towards what the caller may use."""
        self._admission.spent(self._caller_name, num_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._work is None or self._work.done():
            self._leave()
        else:
            self._work.add_done_callback(self._leave)

    def _leave(self, _: object = None) -> None:
        if not self._is_free:
            self._release()
        self._admission.left()

    def _release(self) -> None:
        self._is_free = True
        self._admission.released(self._caller_name, self._started)


class Admission:
    """Gives out places; all methods run on the event loop.

    `capacity` says how many may run at this moment; `max_queued` may wait. One that would have to wait longer than
    `max_queue_seconds` is refused at once, and at twice that time, where the estimate was wrong.
    """

    def __init__(self, *, capacity: Callable[[], int], max_queued: int, max_queue_seconds: float) -> None:
        self._capacity = capacity
        self._max_queued = max_queued
        self._max_queue_seconds = max_queue_seconds
        self._num_running = 0
        self._num_open = 0
        self._num_waiting = 0
        self._running_by_caller: Counter[str] = Counter()
        # Per caller in order of arrival; a caller without waiting requests has no entry.
        self._queues: dict[str, dict[asyncio.Future[Place], None]] = {}
        self._turns: dict[str, int] = {}
        self._turn = itertools.count(1)
        self._rates = RateLimits()
        self._service_seconds: float | None = None
        self._is_draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        # By reason; only ever grows.
        self.refusals: Counter[str] = Counter()

    @property
    def capacity(self) -> int:
        """Requests that may hold a place at once."""
        return self._capacity()

    @property
    def num_running(self) -> int:
        """Requests that hold a place."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return self._num_waiting

    @property
    def num_open(self) -> int:
        """Requests that were given a place and whose answer is not delivered yet."""
        return self._num_open

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._is_draining

    async def place(self, caller: Caller, *, seconds_left: float | None = None) -> Place:
        """A place, as soon as it is this caller's turn; to be used as a context, at once.

        A request that cannot have one before its deadline, `seconds_left` from now, is refused without waiting. Raises
        ResourceExhaustedError, with a time to come again, and UnavailableError while draining. Cancelling gives the
        turn to the next.
        """
        if self._is_draining:
            raise self._draining()
        self._check_caller(caller)
        self._fill()
        if self._num_running < self._capacity():
            return self._take(caller.name)
        self._check_wait(caller, seconds_left)
        waiter: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller.name, {})[waiter] = None
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._max_queue_seconds * TOLERANCE):
                return await waiter
        except TimeoutError:
            self._abandon(caller.name, waiter)
            message = f"no place became free within {self._max_queue_seconds * TOLERANCE:g} s"
            raise self._refusal("queue_timeout", message, self._wait(self._num_waiting)) from None
        except asyncio.CancelledError:
            self._abandon(caller.name, waiter)
            raise

    async def drain(self) -> None:
        """Take nothing new, send those who wait elsewhere, and return when the last request is done.

        Those who wait have cost nothing yet, and another gateway can begin at once; here they would only make those
        who run compete for the time that is left.
        """
        self._is_draining = True
        for waiters in list(self._queues.values()):
            for waiter in waiters:
                self._settle(waiter, self._draining())
        self._queues.clear()
        self._num_waiting = 0
        await self._empty.wait()

    def may_deliver_later(self) -> bool:
        """Whether a request that is decoded may give up its place before its client has read everything.

        Not without end: clients that never read would pile up.
        """
        return self._num_open - self._num_running < self._capacity()

    def released(self, caller_name: str, started: float) -> None:
        """A place is free again; called by the place."""
        held = asyncio.get_running_loop().time() - started
        if self._service_seconds is None:
            self._service_seconds = held
        self._service_seconds += (held - self._service_seconds) * NEWEST
        self._num_running -= 1
        self._running_by_caller[caller_name] -= 1
        if not self._running_by_caller[caller_name]:
            del self._running_by_caller[caller_name]
        self._fill()

    def spent(self, caller_name: str, num_tokens: int) -> None:
        """A request has used tokens; called by the place."""
        self._rates.spend(caller_name, num_tokens)

    def left(self) -> None:
        """A request is over; called by the place."""
        self._num_open -= 1
        if not self._num_open:
            self._empty.set()

    def _take(self, caller_name: str) -> Place:
        self._num_running += 1
        self._num_open += 1
        self._empty.clear()
        self._running_by_caller[caller_name] += 1
        # Turns of callers that have nothing here are forgotten: who comes anew has not been served for long.
        self._turns = {n: turn for n, turn in self._turns.items() if n in self._queues or n in self._running_by_caller}
        self._turns[caller_name] = next(self._turn)
        return Place(self, caller_name, asyncio.get_running_loop().time())

    def _fill(self) -> None:
        """Give free places to those who wait: to callers with the fewest running, of equals to the longest unserved."""
        while self._queues and self._num_running < self._capacity():
            name = min(self._queues, key=lambda name: (self._running_by_caller[name], self._turns.get(name, 0)))
            waiter = next(iter(self._queues[name]))
            self._remove(name, waiter)
            # Whoever was cancelled a moment ago has not yet come to say so.
            if not waiter.done():
                waiter.set_result(self._take(name))

    def _check_caller(self, caller: Caller) -> None:
        num_running, num_waiting = self._running_by_caller[caller.name], len(self._queues.get(caller.name, ()))
        if caller.max_concurrent is not None and num_running + num_waiting >= caller.max_concurrent:
            seconds = None if self._service_seconds is None else self._service_seconds / max(1, num_running)
            message = f"{num_running + num_waiting} of this caller's requests are open, as many as it may have"
            raise self._refusal("caller_limit", message, seconds)
        if (excess := self._rates.take(caller)) is not None:
            raise self._refusal(excess.reason, excess.message, excess.seconds)

    def _check_wait(self, caller: Caller, seconds_left: float | None) -> None:
        if self._num_waiting >= self._max_queued and not self._displace_for(caller.name):
            message = f"{self._num_running} requests run and {self._num_waiting} wait, as many as this gateway takes"
            raise self._refusal("queue_full", message, self._wait(self._num_waiting))
        num_mine = len(self._queues.get(caller.name, ()))
        # With fair turns, nobody else gets more of them before this request than this caller itself.
        wait = self._wait(
            num_mine + sum(min(len(q), num_mine + 1) for n, q in self._queues.items() if n != caller.name)
        )
        if wait is None:
            return
        if seconds_left is not None and wait > seconds_left:
            message = f"the wait is about {wait:.1f} s, and the call's deadline is in {seconds_left:.1f} s"
            raise self._refusal("deadline", message, wait)
        if wait > self._max_queue_seconds:
            message = f"the wait is about {wait:.1f} s, above the {self._max_queue_seconds:g} s that a request may wait"
            raise self._refusal("queue_too_long", message, wait)

    def _displace_for(self, caller_name: str) -> bool:
        """Make room in a full queue at the cost of the caller with the longest one; whether that was fair."""
        longest = max(self._queues, key=lambda name: len(self._queues[name]), default="")
        if len(self._queues.get(longest, ())) <= len(self._queues.get(caller_name, ())) + 1:
            return False
        newest = next(reversed(self._queues[longest]))
        self._remove(longest, newest)
        message = "other callers have fewer requests waiting, and the queue is full"
        self._settle(newest, self._refusal("displaced", message, self._wait(self._num_waiting)))
        return True

    def _wait(self, num_ahead: int) -> float | None:
        """Estimated seconds until a request with so many before it in the queue has a place; None: nobody knows yet."""
        if self._service_seconds is None:
            return None
        return self._service_seconds * (num_ahead + 1) / self._capacity()

    def _refusal(self, reason: str, message: str, delay_seconds: float | None) -> ResourceExhaustedError:
        self.refusals[reason] += 1
        delay = DEFAULT_DELAY_SECONDS if delay_seconds is None else delay_seconds
        delay = min(MAX_DELAY_SECONDS, max(MIN_DELAY_SECONDS, delay)) * random.uniform(1, 1 + SPREAD)
        return ResourceExhaustedError(message, retry_delay_seconds=delay)

    def _draining(self) -> UnavailableError:
        self.refusals["draining"] += 1
        return UnavailableError("the gateway is draining", retry_delay_seconds=DEFAULT_DELAY_SECONDS)

    def _abandon(self, caller_name: str, waiter: asyncio.Future[Place]) -> None:
        """The request no longer waits; it may have been given a place in the same moment."""
        if waiter in self._queues.get(caller_name, ()):
            self._remove(caller_name, waiter)
        elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            with waiter.result():
                pass

    def _remove(self, caller_name: str, waiter: asyncio.Future[Place]) -> None:
        del self._queues[caller_name][waiter]
        self._num_waiting -= 1
        if not self._queues[caller_name]:
            del self._queues[caller_name]

    @staticmethod
    def _settle(waiter: asyncio.Future[Place], error: OutriderError) -> None:
        if not waiter.done():
            waiter.set_exception(error)
