"""Metrics: what a service measures, on its way to a Prometheus endpoint and over OTLP.

Instruments are declared in the `metrics` module of each service and hold plain numbers; see `instruments`.
OpenTelemetry's SDK reads them when a Prometheus server scrapes or when it is time to export.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self
from wsgiref.simple_server import WSGIServer

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    ConsoleMetricExporter,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family

from outrider.service.exporter_choice import chosen_exporter
from outrider.service.instruments import Counter, Gauge, Histogram, Instrument, Instruments, Labels
from outrider.service.telemetry import service_resource

logger = logging.getLogger(__name__)

# How long the last numbers may take to their collector, which may not answer.
FLUSH_SECONDS = 2.0


class ServiceMetrics:
    """The instruments of a service and the ways out for their numbers; each service declares its own in a subclass.

    `is_enabled` is false when nobody reads them: callers then skip the counting.
    """

    service: str
    # Whom the service exchanges messages with.
    peers: tuple[str, ...]

    def __init__(self) -> None:
        self.instruments = Instruments()
        self.wire_bytes = self.instruments.counter(
            f"outrider.{self.service}.wire.bytes",
            "By",
            "gRPC messages on the wire, without the framing of HTTP/2",
            {"peer": self.peers, "direction": ("sent", "received")},
        )
        self.tasks = self.instruments.gauge(
            f"outrider.{self.service}.tasks", "{task}", "Tasks of the event loop: where one leaks, they grow"
        )
        self._provider: MeterProvider | None = None
        self._registry: CollectorRegistry | None = None
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self.address = ""

    @classmethod
    def from_environment(cls, *, is_scraped: bool, environment: Mapping[str, str] | None = None) -> Self:
        """The metrics that OTEL_* variables ask for, and a Prometheus text where `is_scraped`.

        Raises ValueError for an exporter, protocol or temporality that is not supported.
        """
        environment = os.environ if environment is None else environment
        metrics = cls()
        if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
            if is_scraped:
                logger.warning("OTEL_SDK_DISABLED is set: there are no metrics")
            return metrics
        exporter = _exporter(environment)
        metrics._export_to([exporter] if exporter is not None else [], is_scraped=is_scraped)
        return metrics

    @property
    def is_enabled(self) -> bool:
        """Whether anybody can read what is counted."""
        return self._provider is not None

    def render(self) -> tuple[bytes, str]:
        """All numbers as Prometheus' text, and its content type; safe to call from any thread."""
        assert self._registry is not None, "not scraped"
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    @property
    def has_text(self) -> bool:
        """Whether `render` may be called."""
        return self._registry is not None

    def start(self, listen: str | None) -> None:
        """Serve the text at host:port, on threads of its own. Raises OSError when the address is taken."""
        if listen is None or self._registry is None:
            return
        host, _, port = listen.rpartition(":")
        try:
            self._server = start_http_server(int(port), host.strip("[]"), self._registry)
        except OSError as error:
            raise OSError(f"metrics_listen: cannot bind {listen}: {error.strerror}") from error
        self.address = f"{host}:{self._server[0].server_port}"
        logger.info("metrics on http://%s/metrics", self.address)

    def stop(self) -> None:
        """Close the endpoint and export what is left; blocks for as long as that takes, FLUSH_SECONDS or a little more.

        What cannot be exported is lost, with a warning.
        """
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()
        if self._provider is not None:
            provider, self._provider = self._provider, None
            try:
                provider.shutdown(timeout_millis=FLUSH_SECONDS * 1e3)
            except Exception as error:  # the SDK raises no type of its own
                # A collector that does not answer is no reason to end as if something had gone wrong here.
                logger.warning("the last metrics were not exported: %s", error)

    def _export_to(self, exporters: Iterable[MetricExporter], *, is_scraped: bool) -> None:
        histograms = _Histograms([made for made in self.instruments if isinstance(made, Histogram)])
        readers: list[MetricReader] = [_PeriodicReader(exporter, histograms) for exporter in exporters]
        if is_scraped:
            self._registry = _Registry()
            ProcessCollector(registry=self._registry)
            readers.append(_PrometheusReader(self._registry, histograms))
        if not readers:
            return
        self._provider = MeterProvider(readers, resource=service_resource(self.service), shutdown_on_exit=False)
        meter = self._provider.get_meter("outrider")
        for made in self.instruments:
            about = made.instrument
            if isinstance(made, Counter):
                meter.create_observable_counter(about.name, [_observe(made)], about.unit, about.description)
            elif isinstance(made, Gauge):
                meter.create_observable_gauge(about.name, [_observe(made)], about.unit, about.description)


class _Registry(CollectorRegistry):
    """One collection at a time: OpenTelemetry's reader would mix up two that overlap."""

    def __init__(self) -> None:
        super().__init__(auto_describe=False)
        self._collecting = threading.Lock()

    def collect(self) -> Iterable[Family]:
        with self._collecting:
            return list(super().collect())


class _Histograms:
    """Adds our histograms to what the SDK has collected, which has no instrument that takes whole distributions."""

    def __init__(self, histograms: list[Histogram]) -> None:
        self._histograms = histograms
        self._start_ns = time.time_ns()

    def added_to(self, collected: MetricsData) -> MetricsData:
        now_ns = time.time_ns()
        ours = [self._metric(histogram, now_ns) for histogram in self._histograms]
        resource, *others = collected.resource_metrics
        scope, *other_scopes = resource.scope_metrics
        scope = ScopeMetrics(scope.scope, [*scope.metrics, *ours], scope.schema_url)
        resource = ResourceMetrics(resource.resource, [scope, *other_scopes], resource.schema_url)
        return MetricsData([resource, *others])

    def _metric(self, histogram: Histogram, now_ns: int) -> Metric:
        about = histogram.instrument
        points = []
        for labels, series in histogram.values().items():
            counts = series.counts.copy()
            num_values = sum(counts)
            points.append(
                HistogramDataPoint(
                    attributes=_attributes(about, labels),
                    start_time_unix_nano=self._start_ns,
                    time_unix_nano=now_ns,
                    count=num_values,
                    sum=series.total,
                    bucket_counts=counts,
                    explicit_bounds=about.buckets,
                    min=series.least if num_values else 0.0,
                    max=series.greatest if num_values else 0.0,
                )
            )
        data = HistogramData(points, AggregationTemporality.CUMULATIVE)
        return Metric(about.name, about.description, about.unit, data)


class _PrometheusReader(PrometheusMetricReader):
    def __init__(self, registry: CollectorRegistry, histograms: _Histograms) -> None:
        super().__init__(scope_info_enabled=False, registry=registry)
        self._histograms = histograms

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(self._histograms.added_to(metrics_data), timeout_millis, **kwargs)


class _PeriodicReader(PeriodicExportingMetricReader):
    def __init__(self, exporter: MetricExporter, histograms: _Histograms) -> None:
        # First: the parent starts the thread that uses it.
        self._histograms = histograms
        super().__init__(exporter)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(self._histograms.added_to(metrics_data), timeout_millis, **kwargs)


def _observe(made: Counter | Gauge) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, _attributes(made.instrument, labels)) for labels, value in made.values().items()]

    return observe


def _attributes(about: Instrument, labels: Labels) -> dict[str, str]:
    return {name: value for name, value in zip(about.labels, labels, strict=True) if value}


def _exporter(environment: Mapping[str, str]) -> MetricExporter | None:
    if environment.get("OTEL_METRICS_EXPORTER") == "prometheus":
        raise ValueError("OTEL_METRICS_EXPORTER: the Prometheus endpoint is switched on by metrics_listen")
    match chosen_exporter(environment, "METRICS"):
        case "none":
            return None
        case "console":
            return ConsoleMetricExporter()
        case "otlp":
            preference = environment.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "cumulative")
            if preference.lower() != "cumulative":
                raise ValueError(
                    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE: "
                    f"{preference!r} is not supported, only 'cumulative' is"
                )
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

            return OTLPMetricExporter()
