"""Instruments, and their ways to Prometheus and over OTLP."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2

import outrider.service.metrics
from outrider.service.instruments import Counter, Gauge, Histogram, Instruments
from outrider.service.metrics import ServiceMetrics
from tests.scrape import Scrape


class Workshop(ServiceMetrics):
    """A service that measures one thing of each kind."""

    service = "workshop"
    peers = ("customer",)

    def __init__(self) -> None:
        super().__init__()
        self.parts = self.instruments.counter(
            "outrider.workshop.parts", "{part}", "Parts made", {"quality": ("good", "bad"), "machine": ()}
        )
        self.made = self.instruments.counter("outrider.workshop.made", "{part}", "By colour", {"colour": ("red",)})
        self.stock = self.instruments.gauge("outrider.workshop.stock", "{part}", "Parts in stock")
        self.work = self.instruments.histogram(
            "outrider.workshop.work", "s", "Time for a part", {"machine": ()}, buckets=(1.0, 2.0, 4.0)
        )
        self.weight = self.instruments.histogram("outrider.workshop.weight", "By", "Of a part", buckets=(10.0,))


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    metrics = Workshop.from_environment(is_scraped=True, environment={})
    yield metrics
    metrics.stop()


def scrape(metrics: ServiceMetrics) -> Scrape:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return Scrape.of_text(body.decode())


def test_numbers_arrive_in_prometheus_text(workshop: Workshop) -> None:
    workshop.parts.add(2, "good", "a")
    workshop.parts.add(3, "good", "a")
    workshop.stock.follow(lambda: {(): 7})
    for seconds in (0.5, 1.0, 3.0, 100.0):
        workshop.work.record(seconds, "a")
    workshop.work.series("b").add_all([2.0, 2.5])
    workshop.weight.series().add(4.0, times=3)
    found = scrape(workshop)
    assert found.total("outrider_workshop_parts_total", quality="good", machine="a") == 5
    assert found.total("outrider_workshop_stock") == 7
    # An upper bound is part of its bucket, and each bucket has those below in it.
    buckets = {
        le: found.total("outrider_workshop_work_seconds_bucket", machine="a", le=le)
        for le in ("1.0", "2.0", "4.0", "+Inf")
    }
    assert buckets == {"1.0": 2, "2.0": 2, "4.0": 3, "+Inf": 4}
    assert found.total("outrider_workshop_work_seconds_sum", machine="a") == 104.5
    assert found.total("outrider_workshop_work_seconds_count", machine="b") == 2
    assert found.total("outrider_workshop_weight_bytes_sum") == 12
    assert found.total("outrider_workshop_weight_bytes_bucket", le="10.0") == 3


def test_names_are_those_that_the_instruments_say(workshop: Workshop) -> None:
    """Catches a name that the exporter changes: dashboards and alerts are held against what instruments say."""
    workshop.parts.add(1, "good", "a")
    workshop.stock.follow(lambda: {(): 7})
    workshop.tasks.follow(lambda: {(): 1})
    workshop.work.record(1.0, "a")
    expected = {name for made in workshop.instruments for name in made.instrument.sample_names}
    assert {name for name in scrape(workshop).names if "workshop" in name} == expected


def test_series_that_are_known_beforehand_begin_at_zero(workshop: Workshop) -> None:
    found = scrape(workshop)
    assert found.total("outrider_workshop_made_total", colour="red") == 0
    assert found.total("outrider_workshop_weight_bytes_count") == 0
    assert found.total("outrider_workshop_wire_bytes_total", direction="sent", peer="customer") == 0
    assert "outrider_workshop_parts_total" not in found.names


def test_what_is_gone_for_good_is_forgotten(workshop: Workshop) -> None:
    """Catches series of pods that were replaced long ago, of which there are more each day."""
    workshop.work.record(1.0, "a")
    workshop.parts.add(1, "good", "a")
    scrape(workshop)
    workshop.work.forget("a")
    workshop.parts.forget("good", "a")
    found = scrape(workshop)
    assert "outrider_workshop_work_seconds_count" not in found.names
    assert "outrider_workshop_parts_total" not in found.names
    workshop.work.record(1.0, "a")
    assert scrape(workshop).total("outrider_workshop_work_seconds_count", machine="a") == 1


def test_a_name_is_declared_once() -> None:
    instruments = Instruments()
    instruments.gauge("outrider.stock", "1", "Once")
    with pytest.raises(AssertionError, match="declared twice"):
        instruments.counter("outrider.stock", "1", "Twice")


def test_looks_that_overlap_see_everything_once(workshop: Workshop) -> None:
    """Catches two scrapes at a time that get each other's numbers: doubled, or none."""
    workshop.made.add(1, "red")
    for number in range(300):
        # So much that a look takes a while.
        workshop.parts.add(1, "good", str(number))
    problems: list[str] = []

    def look() -> None:
        for _ in range(20):
            lines = workshop.render()[0].decode().splitlines()
            if lines.count('outrider_workshop_made_total{colour="red"} 1.0') != 1:
                problems.append("\n".join(lines))

    threads = [threading.Thread(target=look) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not problems, problems[0][:1000]


def test_counting_goes_on_while_somebody_looks(workshop: Workshop) -> None:
    """Catches dictionaries that change while they are read: the engine's thread never waits for a scrape."""
    done = threading.Event()

    def count() -> None:
        for number in range(3000):
            workshop.parts.add(1, "good", str(number % 300))
            workshop.work.record(1.0, str(number % 300))
        done.set()

    thread = threading.Thread(target=count)
    thread.start()
    while not done.is_set():
        scrape(workshop)
    thread.join()
    found = scrape(workshop)
    assert found.total("outrider_workshop_parts_total") == found.total("outrider_workshop_work_seconds_count") == 3000


def test_nothing_is_set_up_where_nobody_reads() -> None:
    metrics = Workshop.from_environment(is_scraped=False, environment={})
    assert not metrics.is_enabled
    assert not metrics.has_text
    metrics.start("127.0.0.1:0")
    assert metrics.address == ""
    metrics.stop()


def test_the_sdks_own_switch_wins() -> None:
    metrics = Workshop.from_environment(is_scraped=True, environment={"OTEL_SDK_DISABLED": "true"})
    assert not metrics.is_enabled
    assert not metrics.has_text


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"OTEL_METRICS_EXPORTER": "carrier-pigeon"}, "OTEL_METRICS_EXPORTER"),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, "metrics_listen"),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"},
            "OTEL_EXPORTER_OTLP_PROTOCOL",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"},
            "TEMPORALITY_PREFERENCE",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Workshop.from_environment(is_scraped=False, environment=environment)


def test_a_taken_port_is_refused_by_the_settings_name(workshop: Workshop) -> None:
    workshop.start("127.0.0.1:0")
    other = Workshop.from_environment(is_scraped=True, environment={})
    with pytest.raises(OSError, match=r"metrics_listen: cannot bind 127\.0\.0\.1"):
        other.start(workshop.address)
    assert Scrape.of_address(workshop.address).total("outrider_workshop_made_total") == 0


class Receiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    """What a collector would get."""

    def __init__(self) -> None:
        self.metrics: dict[str, metrics_pb2.Metric] = {}
        self.service_names: set[str] = set()

    def Export(self, request: Any, context: Any) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for of_resource in request.resource_metrics:
            attributes = {a.key: a.value.string_value for a in of_resource.resource.attributes}
            self.service_names.add(attributes["service.name"])
            for scope in of_resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = Receiver()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_numbers_arrive_over_otlp(receiver: tuple[Receiver, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters, gauges and whole histograms, exported once more when the service stops."""
    found, endpoint = receiver
    # The exporter reads it by itself.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    metrics = Workshop.from_environment(is_scraped=False)
    assert metrics.is_enabled
    metrics.made.add(5, "red")
    metrics.stock.follow(lambda: {(): 7})
    metrics.work.record(1.5, "a")
    metrics.work.record(9.0, "a")
    metrics.stop()
    assert found.service_names == {"outrider-workshop"}
    made = found.metrics["outrider.workshop.made"]
    assert made.unit == "{part}"
    assert made.sum.is_monotonic
    assert [point.as_int for point in made.sum.data_points] == [5]
    assert [point.as_int for point in found.metrics["outrider.workshop.stock"].gauge.data_points] == [7]
    work = found.metrics["outrider.workshop.work"]
    assert work.unit == "s"
    (point,) = work.histogram.data_points
    assert (list(point.bucket_counts), list(point.explicit_bounds)) == ([0, 1, 0, 1], [1.0, 2.0, 4.0])
    assert (point.count, point.sum, point.min, point.max) == (2, 10.5, 1.5, 9.0)
    assert point.attributes[0].key == "machine"


@pytest.mark.parametrize("is_scraped", [False, True])
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_collector_that_does_not_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_scraped: bool, is_silent: bool
) -> None:
    """Catches a service that outlives its drain, or ends with an error, because nobody takes its last numbers."""
    with socket.create_server(("127.0.0.1", 0)) as collector:
        # It accepts connections and says nothing, or there is nobody.
        address = f"127.0.0.1:{collector.getsockname()[1] if is_silent else 9}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
        monkeypatch.setattr(outrider.service.metrics, "FLUSH_SECONDS", 0.5)
        metrics = Workshop.from_environment(is_scraped=is_scraped)
        began = time.monotonic()
        metrics.stop()
        assert time.monotonic() - began < 4.0
    assert not metrics.is_enabled
    # With two readers the SDK finds that there is no time left for the second, and raises.
    assert ("the last metrics were not exported" in caplog.text) == is_scraped


def test_each_kind_says_what_it_is() -> None:
    kinds = {type(made): made.instrument.kind for made in Workshop().instruments}
    assert kinds == {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
