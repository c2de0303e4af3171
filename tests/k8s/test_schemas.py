"""Manifests against the schemas of Kubernetes, and of the kinds that Kubernetes does not know."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from tests.k8s.manifests import COMPONENTS, K8S, OVERLAYS, Manifests, Object, rendered

NEWEST_MINOR = int(kubernetes_validate.latest_version().split(".")[1])
VERSIONS = [f"1.{minor}" for minor in range(NEWEST_MINOR - 2, NEWEST_MINOR + 1)]

TEXT, NUMBER, LIST, MAP = str, int, list, dict
# Kinds that come with operators: what must be in them, by path, and of which type.
CUSTOM_KINDS: dict[tuple[str, str], dict[str, type]] = {
    ("cert-manager.io/v1", "Issuer"): {"spec": MAP},
    ("cert-manager.io/v1", "Certificate"): {
        "spec.secretName": TEXT,
        "spec.issuerRef.name": TEXT,
        "spec.issuerRef.kind": TEXT,
    },
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {
        "spec.selector.matchLabels": MAP,
        "spec.endpoints": LIST,
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {"spec.groups": LIST},
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): {"spec.parentRefs": LIST, "spec.rules": LIST},
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {"spec.parentRefs": LIST, "spec.rules": LIST},
}


def at(item: Object, path: str) -> Any:
    value: Any = item
    for key in path.split("."):
        value = value[key]
    return value


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(manifests: Manifests, version: str) -> None:
    for item in manifests.objects:
        if (item["apiVersion"], item["kind"]) not in CUSTOM_KINDS:
            check(json.dumps(item), version)


@cache
def check(item: str, version: str) -> None:
    # Most objects are the same in most combinations.
    kubernetes_validate.validate(json.loads(item), version, strict=True)


def test_custom_kinds_have_what_they_need(manifests: Manifests) -> None:
    for item in manifests.objects:
        for path, kind in CUSTOM_KINDS.get((item["apiVersion"], item["kind"]), {}).items():
            assert isinstance(at(item, path), kind), f"{item['kind']} {item['metadata']['name']}: {path}"


def test_a_misspelt_field_is_found() -> None:
    deployment = rendered("base").get("Deployment", "gateway")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    bad = {
        **deployment,
        "spec": {**deployment["spec"], "template": {"spec": {"containers": [{**container, "prots": 1}]}}},
    }
    with pytest.raises(kubernetes_validate.ValidationError, match="prots"):
        kubernetes_validate.validate(bad, VERSIONS[-1], strict=True)


def test_every_component_and_overlay_is_checked() -> None:
    assert sorted(COMPONENTS) == sorted(path.parent.name for path in (K8S / "components").glob("*/kustomization.yaml"))
    assert OVERLAYS == ("cpu-demo", "gpu")


def test_one_namespace_one_name(manifests: Manifests) -> None:
    """Catches a component whose objects land in another namespace than the services."""
    names = Counter((item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in manifests.objects)
    assert set(names.values()) == {1}
    for item in manifests.objects:
        if item["kind"] != "Namespace":
            assert item["metadata"]["namespace"] == "outrider", f"{item['kind']} {item['metadata']['name']}"
        assert item["metadata"]["labels"]["app.kubernetes.io/part-of"] == "outrider", item["metadata"]["name"]
