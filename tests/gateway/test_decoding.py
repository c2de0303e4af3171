"""The hand-over of updates from a link to a request."""

from __future__ import annotations

import asyncio

import pytest

from gateway.decoding import Decoding
from outrider.protocol.errors import UnavailableError
from tests.gateway.fake_verifier import update


async def test_updates_pile_up_and_are_taken_together() -> None:
    decoding = Decoding(1, lambda _: None)
    first, second = update(1, [4]), update(1, [5])
    decoding.deliver(first)
    decoding.deliver(second)
    assert await decoding.take() == [first, second]
    waiting = asyncio.create_task(decoding.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    decoding.deliver(first)
    assert await waiting == [first]


async def test_what_came_before_an_error_is_taken_first() -> None:
    decoding = Decoding(1, lambda _: None)
    decoding.deliver(update(1, [4]))
    decoding.fail(UnavailableError("gone"))
    assert len(await decoding.take()) == 1
    for _ in range(2):
        with pytest.raises(UnavailableError, match="gone"):
            await decoding.take()
