"""Metric names in autoscalers, adapter rules, dashboards and alerts against the services' instruments."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafter_service.metrics import DrafterMetrics
from gateway.metrics import GatewayMetrics
from tests.k8s.manifests import K8S, SERVICES, Object, rendered
from verifier_service.metrics import VerifierMetrics

METRICS = {"gateway": GatewayMetrics, "verifier": VerifierMetrics, "drafter": DrafterMetrics}
ADAPTER = yaml.safe_load((K8S / "components" / "autoscaling" / "prometheus-adapter.yaml").read_text())
# What a query may name beside metrics of ours.
OTHERS = re.compile(r"(process|up$|ALERTS|kube|container|DCGM)")
# A metric's name stands before a selector, a bracket of another kind never.
METRIC = re.compile(r"\b((?:outrider|gen_ai)_[a-z0-9_]+)")


def sample_names(service: str) -> set[str]:
    """All names that a service's samples have on its Prometheus endpoint."""
    return {name for made in METRICS[service]().instruments for name in made.instrument.sample_names}


def all_names() -> set[str]:
    return set[str]().union(*map(sample_names, SERVICES))


def rules() -> list[Object]:
    return [*ADAPTER["rules"], *ADAPTER["externalRules"]]


def queries_of_dashboards() -> Iterator[tuple[str, str]]:
    for path in sorted((K8S / "dashboards").glob("*.json")):
        yield from ((f"{path.name}: {query}", query) for query in _expressions(json.loads(path.read_text())))


def queries_of_alerts() -> Iterator[tuple[str, str]]:
    for rule in rendered("overlays/gpu").of_kind("PrometheusRule"):
        for group in rule["spec"]["groups"]:
            for alert in group["rules"]:
                yield alert.get("alert", alert.get("record", "")), alert["expr"]


def _expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (item for key, item in value.items() if key in ("expr", "query") and isinstance(item, str))
        for inner in value.values():
            yield from _expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _expressions(inner)


def test_autoscalers_ask_for_what_the_adapter_makes() -> None:
    scalers = rendered("overlays/gpu").of_kind("HorizontalPodAutoscaler")
    assert {scaler["metadata"]["name"] for scaler in scalers} == set(SERVICES)
    of_pods = {rule["name"]["as"]: rule for rule in ADAPTER["rules"]}
    external = {rule["name"]["as"]: rule for rule in ADAPTER["externalRules"]}
    asked: set[str] = set()
    for scaler in scalers:
        for metric in scaler["spec"]["metrics"]:
            match metric:
                case {"type": "Resource", "resource": {"name": "cpu"}}:
                    pass
                case {"type": "Pods", "pods": {"metric": {"name": name}}}:
                    asked.add(name)
                    # Only the pods that are scaled are asked, which must be the ones that measure it.
                    names = set(METRIC.findall(of_pods[name]["metricsQuery"]))
                    assert names <= sample_names(scaler["spec"]["scaleTargetRef"]["name"])
                    assert "pod" in of_pods[name]["resources"]["overrides"]
                case {"type": "External", "external": {"metric": {"name": name}}}:
                    asked.add(name)
                    assert name in external
                case _:
                    raise AssertionError(f"{metric}: no known kind")
    assert asked == {rule["name"]["as"] for rule in rules()}, "a rule that nobody asks for"


def test_the_adapter_asks_for_metrics_that_there_are() -> None:
    for rule in rules():
        for query in (rule["seriesQuery"], rule["metricsQuery"]):
            found = set(METRIC.findall(query))
            assert found
            assert found <= all_names(), query


def test_verifiers_are_added_before_one_is_full() -> None:
    scaler = rendered("overlays/gpu").get("HorizontalPodAutoscaler", "verifier")
    (metric,) = scaler["spec"]["metrics"]
    from verifier_service.settings import VerifierSettings

    max_running = VerifierSettings.model_fields["max_running"].default
    assert 0.5 * max_running < float(metric["pods"]["target"]["averageValue"]) < max_running


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool checks queries, and there is none here")
def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    adapted = [
        rule["metricsQuery"].replace("<<.GroupBy>>", "namespace").replace("<<.LabelMatchers>>", 'namespace="outrider"')
        for rule in rules()
    ]
    records = [{"record": f"outrider:query{number}", "expr": query} for number, query in enumerate(adapted)]
    groups = [
        {"name": "adapter", "rules": records},
        *(group for rule in rendered("overlays/gpu").of_kind("PrometheusRule") for group in rule["spec"]["groups"]),
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": groups}))
    run = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
