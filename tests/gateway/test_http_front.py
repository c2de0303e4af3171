"""The life of the HTTP front: when it binds, what probes hear, how it ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from types import SimpleNamespace

import grpc
import httpx
import openai
import pytest
import trustme

from gateway.auth import Caller
from gateway.gateway import Gateway, make_server
from gateway.http.app import Front, make_app
from gateway.http.server import HttpServer
from gateway.settings import GatewaySettings
from outrider.protocol.errors import RelayedError
from outrider.service.settings import BadSettingsError
from outrider.service.telemetry import Telemetry
from outrider.v1 import generation_pb2
from tests.gateway.fake_verifier import FakeVerifier, eventually, running_gateway, token_ids
from tests.gateway.test_settings import ROOT

LISTEN = "127.0.0.1:0"


async def get(address: str, path: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"http://{address}{path}")).status_code


async def test_probes_hear_of_loading_serving_and_draining(verifier: FakeVerifier) -> None:
    """Catches a load balancer that is sent to a gateway without a verifier, and a probe that kills one for loading."""
    await verifier.stop()
    settings = GatewaySettings(verifiers=(verifier.address,), listen=LISTEN, http_listen=LISTEN, drain_seconds=5)
    server = make_server(settings, None, Telemetry())
    gateway = server._component
    assert isinstance(gateway, Gateway)
    starting = asyncio.create_task(server.start())
    await eventually(lambda: gateway.http_address != "")
    address = gateway.http_address
    assert [await get(address, "/healthz"), await get(address, "/livez")] == [503, 200]
    await verifier.start()
    await asyncio.wait_for(starting, 10)
    assert [await get(address, "/healthz"), await get(address, "/livez")] == [200, 200]
    await server.stop()
    with pytest.raises(httpx.ConnectError):
        await get(address, "/livez")


async def test_draining_shows_while_a_request_runs(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier, http_listen=LISTEN) as running:
        address = running.gateway.http_address
        call = running.stub.Generate(generation_pb2.GenerateRequest(token_ids=token_ids(1, 2)))
        await verifier.next_open()
        stopping = asyncio.create_task(running.stop())
        await asyncio.sleep(0.05)
        assert [await get(address, "/healthz"), await get(address, "/livez")] == [503, 200]
        call.cancel()
        await asyncio.wait_for(stopping, 10)


async def test_pieces_of_an_answer_do_not_wait_for_each_other(verifier: FakeVerifier) -> None:
    """Catches 40 ms on every answer, between Nagle's algorithm here and delayed acknowledgements there."""
    async with running_gateway(verifier, http_listen=LISTEN) as running:
        host, _, port = running.gateway.http_address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        assert running.gateway._http is not None
        connections = running.gateway._http._server.server_state.connections
        await eventually(lambda: bool(connections))
        (connection,) = connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        writer.close()


async def test_a_taken_port_is_named(verifier: FakeVerifier) -> None:
    settings = GatewaySettings(verifiers=(verifier.address,), listen=LISTEN, http_listen=verifier.address)
    server = make_server(settings, None, Telemetry())
    with pytest.raises(OSError, match="http_listen"):
        await asyncio.wait_for(server.start(), 10)
    await server.abandon()


async def test_tls_and_who_calls() -> None:
    """Catches a key that is sent in the clear, or not looked at."""
    authority = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(tls)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    def authenticate(authorization: str | None) -> Caller:
        if authorization == "Bearer right":
            return Caller("somebody")
        raise RelayedError(grpc.StatusCode.UNAUTHENTICATED, "authorization: no such key")

    pool = SimpleNamespace(model=SimpleNamespace(context_length=0))
    front = Front(
        settings=GatewaySettings(verifiers=("a:1",), http_listen=LISTEN),
        generator=SimpleNamespace(model_name="m"),  # type: ignore[arg-type]
        pool=pool,  # type: ignore[arg-type]
        tokenizer=None,
        telemetry=Telemetry(),
        is_serving=lambda: True,
        authenticate=authenticate,
    )
    server = HttpServer(make_app(front), LISTEN, tls=tls)
    await server.start()
    port = server.address.rpartition(":")[2]
    for key, outcome in (("right", None), ("wrong", openai.AuthenticationError)):
        async with openai.AsyncOpenAI(
            base_url=f"https://localhost:{port}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=trusting, trust_env=False),
        ) as client:
            if outcome is None:
                assert [model.id async for model in client.models.list()] == ["m"]
            else:
                with pytest.raises(outcome) as caught:
                    await client.models.list()
                assert caught.value.code == "invalid_api_key"
                assert caught.value.response.headers["www-authenticate"] == "Bearer"
    async with httpx.AsyncClient(trust_env=False) as plain:
        with pytest.raises(httpx.HTTPError):
            await plain.get(f"http://localhost:{port}/livez")
    await server.stop()


def test_the_setting_is_checked() -> None:
    with pytest.raises(BadSettingsError, match="--http-listen"):
        GatewaySettings.load(["--verifiers", "a:1", "--http-listen", "8080"], program="gateway")


def test_no_http_no_packages_for_it() -> None:
    """Catches an import that makes every gateway carry what only one with HTTP needs."""
    names = ("starlette", "uvicorn", "jinja2")
    code = f"import sys, gateway.__main__; sys.exit(any(name in sys.modules for name in {names}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_http_brings_no_torch() -> None:
    code = "import sys, gateway.http.app, gateway.http.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
