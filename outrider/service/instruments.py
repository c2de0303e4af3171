"""What a service measures: counters, gauges and histograms that are cheap to write and are read when somebody asks.

Made for the step loop of an engine: counting is an addition to a plain number, many times cheaper than the same in
OpenTelemetry's SDK, which hears of it when it collects. Each object is written by one thread alone and may be read by
any.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

# The values of an instrument's labels, in the order of their names. An empty value is left out when exported.
Labels = tuple[str, ...]

# Seconds; from the shortest step on a GPU to the longest wait that somebody puts up with.
SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
POWERS_OF_TWO = tuple(float(1 << exponent) for exponent in range(13))


@dataclass(frozen=True)
class Instrument:
    """What is said about an instrument; the page docs/observability.md says the same.

    `labels` has for each label the values that are known beforehand: their series begin at zero, so that the first
    event already shows as a change.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str  # UCUM: s, By, 1, {thing}
    description: str
    labels: Mapping[str, tuple[str, ...]]
    buckets: tuple[float, ...] = ()  # upper bounds, each included

    @property
    def known_labels(self) -> list[Labels]:
        """The label values of the series that are there from the start."""
        return list(itertools.product(*self.labels.values()))

    @property
    def prometheus_name(self) -> str:
        """The name of the family on the Prometheus endpoint, without what counters and histograms append."""
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        name = self.name.replace(".", "_")
        return name if name.endswith(unit) else name + unit

    @property
    def sample_names(self) -> tuple[str, ...]:
        """All names that its samples have on the Prometheus endpoint, as queries use them."""
        name = self.prometheus_name
        match self.kind:
            case "counter":
                return (f"{name}_total",)
            case "gauge":
                return (name,)
            case "histogram":
                return (f"{name}_bucket", f"{name}_sum", f"{name}_count")


class Counter:
    """Only ever grows."""

    def __init__(self, instrument: Instrument) -> None:
        self.instrument = instrument
        self._values: dict[Labels, float] = dict.fromkeys(instrument.known_labels, 0)
        self._read: Callable[[], Mapping[Labels, float]] | None = None

    def add(self, amount: float, *labels: str) -> None:
        """Count; `labels` are the values in the order of the instrument's label names."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def follow(self, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Take the numbers from somebody who counts anyway, when they are asked for, from any thread."""
        self._read = read

    def forget(self, *labels: str) -> None:
        """Drop a series: what it was about is gone for good."""
        self._values.pop(labels, None)

    def values(self) -> dict[Labels, float]:
        """All series."""
        return self._values.copy() if self._read is None else {**self._values, **self._read()}


class Gauge:
    """What is the case at the moment somebody asks."""

    def __init__(self, instrument: Instrument) -> None:
        self.instrument = instrument
        self._read: Callable[[], Mapping[Labels, float]] = dict

    def follow(self, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Where the numbers come from; called from any thread."""
        self._read = read

    def values(self) -> dict[Labels, float]:
        """All series."""
        return dict(self._read())


class Series:
    """One series of a histogram."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0
        self.least, self.greatest = math.inf, -math.inf

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self._buckets, value)] += times
        self.total += value * times
        if value < self.least:
            self.least = value
        if value > self.greatest:
            self.greatest = value

    def add_all(self, values: Sequence[float]) -> None:
        """Count several values."""
        buckets, counts = self._buckets, self.counts
        if not values:
            return
        for value in values:
            counts[bisect_left(buckets, value)] += 1
        self.total += sum(values)
        self.least = min(self.least, *values)
        self.greatest = max(self.greatest, *values)


class Histogram:
    """How values are distributed, since the start."""

    def __init__(self, instrument: Instrument) -> None:
        self.instrument = instrument
        self._series = {labels: Series(instrument.buckets) for labels in instrument.known_labels}

    def record(self, value: float, *labels: str) -> None:
        """Count a value; `labels` are the values in the order of the instrument's label names."""
        self.series(*labels).add(value)

    def series(self, *labels: str) -> Series:
        """A series, to be written to directly; made when first asked for."""
        if (series := self._series.get(labels)) is None:
            series = self._series[labels] = Series(self.instrument.buckets)
        return series

    def forget(self, *labels: str) -> None:
        """Drop a series: what it was about is gone for good."""
        self._series.pop(labels, None)

    def values(self) -> dict[Labels, Series]:
        """All series; those with known labels are there before their first value."""
        return self._series.copy()


AnyInstrument = Counter | Gauge | Histogram
_Made = TypeVar("_Made", Counter, Gauge, Histogram)


class Instruments:
    """The instruments of one service, each declared once."""

    def __init__(self) -> None:
        self._by_name: dict[str, AnyInstrument] = {}

    def __iter__(self) -> Iterator[AnyInstrument]:
        return iter(self._by_name.values())

    def counter(
        self, name: str, unit: str, description: str, labels: Mapping[str, tuple[str, ...]] | None = None
    ) -> Counter:
        """Declare a counter."""
        return self._add(Counter(Instrument(name, "counter", unit, description, labels or {})))

    def gauge(
        self, name: str, unit: str, description: str, labels: Mapping[str, tuple[str, ...]] | None = None
    ) -> Gauge:
        """Declare a gauge."""
        return self._add(Gauge(Instrument(name, "gauge", unit, description, labels or {})))

    def histogram(
        self,
        name: str,
        unit: str,
        description: str,
        labels: Mapping[str, tuple[str, ...]] | None = None,
        *,
        buckets: tuple[float, ...],
    ) -> Histogram:
        """Declare a histogram with these upper bounds."""
        return self._add(Histogram(Instrument(name, "histogram", unit, description, labels or {}, buckets)))

    def _add(self, made: _Made) -> _Made:
        name = made.instrument.name
        assert name not in self._by_name, f"{name} is declared twice"
        self._by_name[name] = made
        return made
