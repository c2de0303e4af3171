"""The hand-over of updates from a link to a request."""

from __future__ import annotations

import asyncio

import pytest

from gateway.sequence_updates import SequenceUpdates
from outrider.protocol.errors import UnavailableError
from tests.gateway.fake_verifier import update


async def test_updates_pile_up_and_are_taken_together() -> None:
    updates = SequenceUpdates(1, lambda _: None)
    first, second = update(1, [4]), update(1, [5])
    updates.deliver(first)
    updates.deliver(second)
    assert await updates.take() == [first, second]
    waiting = asyncio.create_task(updates.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    updates.deliver(first)
    assert await waiting == [first]


async def test_what_came_before_an_error_is_taken_first() -> None:
    updates = SequenceUpdates(1, lambda _: None)
    updates.deliver(update(1, [4]))
    updates.fail(UnavailableError("gone"))
    assert len(await updates.take()) == 1
    for _ in range(2):
        with pytest.raises(UnavailableError, match="gone"):
            await updates.take()
