"""Dashboards as Grafana's JSON, made of rows of panels that each hold a few queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

WIDTH = 24  # of Grafana's grid
HEIGHT = 8
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# What Grafana puts in the place of these in a query.
NAMESPACE = 'namespace=~"$namespace"'
INTERVAL = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """A PromQL expression and what its series are called."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture. `source` is empty where our services export what it shows, else who does, or what that takes."""

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "bargauge", "heatmap"] = "timeseries"
    is_stacked: bool = False
    source: Literal["", "GPU", "DCGM exporter"] = ""


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it, as many side by side as there are."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row] = field(default_factory=tuple)

    @property
    def panels(self) -> list[Panel]:
        """All panels."""
        return [panel for row in self.rows for panel in row.panels]

    def to_json(self) -> dict[str, Any]:
        """What Grafana imports."""
        panels: list[dict[str, Any]] = []
        y = 0
        for row in self.rows:
            place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
            panels.append({"type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place})
            width = WIDTH // len(row.panels)
            for index, panel in enumerate(row.panels):
                panels.append(_panel(panel, {"x": index * width, "y": y + 1, "w": width, "h": HEIGHT}))
            y += 1 + HEIGHT
        for number, made in enumerate(panels, 1):
            made["id"] = number
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["outrider"],
            "schemaVersion": 39,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": [_data_sources(), _namespaces()]},
            "links": [
                {"type": "dashboards", "title": "Outrider", "tags": ["outrider"], "asDropdown": True, "keepTime": True}
            ],
            "panels": panels,
        }


def rate(counter: str, *by: str, where: str = "") -> str:
    """The rate at which a counter grows, per second, summed over everything but `by`."""
    return f"sum{_by(by)} (rate({selected(counter, where)}[{INTERVAL}]))"


def total(gauge: str, *by: str, where: str = "") -> str:
    """A gauge, summed over everything but `by`."""
    return f"sum{_by(by)} ({selected(gauge, where)})"


def mean(histogram: str, *by: str, where: str = "") -> str:
    """The mean of a histogram's recent values."""
    return f"{rate(f'{histogram}_sum', *by, where=where)} / {rate(f'{histogram}_count', *by, where=where)}"


def quantile(share: float, histogram: str, *by: str, where: str = "") -> str:
    """A quantile of a histogram's recent values."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le', *by, where=where)})"


def quantiles(histogram: str, legend: str = "", where: str = "") -> list[Query]:
    """Median, 95th and 99th percentile."""
    return [
        Query(quantile(share, histogram, where=where), f"{legend} p{round(share * 100)}".strip())
        for share in (0.5, 0.95, 0.99)
    ]


def selected(name: str, where: str = "") -> str:
    """A metric in the chosen namespaces, with further label matchers."""
    return f"{name}{{{', '.join(matcher for matcher in (NAMESPACE, where) if matcher)}}}"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    is_heatmap = panel.kind == "heatmap"
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {}
    match panel.kind:
        case "timeseries":
            custom = {"fillOpacity": 10, "stacking": {"mode": "normal" if panel.is_stacked else "none"}}
            options = {
                "legend": {"displayMode": "list", "placement": "bottom"},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat" | "bargauge":
            options = {"reduceOptions": {"calcs": ["lastNotNull"]}}
        case "heatmap":
            options = {"calculate": False, "yAxis": {"unit": panel.unit}}
    source = f" From the {panel.source}." if panel.source == "DCGM exporter" else ""
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description + source,
        "datasource": DATA_SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATA_SOURCE,
                "expr": query.expression,
                "legendFormat": "{{le}}" if is_heatmap else query.legend,
                "format": "heatmap" if is_heatmap else "time_series",
                # A bar shows how things stand, not how they went.
                "instant": panel.kind == "bargauge",
                "range": panel.kind != "bargauge",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _data_sources() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _namespaces() -> dict[str, Any]:
    # Also where nothing has the label, as outside of Kubernetes.
    return {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": "label_values(outrider_gateway_requests_limit, namespace)", "refId": "namespaces"},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
