"""TLS between services: who is let in, over what, and certificates that are renewed while streams run."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.http.server import HttpServer
from outrider.service import security
from outrider.service.security import make_dial
from outrider.service.serving import Registration, Server, channel_options
from outrider.service.settings import BadSettingsError, ServiceSettings
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from tests.certificates import Mounted
from tests.gateway.fake_verifier import FakeVerifier

HOST = "127.0.0.1"
INFO = verifier_pb2.VerifierServiceGetInfoRequest()


class Component:
    """Has nothing to start and nothing to end."""

    async def start(self) -> None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def files_are_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "POLL_SECONDS", 0.0)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[Server]:
    """A verifier's face on a free port."""
    registration = Registration(
        "outrider.v1.VerifierService",
        lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(FakeVerifier(), server),
    )
    server = Server(ServiceSettings(listen=f"{HOST}:0", **settings), Component(), [registration])  # type: ignore[arg-type]
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def connect(server: Server, **settings: object) -> grpc.aio.Channel:
    """A channel as our own services make them."""
    return make_dial(ServiceSettings(**settings))(server.address, channel_options(1 << 20))  # type: ignore[arg-type]


async def ask(server: Server, **settings: object) -> grpc.StatusCode:
    """How a call ends that a service with these settings makes."""
    async with connect(server, **settings) as channel:
        try:
            await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(INFO, timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_tls_is_asked_for_on_both_sides(tmp_path: Path, authority: trustme.CA) -> None:
    server_files, other = Mounted(tmp_path, HOST, authority), Mounted(tmp_path, "other", trustme.CA(), HOST)
    named_otherwise = Mounted(tmp_path, "elsewhere", authority)
    async with serving(**server_files.serving()) as server:
        assert await ask(server, tls_ca=server_files.ca) is grpc.StatusCode.OK
        assert await ask(server) is grpc.StatusCode.UNAVAILABLE
        assert await ask(server, tls_ca=other.ca) is grpc.StatusCode.UNAVAILABLE
    async with serving(**named_otherwise.serving()) as server:
        assert await ask(server, tls_ca=named_otherwise.ca) is grpc.StatusCode.UNAVAILABLE
    async with serving() as server:
        assert await ask(server) is grpc.StatusCode.OK
        assert await ask(server, tls_ca=server_files.ca) is grpc.StatusCode.UNAVAILABLE


async def test_mtls_lets_in_the_certificates_of_its_authority(tmp_path: Path, authority: trustme.CA) -> None:
    """Catches a certificate that is merely asked for, and names that are not looked at."""
    verifier = Mounted(tmp_path, "verifier", authority, HOST)
    gateway, drafter = Mounted(tmp_path, "gateway", authority), Mounted(tmp_path, "drafter", authority)
    stranger = Mounted(tmp_path, "stranger", trustme.CA(), "gateway")
    async with serving(**verifier.serving(clients=True, allowed=("gateway", "spiffe://x/y"))) as server:
        assert await ask(server, tls_ca=verifier.ca) is grpc.StatusCode.UNAVAILABLE
        assert await ask(server, tls_ca=verifier.ca, **stranger.serving()) is grpc.StatusCode.UNAVAILABLE
        assert await ask(server, tls_ca=verifier.ca, **gateway.serving()) is grpc.StatusCode.OK
        assert await ask(server, tls_ca=verifier.ca, **drafter.serving()) is grpc.StatusCode.PERMISSION_DENIED
        async with connect(server, tls_ca=verifier.ca, **drafter.serving()) as channel:
            stream = verifier_pb2_grpc.VerifierServiceStub(channel).Decode(None)
            with pytest.raises(grpc.aio.AioRpcError, match="certificate is for drafter may not call"):
                await stream.read()
    async with serving(**verifier.serving(clients=True)) as server:
        assert await ask(server, tls_ca=verifier.ca, **drafter.serving()) is grpc.StatusCode.OK


async def test_probes_need_no_certificate(tmp_path: Path, authority: trustme.CA) -> None:
    files = Mounted(tmp_path, HOST, authority)
    async with (
        serving(**files.serving(clients=True), health_listen=f"{HOST}:0") as server,
        grpc.aio.insecure_channel(server.health_address) as channel,
    ):
        state = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert state.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(INFO)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_renewed_certificate_serves_new_connections_and_old_streams_go_on(
    tmp_path: Path, authority: trustme.CA
) -> None:
    """Catches certificates that need a restart, renewals that cut streams off, and an authority that stays for ever."""
    verifier = Mounted(tmp_path, "verifier", authority, HOST)
    gateway = Mounted(tmp_path, "gateway", authority)
    late = Mounted(tmp_path, "late", authority)
    dial = make_dial(ServiceSettings(tls_ca=gateway.ca, **gateway.serving()))  # type: ignore[arg-type]
    options = channel_options(1 << 20)
    async with serving(**verifier.serving(clients=True)) as server, dial(server.address, options) as before:
        stream = verifier_pb2_grpc.VerifierServiceStub(before).Decode(None)
        assert isinstance(await stream.read(), verifier_pb2.DecodeResponse)
        second = trustme.CA()
        verifier.renew(second)
        gateway.renew(second)
        async with dial(server.address, options) as after:
            await verifier_pb2_grpc.VerifierServiceStub(after).GetInfo(INFO, timeout=5)
        assert await ask(server, tls_ca=gateway.ca, **gateway.serving()) is grpc.StatusCode.OK
        assert await ask(server, tls_ca=late.ca, **gateway.serving()) is grpc.StatusCode.UNAVAILABLE
        assert await ask(server, tls_ca=gateway.ca, **late.serving()) is grpc.StatusCode.UNAVAILABLE
        # The stream that was there before, and another call on its connection.
        assert not stream.done()
        await stream.write(verifier_pb2.DecodeRequest(closes=[7]))
        await verifier_pb2_grpc.VerifierServiceStub(before).GetInfo(INFO, timeout=5)
        assert not stream.done()
        stream.cancel()


async def test_files_that_become_unusable_change_nothing(
    tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a service that refuses everybody between the writing of a certificate and that of its key."""
    files, other = Mounted(tmp_path, HOST, authority), Mounted(tmp_path, "other", authority, HOST)
    async with serving(**files.serving()) as server:
        data = files.key.parent / "..1"
        (data / "tls.crt").write_bytes(other.certificate.read_bytes())
        assert await ask(server, tls_ca=files.ca) is grpc.StatusCode.OK
        assert "are not a certificate and its key: KEY_VALUES_MISMATCH" in caplog.text
        (data / "tls.key").unlink()
        assert await ask(server, tls_ca=files.ca) is grpc.StatusCode.OK
        assert "cannot read" in caplog.text
        num_lines = len(caplog.records)
        assert await ask(server, tls_ca=files.ca) is grpc.StatusCode.OK
        assert len(caplog.records) == num_lines, "once, and not with every connection"
        (data / "tls.key").write_bytes(other.key.read_bytes())
        caplog.set_level(logging.INFO)
        assert await ask(server, tls_ca=files.ca) is grpc.StatusCode.OK
        assert "read anew" in caplog.text


async def test_http_has_the_same_certificate_and_the_same_guests(tmp_path: Path, authority: trustme.CA) -> None:
    gateway, friend = Mounted(tmp_path, "gateway", authority, HOST), Mounted(tmp_path, "friend", authority)
    foe = Mounted(tmp_path, "foe", authority)
    settings = ServiceSettings(**gateway.serving(clients=True, allowed=("friend",)))  # type: ignore[arg-type]

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    server = HttpServer(app, f"{HOST}:0", tls=security.ServerSecurity(settings).ssl_context())
    await server.start()

    async def get(client: Mounted | None, ca: Path) -> bool:
        verify = ssl.create_default_context(cafile=ca)
        if client is not None:
            verify.load_cert_chain(client.certificate, client.key)
        try:
            async with httpx.AsyncClient(verify=verify, trust_env=False) as session:
                return (await session.get(f"https://{server.address}/")).text == "hello"
        except httpx.TransportError:
            return False

    old_ca = tmp_path / "old.crt"
    old_ca.write_bytes(gateway.ca.read_bytes())
    assert await get(friend, gateway.ca)
    assert not await get(None, gateway.ca)
    assert not await get(foe, gateway.ca)
    second = trustme.CA()
    gateway.renew(second)
    assert not await get(friend, old_ca)
    assert not await get(friend, gateway.ca)
    friend.renew(second)
    assert await get(friend, gateway.ca)
    await asyncio.wait_for(server.stop(), 5)


def test_unusable_files_are_refused_at_the_start(tmp_path: Path, authority: trustme.CA) -> None:
    files, other = Mounted(tmp_path, "a", authority), Mounted(tmp_path, "b", authority)
    empty = tmp_path / "empty"
    empty.touch()
    for change, problem in (
        ({"tls_key": other.key}, "tls_certificate: .*tls.crt and .*tls.key are not a certificate and its key"),
        ({"tls_key": tmp_path / "nowhere"}, "tls_certificate: cannot read .*nowhere: No such file"),
        ({"tls_certificate": empty}, "tls_certificate: .*empty and .*tls.key are not"),
        ({"tls_client_ca": empty}, "tls_certificate: .*empty has no certificates of authorities"),
    ):
        settings = ServiceSettings(**files.serving(clients=True) | change)  # type: ignore[arg-type]
        with pytest.raises(BadSettingsError, match=problem):
            security.ServerSecurity(settings)
    with pytest.raises(BadSettingsError, match=r"tls_ca: .*empty has no certificates"):
        make_dial(ServiceSettings(tls_ca=empty))


def test_an_encrypted_key_is_refused_and_nobody_asked_for_its_password(tmp_path: Path, authority: trustme.CA) -> None:
    from cryptography.hazmat.primitives import serialization

    files = Mounted(tmp_path, "a", authority)
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    encrypted = tmp_path / "encrypted"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    settings = ServiceSettings(**files.serving() | {"tls_key": encrypted})  # type: ignore[arg-type]
    with pytest.raises(BadSettingsError, match="encrypted are not a certificate and its key"):
        security.ServerSecurity(settings)


def test_half_a_configuration_is_refused() -> None:
    for flags, problem in (
        (["--tls-certificate", "a"], "--tls-certificate needs --tls-key"),
        (["--tls-key", "a"], "--tls-key needs --tls-certificate"),
        (["--tls-client-ca", "a"], "--tls-client-ca needs --tls-certificate"),
        (["--tls-allowed-clients", "a"], "--tls-allowed-clients needs --tls-client-ca"),
    ):
        with pytest.raises(BadSettingsError, match=problem):
            ServiceSettings.load(flags, program="service")


TLS = ["--tls-certificate", "a", "--tls-key", "b"]


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "example.com", "[fe80::1]"])
def test_an_open_address_must_be_allowed_by_name(host: str) -> None:
    """Catches a service that anybody can read or call because nobody thought of it."""

    def load(*flags: str) -> ServiceSettings:
        return ServiceSettings.load(["--listen", f"{host}:1", *flags], program="service")

    for refused, flag in (
        ([], "--allow-plaintext"),
        (["--allow-unauthenticated"], "--allow-plaintext"),
        (["--allow-plaintext"], "--allow-unauthenticated"),
        (TLS, "--allow-unauthenticated"),
    ):
        with pytest.raises(BadSettingsError, match=f"other machines can reach .*:1.*{flag}"):
            load(*refused)
    load("--allow-plaintext", "--allow-unauthenticated")
    load(*TLS, "--allow-unauthenticated")
    load(*TLS, "--tls-client-ca", "c")


def test_loopback_needs_no_permission() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]", "127.9.9.9"):
        assert ServiceSettings.load(["--listen", f"{host}:1"], program="service").tls_certificate is None
    # Probes and metrics have ports of their own, with nothing to keep secret.
    open_ports = ["--health-listen", "0.0.0.0:1", "--metrics-listen", "0.0.0.0:2"]
    assert not ServiceSettings.load(open_ports, program="service").allow_plaintext


def test_a_clients_variable_is_none_of_a_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OUTRIDER_API_KEY", "secret")
    ServiceSettings.load([], program="service")
    monkeypatch.setitem(os.environ, "OUTRIDER_API_KEYS", "secret")
    with pytest.raises(BadSettingsError, match="OUTRIDER_API_KEYS: unknown") as caught:
        ServiceSettings.load([], program="service")
    assert "secret" not in str(caught.value)
