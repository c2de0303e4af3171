"""API keys: the file, who is let in, over gRPC and HTTP, and what each caller may have."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.auth import ANONYMOUS, Authenticator, Caller
from gateway.metrics import REFUSALS
from gateway.rate_limits import RateLimits
from outrider.protocol.errors import UnauthenticatedError
from outrider.service.settings import BadSettingsError
from outrider.service.telemetry import Telemetry
from outrider.v1 import generation_pb2, verifier_pb2
from tests.gateway.fake_verifier import FakeVerifier, running_gateway, token_ids
from tests.gateway.fake_verifier import update as step

ALICE, BOB = "alices-key-of-32-characters-0001", "bobs-key-of-32-characters-000002"
WRONG = "a-key-that-nobody-has-0000000003"


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(path: Path, text: str) -> Path:
    """As Kubernetes does: a new file in the old one's place."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)
    return path


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "keys.toml",
        f"""
        [callers.alice]
        sha256 = ["{hashed(ALICE)}"]
        max_concurrent_requests = 2
        requests_per_minute = 60
        tokens_per_minute = 100
        [callers.bob]
        keys = ["{BOB}"]
        """,
    )


def test_each_key_has_its_caller_and_limits(key_file: Path) -> None:
    authenticator = Authenticator(key_file)
    assert authenticator.authenticate(f"Bearer {ALICE}") == Caller("alice", 2, 60, 100)
    assert authenticator.authenticate(f"bearer  {BOB} ") == Caller("bob")


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Bearer {WRONG}", f"Bearer {ALICE[:-1]}", f"Bearer {ALICE}x", f"Basic {ALICE}",
     ALICE, f"Bearer {ALICE} {BOB}", f"Bearer {hashed(ALICE)}", "Bearer \udce4\udcff", f"Bearer {ALICE.upper()}"],
)  # fmt: skip
def test_anything_else_is_nobody(key_file: Path, authorization: str | None) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        Authenticator(key_file).authenticate(authorization)
    assert ALICE not in str(caught.value)
    assert WRONG not in str(caught.value)


def test_a_key_is_compared_with_every_other_in_constant_time(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `==`, a look-up, and a loop that ends where it has found one: all tell by the time how near one is."""
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare_digest(known: bytes, given: bytes) -> bool:
        compared.append(known)
        assert len(known) == len(given) == 32
        return real(known, given)

    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    authenticator = Authenticator(key_file)
    for key in (ALICE, BOB):
        compared.clear()
        authenticator.authenticate(f"Bearer {key}")
        assert len(compared) == 2
    monkeypatch.setattr(hmac, "compare_digest", lambda known, given: False)
    with pytest.raises(UnauthenticatedError):
        authenticator.authenticate(f"Bearer {ALICE}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "callers: Field required"),
        ("[callers]", "has no keys"),
        ("[callers.a]", "has no keys"),
        ("[callers.a]\nkeys = ['SECRET']", "callers.a.keys.0: String should have at least 20"),
        ("[callers.a]\nkeys = ['SECRET SECRET SECRET SECRET']", "callers.a.keys.0: String should match"),
        ("[callers.a]\nsha256 = ['SECRET']", "callers.a.sha256.0: String should match"),
        ("[callers.a]\nkeys = 'SECRET'", "callers.a.keys: Input should be a valid list"),
        ("[callers.a]\nmax_requests = 1", "callers.a.max_requests: Extra inputs"),
        ("[callers.a]\nrequests_per_minute = 0", "callers.a.requests_per_minute: Input should be greater"),
        ("[callers.a]\nkeys = [SECRET]", "is not TOML"),
        ("[callers.'a b']\nkeys = []", "callers.a b"),
        (f"[callers.a]\nkeys = ['{ALICE}']\n[callers.b]\nsha256 = ['{hashed(ALICE)}']", "callers.b: one of its keys"),
    ],
)
def test_a_file_that_is_not_usable_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(BadSettingsError) as caught:
        Authenticator(write(tmp_path / "keys.toml", text))
    assert problem in str(caught.value)
    assert "keys.toml" in str(caught.value)
    assert "SECRET" not in str(caught.value)
    assert ALICE not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettingsError, match=r"api_keys: cannot read .*keys.toml: No such file"):
        Authenticator(tmp_path / "keys.toml")


def test_the_file_is_read_again_when_it_changes(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a revoked key that goes on working, and a half-written file that locks everybody out."""
    caplog.set_level(logging.INFO)
    authenticator = Authenticator(key_file, poll_seconds=0.0)
    write(key_file, f"[callers.alice]\nkeys = ['{WRONG}']")
    assert authenticator.authenticate(f"Bearer {WRONG}").name == "alice"
    for revoked in (ALICE, BOB):
        with pytest.raises(UnauthenticatedError):
            authenticator.authenticate(f"Bearer {revoked}")
    write(key_file, "[callers.")
    assert authenticator.authenticate(f"Bearer {WRONG}").name == "alice"
    key_file.unlink()
    assert authenticator.authenticate(f"Bearer {WRONG}").name == "alice"
    assert [record.levelname for record in caplog.records].count("ERROR") == 2
    assert not any(key in caplog.text for key in (ALICE, BOB, WRONG))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_requests_of_a_minute_come_back_one_by_one() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    caller = Caller("a", requests_per_minute=6)
    assert [limits.take(caller) for _ in range(6)] == [None] * 6
    excess = limits.take(caller)
    assert excess is not None
    assert excess.reason == "request_rate"
    assert excess.seconds == pytest.approx(10.0)
    assert limits.take(Caller("b", requests_per_minute=1)) is None
    clock.now += 9.9
    assert limits.take(caller) is not None
    clock.now += 0.2
    assert limits.take(caller) is None
    assert limits.take(caller) is not None
    clock.now += 600
    assert [limits.take(caller) is None for _ in range(7)] == [True] * 6 + [False]


def test_tokens_beyond_the_limit_are_waited_for_afterwards() -> None:
    """Catches a bill that is forgotten at the end of the minute, and one for those who have no limit."""
    clock = Clock()
    limits = RateLimits(clock)
    caller = Caller("a", tokens_per_minute=60)
    assert limits.take(caller) is None
    limits.spend("a", 150)
    limits.spend("b", 10**9)
    assert limits.take(Caller("b")) is None
    assert limits.take(ANONYMOUS) is None
    excess = limits.take(caller)
    assert excess is not None
    assert excess.reason == "token_rate"
    assert excess.seconds == pytest.approx(91.0)
    clock.now += 90.5
    assert limits.take(caller) is not None
    clock.now += 1
    assert limits.take(caller) is None
    # A limit that was raised in the file counts at once, one that was removed too.
    limits.spend("a", 100)
    assert limits.take(caller) is not None
    assert limits.take(Caller("a", tokens_per_minute=600)) is None
    assert limits.take(Caller("a")) is None
    assert limits.take(caller) is None


def as_caller(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@contextmanager
def refused(code: grpc.StatusCode) -> Iterator[pytest.ExceptionInfo[grpc.aio.AioRpcError]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield caught
    assert caught.value.code() is code


def answer(message: verifier_pb2.OpenDecoding) -> list[verifier_pb2.SequenceUpdate]:
    return [step(message.sequence_id, [4, 5], finish=generation_pb2.FINISH_REASON_LENGTH)]


async def test_grpc_asks_for_a_key(verifier: FakeVerifier, key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a method that forgot to ask, a probe that needs a key, and a key in logs or spans."""
    caplog.set_level(logging.INFO)
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    verifier.script = answer
    request = generation_pb2.GenerateRequest(token_ids=token_ids(1, 2, 3))
    async with running_gateway(
        verifier, api_keys=key_file, telemetry=Telemetry(provider.get_tracer("test"), is_enabled=True)
    ) as running:
        for metadata in ((), as_caller(WRONG), (("authorization", BOB),)):
            with refused(grpc.StatusCode.UNAUTHENTICATED):
                [event async for event in running.stub.Generate(request, metadata=metadata)]
            with refused(grpc.StatusCode.UNAUTHENTICATED):
                await running.stub.GetModel(generation_pb2.GetModelRequest(), metadata=metadata)
        assert not verifier.opened
        assert (await running.stub.GetModel(generation_pb2.GetModelRequest(), metadata=as_caller(BOB))).name == "fake"
        events = [event async for event in running.stub.Generate(request, metadata=as_caller(ALICE))]
        assert events[-1].HasField("finished")
        health = health_pb2_grpc.HealthStub(running.channel)
        state = await health.Check(health_pb2.HealthCheckRequest())
        assert state.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        listing = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        assert (await listing.read()).list_services_response.service
    callers = [(span.attributes or {}).get("outrider.caller") for span in exporter.get_finished_spans()]
    assert callers.count("alice") == 1
    assert "alice" in {getattr(record, "caller", "") for record in caplog.records}
    spans = "".join(span.to_json() for span in exporter.get_finished_spans())
    logs = "".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    for secret in (ALICE, BOB, WRONG):
        assert secret not in spans
        assert secret not in logs


async def test_http_asks_for_the_same_keys(verifier: FakeVerifier, key_file: Path) -> None:
    verifier.script = answer
    async with (
        running_gateway(verifier, api_keys=key_file, http_listen="127.0.0.1:0") as running,
        httpx.AsyncClient(base_url=f"http://{running.gateway.http_address}", trust_env=False) as client,
    ):
        for path in ("/v1/models", "/v1/completions", "/v1/chat/completions"):
            for headers in ({}, {"authorization": f"Bearer {WRONG}"}):
                response = await client.request("GET" if path == "/v1/models" else "POST", path, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": f"Bearer {BOB}"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/livez")).status_code == 200
        completion = await client.post("/v1/completions", headers=right, json={"model": "fake", "prompt": [1, 2]})
        assert completion.status_code == 200


async def test_limits_are_refused_with_a_time(verifier: FakeVerifier, tmp_path: Path) -> None:
    """Catches limits that are read and never looked at."""
    names = {"max_concurrent_requests": "caller_limit", "requests_per_minute": "request_rate"}
    names["tokens_per_minute"] = "token_rate"
    keys = {limit: f"{limit:-<30}" for limit in names}
    text = "".join(f"[callers.{limit}]\nkeys = ['{key}']\n{limit} = 2\n" for limit, key in keys.items())
    request = generation_pb2.GenerateRequest(token_ids=token_ids(1, 2, 3))
    async with running_gateway(verifier, api_keys=write(tmp_path / "keys.toml", text)) as running:
        for limit, reason in names.items():
            # The third of each is one too many; of tokens, three of a prompt are too many already.
            calls = []
            for _ in range(1 if limit == "tokens_per_minute" else 2):
                calls.append(running.stub.Generate(request, metadata=as_caller(keys[limit])))
                opened = await verifier.next_open()
                if limit != "max_concurrent_requests":
                    verifier.send(*answer(opened))
                    assert [event async for event in calls[-1]]
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED) as caught:
                [event async for event in running.stub.Generate(request, metadata=as_caller(keys[limit]))]
            retry = error_details_pb2.RetryInfo()
            assert rpc_status.from_call(caught.value).details[0].Unpack(retry)  # type: ignore[arg-type]
            assert retry.retry_delay.ToNanoseconds() > 0
            assert running.gateway._admission.refusals[reason] == 1
            assert reason in REFUSALS
            for call in calls:
                call.cancel()
        await asyncio.wait_for(running.is_idle(), 10)
