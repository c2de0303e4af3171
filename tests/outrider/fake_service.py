"""A quick stand-in for any of the services, run as a program: health, GenerationService, and ways to fail."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.v1 import generation_pb2_grpc
from tests.outrider.fake_gateway import FakeGateway


async def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--listen")
    parser.add_argument("--health-listen")
    parser.add_argument("--behave", default="well", choices=["well", "die", "hang", "stubborn"])
    parsed, _ = parser.parse_known_args()
    print("fake service", *sys.argv[1:], flush=True)
    if parsed.behave == "die":
        sys.exit("no such model")
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(FakeGateway(), server)
    server.add_insecure_port(parsed.listen)
    server.add_insecure_port(parsed.health_listen)
    await server.start()
    status = health_pb2.HealthCheckResponse
    await servicer.set("", status.NOT_SERVING if parsed.behave == "hang" else status.SERVING)
    stop = asyncio.Event()
    if parsed.behave == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(grace=0)


if __name__ == "__main__":
    asyncio.run(main())
