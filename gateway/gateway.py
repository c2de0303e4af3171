"""The gateway put together: its parts, its life and its server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admission import Admission
from gateway.auth import Authenticate, Authenticator, admit_anyone
from gateway.discovery import Resolver
from gateway.generation_service import GenerationService
from gateway.generator import Generator
from gateway.metrics import GatewayMetrics
from gateway.pool_metrics import follow
from gateway.served_model import ServedModel
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizer
from gateway.verifier_pool import VerifierPool
from outrider.service.security import ServerSecurity, make_dial
from outrider.service.serving import CLIENT_KEEPALIVE, Registration, Server
from outrider.service.telemetry import Telemetry
from outrider.v1 import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from gateway.dashboard.dashboard import Dashboard
    from gateway.http.server import HttpServer

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


class Gateway:
    """What the gateway brings to its server; made on the event loop that serves it."""

    def __init__(
        self,
        settings: GatewaySettings,
        tokenizer: Tokenizer | None,
        telemetry: Telemetry,
        metrics: GatewayMetrics | None = None,
        *,
        resolver: Resolver | None = None,
    ) -> None:
        self._settings = settings
        # None where nobody reads them.
        self._metrics = metrics if metrics is not None and metrics.is_enabled else None
        self._tokenizer = tokenizer
        self._pool = VerifierPool(
            settings.verifiers,
            settings.drafters,
            max_message_bytes=settings.max_message_bytes,
            dial=make_dial(settings),
            resolver=resolver,
            dns_refresh_seconds=settings.dns_refresh_seconds,
            check_model=self._check_model,
            wire_bytes=self._metrics.wire_bytes if self._metrics is not None else None,
        )
        self._admission = Admission(
            capacity=lambda: settings.max_concurrent_sequences or self._pool.capacity,
            max_queued=settings.max_queued_requests,
            max_queue_seconds=settings.max_queue_seconds,
        )
        if self._metrics is not None:
            follow(self._metrics, self._admission, self._pool)
        generator = Generator(
            pool=self._pool,
            admission=self._admission,
            tokenizer=tokenizer,
            model_name=settings.model_name,
            metrics=self._metrics,
        )
        self._authenticate: Authenticate = admit_anyone
        if settings.api_keys is not None:
            self._authenticate = Authenticator(settings.api_keys).authenticate
        self.service = GenerationService(
            generator,
            self._pool,
            telemetry=telemetry,
            has_tokenizer=tokenizer is not None,
            trace_prompts=settings.trace_prompts,
            authenticate=self._authenticate,
        )
        self._is_serving = False
        self._dashboard = self._make_dashboard(generator) if settings.dashboard else None
        self._http = self._make_http(generator, telemetry) if settings.http_listen is not None else None

    @property
    def http_address(self) -> str:
        """host:port of the HTTP front, empty before it is bound or where there is none."""
        return "" if self._http is None else self._http.address

    async def start(self) -> None:
        """Return once a verifier is connected and, where drafters are configured, one is ready or was waited for.

        HTTP answers before that, if only to say that the gateway is not serving yet.
        """
        try:
            if self._dashboard is not None:
                await self._dashboard.start()
            if self._http is not None:
                await self._http.start()
            await self._pool.start(drafter_wait_seconds=self._settings.drafter_wait_seconds)
        except BaseException:
            await self._stop_fronts()
            raise
        self._is_serving = True

    async def drain(self) -> None:
        """Refuse what is new or waits, and return when the running requests are done."""
        self._is_serving = False
        await self._admission.drain()

    async def stop(self) -> None:
        """Close the links to the verifiers; requests that still run end with UNAVAILABLE."""
        await self._pool.stop()
        await self._stop_fronts()

    async def _stop_fronts(self) -> None:
        if self._http is not None:
            await self._http.stop()
        if self._dashboard is not None:
            await self._dashboard.stop()

    def _make_dashboard(self, generator: Generator) -> Dashboard:
        from gateway.dashboard.dashboard import Dashboard

        settings = self._settings
        return Dashboard(
            generator, self._pool, otlp_listen=settings.dashboard_otlp_listen, shows_texts=settings.dashboard_texts
        )

    def _make_http(self, generator: Generator, telemetry: Telemetry) -> HttpServer:
        # Imported here, so that a gateway without HTTP does without its packages too.
        from gateway.http.app import Front, make_app
        from gateway.http.server import HttpServer

        assert self._settings.http_listen is not None
        front = Front(
            settings=self._settings,
            generator=generator,
            pool=self._pool,
            tokenizer=self._tokenizer,
            telemetry=telemetry,
            is_serving=lambda: self._is_serving,
            dashboard=self._dashboard,
            metrics=self._metrics,
            authenticate=self._authenticate,
        )
        tls = ServerSecurity(self._settings).ssl_context()
        return HttpServer(make_app(front), self._settings.http_listen, tls=tls)

    def _check_model(self, model: ServedModel) -> None:
        if self._tokenizer is not None:
            self._tokenizer.check_fits(model)


def make_server(
    settings: GatewaySettings,
    tokenizer: Tokenizer | None,
    telemetry: Telemetry,
    metrics: GatewayMetrics | None = None,
    *,
    resolver: Resolver | None = None,
) -> Server:
    """The gateway's server, not yet started. Without a `resolver` names are looked up as the system does."""
    gateway = Gateway(settings, tokenizer, telemetry, metrics, resolver=resolver)

    def add(server: object) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(gateway.service, server)  # type: ignore[arg-type]

    return Server(settings, gateway, [Registration(SERVICE_NAME, add)], keepalive=CLIENT_KEEPALIVE, metrics=metrics)
