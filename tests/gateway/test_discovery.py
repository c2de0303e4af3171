"""What DNS answers, and which addresses the gateway goes by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway import discovery
from gateway.discovery import Discovery, Endpoint, ResolveError, SystemResolver
from tests.gateway.fake_verifier import eventually


class Answers:
    """A resolver that says what a test wants; None is a failure."""

    def __init__(self, **answers: Sequence[str] | None) -> None:
        self.answers = dict(answers)
        self.num_lookups = 0

    async def resolve(self, host: str) -> Sequence[str]:
        self.num_lookups += 1
        answer = self.answers.get(host)
        if answer is None:
            raise ResolveError("no such name")
        return answer


@asynccontextmanager
async def following(
    *targets: str, resolver: Answers, working: Sequence[str] = (), refresh_seconds: float = 0.02
) -> AsyncIterator[tuple[Discovery, list[tuple[Endpoint, ...]]]]:
    """A discovery that runs, and what it was at each change."""
    changes: list[tuple[Endpoint, ...]] = []
    followed = Discovery(
        targets,
        resolver=resolver,
        refresh_seconds=refresh_seconds,
        is_working=lambda address: address in working,
        on_change=lambda: changes.append(followed.endpoints),
    )
    running = asyncio.create_task(followed.run())
    try:
        yield followed, changes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def addresses(endpoints: Sequence[Endpoint]) -> set[str]:
    return {endpoint.address for endpoint in endpoints}


async def test_fixed_addresses_and_names_mix() -> None:
    resolver = Answers(pods=["10.0.0.1", "fd00::1", "10.0.0.1"])
    async with following("10.0.0.9:7", "dns:///pods:5", "10.0.0.1:5", resolver=resolver) as (followed, changes):
        # What needs no DNS is there at once.
        assert addresses(followed.endpoints) == {"10.0.0.9:7", "10.0.0.1:5"}
        await eventually(lambda: len(changes) == 1)
        names = {endpoint.address: endpoint.server_name for endpoint in followed.endpoints}
        # The list's own word on an address counts first.
        assert names.keys() == {"10.0.0.9:7", "10.0.0.1:5", "[fd00::1]:5"}
        assert names["10.0.0.9:7"] == ""
        assert names["[fd00::1]:5"] == "pods"


async def test_answers_that_change_are_followed() -> None:
    """Catches answers that are only ever added to, and an order that changes for those that stay."""
    resolver = Answers(pods=["10.0.0.1", "10.0.0.2", "10.0.0.3"])
    async with following("dns:///pods:5", resolver=resolver) as (followed, changes):
        await eventually(lambda: len(changes) == 1)
        first = [endpoint.address for endpoint in followed.endpoints]
        resolver.answers["pods"] = ["10.0.0.4", "10.0.0.3", "10.0.0.1"]
        await eventually(lambda: len(changes) == 2)
        stayed = [address for address in first if address != "10.0.0.2:5"]
        assert [endpoint.address for endpoint in followed.endpoints] == [*stayed, "10.0.0.4:5"]
        # The same answer in another order is no news.
        resolver.answers["pods"] = ["10.0.0.1", "10.0.0.3", "10.0.0.4"]
        num_lookups = resolver.num_lookups
        await eventually(lambda: resolver.num_lookups > num_lookups + 2)
        assert len(changes) == 2


async def test_a_name_that_ends_in_a_dot_is_asked_for_with_it_and_certified_without() -> None:
    resolver = Answers(**{"pods.ns.svc.": ["10.0.0.1"]})
    async with following("dns:///pods.ns.svc.:5", resolver=resolver) as (followed, _):
        await eventually(lambda: bool(followed.endpoints))
        assert followed.endpoints == (Endpoint("10.0.0.1:5", "pods.ns.svc"),)


@pytest.mark.parametrize("failure", [None, []])
async def test_dns_that_fails_changes_nothing_for_a_while(
    failure: Sequence[str] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a gateway that drops its verifiers because a name server is restarted, or says so every few seconds."""
    caplog.set_level(logging.WARNING)
    resolver = Answers(pods=["10.0.0.1", "10.0.0.2"])
    async with following("dns:///pods:5", resolver=resolver, working=["10.0.0.2:5"]) as (followed, changes):
        await eventually(lambda: len(changes) == 1)
        resolver.answers["pods"] = failure
        num_lookups = resolver.num_lookups
        await eventually(lambda: resolver.num_lookups > num_lookups + 4)
        assert len(changes) == 1
        assert len(caplog.records) == 1
        assert "pods" in caplog.text
        monkeypatch.setattr(discovery, "KEEP_SECONDS", 0.1)
        # In the end only what works is believed in, and that for as long as it works.
        await eventually(lambda: len(changes) == 2)
        assert addresses(followed.endpoints) == {"10.0.0.2:5"}
        num_lookups = resolver.num_lookups
        await eventually(lambda: resolver.num_lookups > num_lookups + 4)
        assert len(changes) == 2
        resolver.answers["pods"] = ["10.0.0.1"]
        await eventually(lambda: len(changes) == 3)
        assert addresses(followed.endpoints) == {"10.0.0.1:5"}


async def test_a_name_server_that_does_not_answer_counts_as_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(Answers):
        async def resolve(self, host: str) -> Sequence[str]:
            await asyncio.sleep(60)
            raise AssertionError

    monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 0.05)
    async with following("dns:///pods:5", resolver=Silent()) as (followed, changes):
        await eventually(lambda: "does not answer" in caplog.text)
        assert addresses(followed.endpoints) == set()
        assert not changes


async def test_one_name_that_fails_does_not_hold_up_another() -> None:
    async with following("dns:///here:5", "dns:///gone:5", resolver=Answers(here=["10.0.0.1"])) as (followed, changes):
        await eventually(lambda: bool(changes))
        assert addresses(followed.endpoints) == {"10.0.0.1:5"}


async def test_news_make_it_look_at_once_but_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "SHORTEST_SECONDS", 0.2)
    resolver = Answers(pods=["10.0.0.1"])
    async with following("dns:///pods:5", resolver=resolver, refresh_seconds=60) as (followed, _):
        await eventually(lambda: resolver.num_lookups == 1)
        for _ in range(40):
            followed.refresh()
            await asyncio.sleep(0.01)
        await eventually(lambda: resolver.num_lookups >= 2)
        assert resolver.num_lookups <= 4


async def test_the_system_resolver() -> None:
    assert "127.0.0.1" in await SystemResolver().resolve("localhost")
    for name in ("no-such-name.invalid", "a" * 70 + ".invalid", ""):
        with pytest.raises(ResolveError):
            await asyncio.wait_for(SystemResolver().resolve(name), 20)
