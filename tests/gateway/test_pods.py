"""Pods that come, drain and go: what the gateway makes of DNS answers that change. The verifiers are scripted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from gateway import discovery
from outrider.v1 import common_pb2, generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import (
    READY,
    FakeVerifier,
    complete,
    eventually,
    next_of,
    rest_of,
    running_gateway,
    token_ids,
    update,
)
from tests.gateway.test_discovery import Answers

LENGTH = generation_pb2.FINISH_REASON_LENGTH
REQUEST = generation_pb2.GenerateRequest(token_ids=token_ids(1))
# Loopback addresses stand for pods: one name, one port, an address each.
POD_HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
_ports = itertools.count(19_300)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "SHORTEST_SECONDS", 0.02)


@pytest.fixture
async def pods() -> AsyncIterator[list[FakeVerifier]]:
    """Three verifiers on one port."""
    pods = [FakeVerifier() for _ in POD_HOSTS]
    for port in _ports:
        try:
            for pod, host in zip(pods, POD_HOSTS, strict=True):
                pod.address = f"{host}:{port}"
                await pod.start()
            break
        except RuntimeError:
            # Somebody else's port.
            for pod in pods:
                await pod.stop()
    yield pods
    for pod in pods:
        await pod.stop()


def name(pods: Sequence[FakeVerifier]) -> str:
    return f"dns:///pods:{pods[0].address.rpartition(':')[2]}"


def one_token(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
    return [update(message.sequence_id, [5], finish=LENGTH)]


async def test_a_pod_that_comes_gets_sequences_and_one_that_goes_finishes_its_own(pods: list[FakeVerifier]) -> None:
    """Catches a gateway that keeps to the pods of its start, and one that cuts sequences off with the address."""
    resolver = Answers(pods=["127.0.0.1"])
    async with running_gateway(name(pods), resolver=resolver, dns_refresh_seconds=0.05) as running:
        old = running.stub.Generate(REQUEST)
        opened = await pods[0].next_open()
        pods[0].send(update(opened.sequence_id, [5]))
        assert (await next_of(old)).HasField("started")
        resolver.answers["pods"] = ["127.0.0.2"]
        await eventually(lambda: len(running.links) == 2 and running.links[1].is_ready)
        await eventually(lambda: running.links[0].is_retired)
        pods[1].script = one_token
        for _ in range(3):
            assert (await complete(running, token_ids=token_ids(1))).token_ids == [5]
        assert len(pods[0].opened) == 1
        # The retired link is there, and shows as what it is, until its last sequence has ended.
        model = await running.stub.GetModel(generation_pb2.GetModelRequest())
        assert [(m.is_ready, m.num_sequences) for m in model.verifiers] == [(False, 1), (True, 0)]
        pods[0].send(update(opened.sequence_id, [6], finish=LENGTH))
        responses = await rest_of(old)
        assert [token.id for r in responses for token in r.chunk.tokens] == [5, 6]
        assert responses[-1].HasField("finished")
        await eventually(lambda: len(running.links) == 1)
        assert running.links[0].address == pods[1].address
        await running.is_idle()


async def test_a_pod_that_comes_back_is_taken_back(pods: list[FakeVerifier]) -> None:
    """While its sequences run by the same connection, after that by a new one."""
    resolver = Answers(pods=["127.0.0.1", "127.0.0.2"])
    async with running_gateway(name(pods), resolver=resolver, dns_refresh_seconds=0.05) as running:
        await eventually(lambda: [link.is_ready for link in running.links] == [True, True])
        calls = [running.stub.Generate(REQUEST) for _ in range(2)]
        opened = await pods[0].next_open()
        resolver.answers["pods"] = ["127.0.0.2"]
        await eventually(lambda: any(link.is_retired for link in running.links))
        resolver.answers["pods"] = ["127.0.0.1", "127.0.0.2"]
        await eventually(lambda: [link.is_ready for link in running.links] == [True, True])
        assert pods[0].num_streams == 1
        resolver.answers["pods"] = ["127.0.0.2"]
        await eventually(lambda: any(link.is_retired for link in running.links))
        pods[0].send(update(opened.sequence_id, [6], finish=LENGTH))
        await eventually(lambda: len(running.links) == 1)
        resolver.answers["pods"] = ["127.0.0.1", "127.0.0.2"]
        await eventually(lambda: pods[0].num_streams == 2)
        for call in calls:
            call.cancel()
        await running.is_idle()


async def test_a_retired_pod_that_dies_is_not_dialled_again(pods: list[FakeVerifier]) -> None:
    resolver = Answers(pods=["127.0.0.1", "127.0.0.2"])
    async with running_gateway(name(pods), resolver=resolver, dns_refresh_seconds=0.05) as running:
        await eventually(lambda: [link.is_ready for link in running.links] == [True, True])
        calls = [running.stub.Generate(REQUEST) for _ in range(2)]
        for pod in pods[:2]:
            pod.send(update((await pod.next_open()).sequence_id, [5]))
        for call in calls:
            assert (await next_of(call)).HasField("started")
        resolver.answers["pods"] = ["127.0.0.2"]
        await eventually(lambda: any(link.is_retired for link in running.links))
        await pods[0].stop()
        await eventually(lambda: len(running.links) == 1)
        rests = [asyncio.create_task(rest_of(call)) for call in calls]
        [lost], _ = await asyncio.wait(rests, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            lost.result()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for call in calls:
            call.cancel()


async def test_a_draining_pod_gets_no_new_sequence_and_finishes_the_others(pods: list[FakeVerifier]) -> None:
    """The pod says so itself: long before the news have gone through DNS."""
    resolver = Answers(pods=["127.0.0.1", "127.0.0.2"])
    async with running_gateway(name(pods), resolver=resolver, dns_refresh_seconds=60) as running:
        await eventually(lambda: [link.is_ready for link in running.links] == [True, True])
        num_lookups = resolver.num_lookups
        calls = [running.stub.Generate(REQUEST) for _ in range(2)]
        opened = await pods[0].next_open()
        pods[0].drain()
        await eventually(lambda: any(link.is_draining for link in running.links))
        pods[1].script = one_token
        for _ in range(3):
            await complete(running, token_ids=token_ids(1))
        assert len(pods[0].opened) == 1
        pods[0].send(update(opened.sequence_id, [7], finish=LENGTH))
        done, _ = await asyncio.wait(
            [asyncio.create_task(rest_of(call)) for call in calls], return_when=asyncio.FIRST_COMPLETED, timeout=5
        )
        [responses] = [task.result() for task in done]
        assert responses[-1].HasField("finished")
        # Whatever replaces it may be there already.
        await eventually(lambda: resolver.num_lookups > num_lookups)
        # A gateway that comes now is told at once.
        async with running_gateway(name(pods), resolver=resolver) as newcomer:
            await eventually(lambda: all(link.is_connected for link in newcomer.links))
            assert sorted(link.is_ready for link in newcomer.links) == [False, True]
        for call in calls:
            call.cancel()


async def test_drafters_are_followed_too(pods: list[FakeVerifier]) -> None:
    """Catches a verifier that is never told of new drafters, and a sequence that names one that is not listed."""
    resolver = Answers(pods=["127.0.0.1"], drafters=["10.0.0.1", "10.0.0.2"])
    pods[0].drafters = [verifier_pb2.DrafterStatus(address=f"10.0.0.{n}:7", state=READY) for n in (1, 2, 3)]
    async with running_gateway(
        name(pods), resolver=resolver, drafters=("dns:///drafters:7",), dns_refresh_seconds=0.05, drafter_wait_seconds=2
    ) as running:

        def named() -> set[str]:
            return set([frame for frame in pods[0].frames if frame.HasField("drafters")][-1].drafters.addresses)

        await eventually(lambda: named() == {"10.0.0.1:7", "10.0.0.2:7"})
        server_names = [frame for frame in pods[0].frames if frame.HasField("drafters")][-1].drafters.server_names
        assert dict(server_names) == {"10.0.0.1:7": "drafters", "10.0.0.2:7": "drafters"}
        call = running.stub.Generate(REQUEST)
        first = (await pods[0].next_open()).drafter_address
        resolver.answers["drafters"] = [first.removesuffix(":7"), "10.0.0.3"]
        await eventually(lambda: named() == {first, "10.0.0.3:7"})
        # The verifier reports on the new one when it has dialled it.
        pods[0].report_statuses(verifier_pb2.DrafterStatus(address="10.0.0.3:7", state=READY))
        await eventually(lambda: "10.0.0.3:7" in running.links[0].drafters)
        other = running.stub.Generate(REQUEST)
        assert (await pods[0].next_open()).drafter_address == "10.0.0.3:7"
        # One that is draining is not named either.
        pods[0].report_statuses(
            verifier_pb2.DrafterStatus(address="10.0.0.3:7", state=verifier_pb2.DRAFTER_STATE_DRAINING),
            verifier_pb2.DrafterStatus(address=first, state=verifier_pb2.DRAFTER_STATE_DRAINING),
        )
        await eventually(lambda: all(status.state != READY for status in running.links[0].drafters.values()))
        third = running.stub.Generate(REQUEST)
        opened = await pods[0].next_open()
        assert (opened.drafter_address, opened.no_drafter_reason) == ("", common_pb2.FALLBACK_REASON_NO_DRAFTER)
        for open_call in (call, other, third):
            open_call.cancel()
        await running.is_idle()


async def test_start_waits_for_a_name_that_means_nothing_yet(pods: list[FakeVerifier]) -> None:
    resolver = Answers()
    pods[0].script = one_token

    async def appear() -> None:
        await asyncio.sleep(0.3)
        resolver.answers["pods"] = ["127.0.0.1"]

    appearing = asyncio.create_task(appear())
    async with running_gateway(name(pods), resolver=resolver, dns_refresh_seconds=0.05) as running:
        assert appearing.done()
        await complete(running, token_ids=token_ids(1))


async def test_pods_with_ipv6_addresses() -> None:
    pod = FakeVerifier(script=one_token)
    pod.address = "[::1]:0"
    try:
        await pod.start()
    except RuntimeError:
        pytest.skip("this machine has no IPv6")
    try:
        async with running_gateway(name([pod]), resolver=Answers(pods=["::1"])) as running:
            assert running.links[0].address == pod.address
            await complete(running, token_ids=token_ids(1))
    finally:
        await pod.stop()
