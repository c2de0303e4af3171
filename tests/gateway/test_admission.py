"""Places, the queue for them, and who is refused; on a clock of the tests' own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.admission import SPREAD, Admission
from gateway.auth import ANONYMOUS, Caller
from outrider.protocol.errors import OutriderError, ResourceExhaustedError, UnavailableError
from tests.gateway.virtual_time import run

ALICE, BOB = Caller("alice"), Caller("bob")


def admission(capacity: int = 2, *, max_queued: int = 4, max_queue_seconds: float = 100.0) -> Admission:
    return Admission(capacity=lambda: capacity, max_queued=max_queued, max_queue_seconds=max_queue_seconds)


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test as pytest calls it: on a loop of its own, whose clock jumps."""

    def wrapped() -> None:
        run(test())  # type: ignore[arg-type]

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


class Requests:
    """Requests that hold a place for some seconds each; `served` in the order in which they got it."""

    def __init__(self, places: Admission) -> None:
        self.places = places
        self.served: list[str] = []
        self.held: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, caller: Caller = ANONYMOUS, *, seconds: float = 1.0, **more: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(name, caller, seconds, more))
        self.tasks.append(task)
        return task

    async def _run(self, name: str, caller: Caller, seconds: float, more: dict[str, Any]) -> None:
        with await self.places.place(caller, **more):
            self.served.append(name)
            await asyncio.sleep(seconds)
            self.held[caller.name] += 1

    async def refusals(self) -> list[OutriderError | None]:
        """What became of each request in order, once all are over; None where it was served."""
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, OutriderError) for result in results)
        assert self.places.num_open == self.places.num_running == self.places.num_waiting == 0
        assert not self.places._queues
        assert not self.places._running_by_caller
        return results  # type: ignore[return-value]


async def soon() -> None:
    """Let what is ready run, without time passing."""
    for _ in range(5):
        await asyncio.sleep(0)


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_places_then_the_queue_in_order_then_refusals() -> None:
    """Catches a bound that does not hold, and a queue that is not one."""
    requests = Requests(admission(2, max_queued=3))
    for name in "abcdefg":
        requests.start(name)
    await soon()
    assert (requests.places.num_running, requests.places.num_waiting) == (2, 3)
    assert now() == 0
    assert [task.done() for task in requests.tasks] == [False] * 5 + [True] * 2
    results = await requests.refusals()
    assert requests.served == list("abcde")
    assert now() == 3
    assert [type(result) for result in results[5:]] == [ResourceExhaustedError] * 2
    assert "2 requests run and 3 wait" in str(results[5])
    assert requests.places.refusals == {"queue_full": 2}


@in_virtual_time
async def test_the_delay_follows_from_service_times_and_queue() -> None:
    """Catches a retry delay that is a constant."""
    requests = Requests(admission(2, max_queued=3))
    requests.start("first", seconds=8.0)
    await asyncio.sleep(8)
    for name in "abcdef":
        requests.start(name, seconds=8.0)
    await soon()
    refused = requests.tasks[-1].exception()
    assert isinstance(refused, ResourceExhaustedError)
    # Three wait; with two places a turn comes every four seconds.
    assert 16 <= refused.retry_delay_seconds <= 16 * (1 + SPREAD)
    await requests.refusals()
    # Requests become shorter, and so do the delays.
    for _ in range(40):
        await requests.start("quick", seconds=0.4)
    for name in "abcdef":
        requests.start(name, seconds=0.4)
    await soon()
    refused = requests.tasks[-1].exception()
    assert isinstance(refused, ResourceExhaustedError)
    assert 0.8 <= refused.retry_delay_seconds <= 2.5


@in_virtual_time
async def test_a_flood_cannot_starve_another_caller() -> None:
    """Catches a queue that is first come, first served: bob would wait behind all of alice's requests."""
    requests = Requests(admission(4, max_queued=20))
    for number in range(24):
        requests.start(f"alice {number}", ALICE)
    await asyncio.sleep(0.5)
    for number in range(6):
        requests.start(f"bob {number}", BOB)
    await asyncio.sleep(0.1)
    assert requests.places.refusals == {"displaced": 6}
    await asyncio.sleep(1.0)
    # The places of the first turn went to bob until both had equally many.
    assert dict(requests.places._running_by_caller) == {"alice": 1, "bob": 3} or dict(
        requests.places._running_by_caller
    ) == {"alice": 2, "bob": 2}
    results = await requests.refusals()
    bobs = [name for name in requests.served[:16] if name.startswith("bob")]
    assert bobs == [f"bob {number}" for number in range(6)]
    # Who came last of the flood made room.
    assert [index for index, result in enumerate(results) if result is not None] == [18, 19, 20, 21, 22, 23]


@in_virtual_time
async def test_shares_stay_equal_under_a_standing_flood() -> None:
    """Catches shares that follow from who asks more often, or from whose requests take longer."""
    requests = Requests(admission(4, max_queued=16))

    async def flood(caller: Caller, every: float, seconds: float) -> None:
        while now() < 200:
            requests.start(caller.name, caller, seconds=seconds)
            await asyncio.sleep(every)

    await asyncio.gather(flood(ALICE, 0.05, 3.0), flood(BOB, 0.4, 1.0))
    await requests.refusals()
    alice, bob = requests.held["alice"] * 3.0, requests.held["bob"] * 1.0
    assert alice + bob > 0.95 * 4 * 200
    assert 0.8 < alice / bob < 1.25


@in_virtual_time
async def test_a_full_queue_is_not_emptied_by_its_own_owner() -> None:
    """Catches displacing without need: one caller alone, or two with equally many."""
    requests = Requests(admission(1, max_queued=2))
    for name, caller in (("a", ALICE), ("b", ALICE), ("c", BOB), ("d", BOB), ("e", ALICE)):
        requests.start(name, caller)
    results = await requests.refusals()
    assert requests.served == ["a", "c", "b"]
    assert [result is None for result in results] == [True, True, True, False, False]


@in_virtual_time
async def test_callers_limits() -> None:
    """Catches a limit that counts only what runs, or that others pay for."""
    requests = Requests(admission(2, max_queued=8))
    limited = Caller("carol", max_concurrent=3)
    for name in "abcde":
        requests.start(name, limited)
    requests.start("bob", BOB)
    await soon()
    assert [task.done() for task in requests.tasks] == [False, False, False, True, True, False]
    results = await requests.refusals()
    assert "3 of this caller's requests are open" in str(results[3])
    assert requests.places.refusals == {"caller_limit": 2}
    await requests.start("again", limited)


@in_virtual_time
async def test_who_leaves_the_queue_costs_nothing() -> None:
    """Catches a place given to a request that is gone, and a turn lost with it."""
    requests = Requests(admission(1))
    for name in "abcd":
        requests.start(name)
    await soon()
    requests.tasks[1].cancel()
    await soon()
    assert requests.places.num_waiting == 2
    with pytest.raises(asyncio.CancelledError):
        await requests.tasks.pop(1)
    await requests.refusals()
    assert requests.served == ["a", "c", "d"]
    assert now() == 3


@in_virtual_time
async def test_cancelled_in_the_moment_of_its_turn() -> None:
    """Catches a place that is lost when it is given and given up in one turn of the loop, in either order."""
    for is_given_first in (True, False):
        places = admission(1)
        held = await places.place(ALICE)
        waiting = asyncio.create_task(places.place(ALICE))
        last = asyncio.create_task(places.place(ALICE))
        await soon()
        if is_given_first:
            held.__exit__(None, None, None)
            waiting.cancel()
        else:
            waiting.cancel()
            held.__exit__(None, None, None)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with await asyncio.wait_for(last, 1):
            assert (places.num_running, places.num_waiting, places.num_open) == (1, 0, 1)
        assert (places.num_running, places.num_open) == (0, 0)


@in_virtual_time
async def test_deadlines() -> None:
    """Catches requests that wait in vain: behind a queue that is longer than what their deadline leaves."""
    requests = Requests(admission(1, max_queued=10))
    await requests.start("first", seconds=4.0)
    for name in "abc":
        requests.start(name, seconds=4.0)
    hurried = requests.start("hurried", seconds_left=11.0)
    patient = requests.start("patient", seconds_left=13.0)
    await soon()
    error = hurried.exception()
    assert isinstance(error, ResourceExhaustedError)
    assert "about 12.0 s" in error.message
    assert "11.0 s" in error.message
    assert not patient.done()
    await requests.refusals()
    assert requests.served == ["first", "a", "b", "c", "patient"]
    # With a free place nothing is estimated.
    await requests.start("alone", seconds_left=0.01)


@in_virtual_time
async def test_the_longest_wait() -> None:
    """Catches requests that wait for ever, and such as are let wait although it is known to be too long."""
    requests = Requests(admission(1, max_queued=10, max_queue_seconds=5.0))
    requests.start("endless", seconds=60.0)
    requests.start("waits")
    await asyncio.sleep(9.9)
    assert requests.places.num_waiting == 1
    await asyncio.sleep(0.2)
    error = requests.tasks[1].exception()
    assert isinstance(error, ResourceExhaustedError)
    assert "within 10 s" in error.message
    assert requests.places.num_waiting == 0
    await asyncio.sleep(60)
    # Now it is known how long one takes.
    requests.start("endless", seconds=60.0)
    requests.start("refused")
    await soon()
    assert requests.tasks[-1].done()
    await requests.refusals()
    assert requests.places.refusals == {"queue_timeout": 1, "queue_too_long": 1}


@in_virtual_time
async def test_draining_sends_those_who_wait_elsewhere() -> None:
    """Catches a drain that waits for the queue, or that cuts off what runs."""
    requests = Requests(admission(2))
    for name in "abcd":
        requests.start(name, seconds=3.0)
    await soon()
    draining = asyncio.create_task(requests.places.drain())
    await soon()
    assert [type(task.exception()) for task in requests.tasks[2:]] == [UnavailableError] * 2
    requests.start("late")
    await draining
    assert now() == 3
    results = await requests.refusals()
    assert [type(result) for result in results] == [type(None), type(None), *[UnavailableError] * 3]


@in_virtual_time
async def test_a_decoded_request_makes_room_before_its_client_has_read() -> None:
    """Catches slow readers that keep the verifiers idle, and such as pile up without end."""
    places = admission(2, max_queued=0)
    slow = []
    for _ in range(2):
        slow.append(await places.place(ALICE))
        slow[-1].free()
    assert (places.num_running, places.num_open) == (0, 2)
    # As many as may run are also delivered late; those on top keep their places.
    slow += [await places.place(ALICE) for _ in range(2)]
    for place in slow:
        place.free()
    assert (places.num_running, places.num_open) == (2, 4)
    with pytest.raises(ResourceExhaustedError):
        await places.place(BOB)
    for place in slow:
        place.__exit__(None, None, None)
    assert (places.num_running, places.num_open) == (0, 0)


@in_virtual_time
async def test_work_that_cannot_be_stopped_keeps_its_place() -> None:
    """Catches clients that leave at once and with it get more done than their places allow."""
    places = admission(1)
    work = asyncio.ensure_future(asyncio.sleep(5))
    with await places.place(ALICE) as place:
        place.holds_for(work)
    assert (places.num_running, places.num_open) == (1, 1)
    with await places.place(ALICE):
        assert now() == 5
    assert (places.num_running, places.num_open) == (0, 0)


@in_virtual_time
async def test_capacity_that_grows_is_used() -> None:
    """Catches a queue that stands although a verifier has joined."""
    capacity = 1
    places = Admission(capacity=lambda: capacity, max_queued=8, max_queue_seconds=100)
    requests = Requests(places)
    for name in "abcde":
        requests.start(name, seconds=10.0)
    await soon()
    assert places.num_running == 1
    capacity = 3
    requests.start("f", seconds=10.0)
    await soon()
    assert places.num_running == 3
    await requests.refusals()
    assert requests.served == list("abcdef")
    assert now() == 20
