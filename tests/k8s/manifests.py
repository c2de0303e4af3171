"""What kustomize makes of k8s/, and look-ups in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
# `monitoring` opens what `network-policies` has closed, so that it comes after it.
COMPONENTS = (
    *("autoscaling", "disruption-budgets", "gateway-api", "gpu-pools"),
    *("network-policies", "monitoring", "mtls"),
)
OVERLAYS = tuple(sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml")))

# What people deploy, each component alone, and the combinations that touch the same fields.
COMBINATIONS = (
    *((f"overlays/{overlay}", ()) for overlay in OVERLAYS),
    ("base", ()),
    *(("base", (component,)) for component in COMPONENTS),
    ("base", COMPONENTS),
    ("overlays/cpu-demo", ("monitoring",)),
    ("overlays/cpu-demo", ("mtls", "monitoring", "gateway-api")),
    ("overlays/gpu", ("gateway-api",)),
)
SERVICES = ("gateway", "verifier", "drafter")

Object = dict[str, Any]


@dataclass(frozen=True)
class Manifests:
    """All objects of one combination."""

    name: str
    objects: tuple[Object, ...]

    def of_kind(self, *kinds: str) -> list[Object]:
        """All objects of these kinds."""
        return [item for item in self.objects if item["kind"] in kinds]

    def get(self, kind: str, name: str) -> Object:
        """The object of that kind and name; a generated name's hash is left out."""
        found = [item for item in self.of_kind(kind) if base_name(item) == name]
        assert len(found) == 1, f"{self.name}: {len(found)} times {kind} {name}"
        return found[0]

    def has(self, kind: str) -> bool:
        """Whether there is any object of that kind."""
        return bool(self.of_kind(kind))

    @property
    def config_maps(self) -> dict[str, Mapping[str, str]]:
        """Data by the name that pods use."""
        return {item["metadata"]["name"]: item.get("data", {}) for item in self.of_kind("ConfigMap")}

    def pod(self, name: str) -> Object:
        """The pod template of a Deployment."""
        template: Object = self.get("Deployment", name)["spec"]["template"]
        return template

    def container(self, name: str) -> Object:
        """The one container of a Deployment's pods."""
        (container,) = self.pod(name)["spec"]["containers"]
        assert isinstance(container, dict)
        return container

    def environment(self, name: str) -> dict[str, str]:
        """The environment variables of a Deployment's container as the kubelet would set them."""
        container = self.container(name)
        variables: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            variables |= self.config_maps[source["configMapRef"]["name"]]
        for entry in container.get("env", ()):
            variables[entry["name"]] = self._value(entry, name, variables)
        return variables

    def _value(self, entry: Object, name: str, variables: Mapping[str, str]) -> str:
        match entry:
            case {"value": str(value)}:
                return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], value)
            case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}:
                return f"{name}-0"
            case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}:
                return "outrider"
            case {"valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}:
                # Rounded up, as the kubelet does with a divisor of 1.
                return str(-(-millicores(self.container(name)["resources"]["limits"]["cpu"]) // 1000))
            case _:
                raise AssertionError(f"{entry['name']}: no known source")


def millicores(quantity: str) -> int:
    """A CPU quantity in thousandths of a core."""
    return int(quantity[:-1]) if quantity.endswith("m") else int(float(quantity) * 1000)


def base_name(item: Object) -> str:
    """An object's name without the hash that a generator appends."""
    name: str = item["metadata"]["name"]
    return re.sub(r"-[0-9a-z]{10}$", "", name) if item["kind"] in ("ConfigMap", "Secret") else name


def walk(value: Any) -> Iterator[Object]:
    """All mappings inside a value, itself included."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


@cache
def rendered(base: str, components: Sequence[str] = ()) -> Manifests:
    """`base` (a folder of k8s/) with these components, as `kubectl kustomize` renders it.

    Skips the test where there is no kubectl.
    """
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl renders the manifests, and there is none here")
    name = "+".join([base, *components])
    with tempfile.TemporaryDirectory() as directory:
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(K8S / base, os.path.realpath(directory))],
            "components": [
                os.path.relpath(K8S / "components" / component, os.path.realpath(directory)) for component in components
            ],
        }
        Path(directory, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        run = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{name}: {run.stderr}"
    assert not run.stderr, f"{name}: {run.stderr}"
    return Manifests(name, tuple(item for item in yaml.safe_load_all(run.stdout) if item))
