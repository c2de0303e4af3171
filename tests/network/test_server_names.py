"""Whom a connection trusts that was found by DNS: the holder of a certificate for the name, at whatever address."""

from __future__ import annotations

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.service.serving import channel_options


@pytest.mark.parametrize(("certified", "is_trusted"), [("verifier", True), ("drafter", False), ("127.0.0.1", False)])
async def test_the_certificate_is_for_the_name_that_dns_was_asked_for(certified: str, is_trusted: bool) -> None:
    """Catches a check against the pod's address, which no certificate names, and no check at all."""
    authority = trustme.CA()
    certificate = authority.issue_cert(certified)
    credentials = grpc.ssl_server_credentials(
        [(certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())]
    )
    server = grpc.aio.server(options=channel_options(1 << 16, server=True))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    trusting = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    try:
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{port}", trusting, options=channel_options(1 << 16, server_name="verifier")
        ) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            if is_trusted:
                assert (await check).status == health_pb2.HealthCheckResponse.SERVING
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await check
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(None)
