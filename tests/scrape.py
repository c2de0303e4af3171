"""Reads a service's Prometheus endpoint."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Scrape:
    """All samples of one look."""

    samples: tuple[Sample, ...]

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The samples of Prometheus' text format."""
        return cls(tuple(s for family in text_string_to_metric_families(text) for s in family.samples))

    @classmethod
    def of_address(cls, address: str) -> Self:
        """What a service's endpoint at host:port shows now."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{address}/metrics", timeout=10) as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            return cls.of_text(response.read().decode())

    @property
    def names(self) -> set[str]:
        """Names of all samples."""
        return {sample.name for sample in self.samples}

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of a name that have these labels. There must be one."""
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"{name}{labels} is not there"
        return sum(found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """What is not zero, by a label."""
        values = {s.labels.get(label, "") for s in self.samples if s.name == name}
        totals = {value: self.total(name, **{label: value}) for value in values}
        return {value: total for value, total in totals.items() if total}
