"""The images: what is in them, and that the gateway's needs no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings
from tests.k8s.manifests import K8S, ROOT, SERVICES, rendered
from verifier_service.settings import VerifierSettings

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {"gateway": "gateway", "verifier": "verifier_service", "drafter": "drafter_service"}
LISTEN = {
    "gateway": [GatewaySettings.model_fields["listen"].default],
    "verifier": [VerifierSettings.model_fields["listen"].default],
    "drafter": [DrafterSettings.model_fields["listen"].default],
}

# Imports all of the gateway where only the distributions of the command line can be found.
IMPORTS = """
import importlib, importlib.metadata, pkgutil, re, sys
allowed = set(sys.argv[1:])
hidden = {
    module
    for module, names in importlib.metadata.packages_distributions().items()
    if not allowed & {re.sub("[-_.]+", "-", name).lower() for name in names}
}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"hidden: {name}", name=name)
sys.meta_path.insert(0, Hide())
import gateway
for module in pkgutil.walk_packages(gateway.__path__, "gateway."):
    importlib.import_module(module.name)
assert "torch" in hidden and "torch" not in sys.modules
"""


def stages() -> dict[str, list[str]]:
    """Instructions of the Containerfile by stage, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if stage := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            lines = found.setdefault(stage[2], [])
            # A stage goes on where the one that it is made from ended.
            lines += found.get(stage[1], [])
        lines.append(re.sub(r"\s+", " ", line))
    return found


def last(lines: list[str], instruction: str) -> str:
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{instruction} ")][-1]


def requirements() -> list[Requirement]:
    lines = (ROOT / "gateway" / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def closure(names: list[str]) -> Iterator[str]:
    """The distributions and all that they need, as far as they are installed."""
    seen: set[str] = set()
    queue = list(names)
    while queue:
        name = canonicalize_name(queue.pop())
        if name in seen:
            continue
        seen.add(name)
        yield name
        try:
            needs = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        queue += [
            need.name for need in map(Requirement, needs) if need.marker is None or need.marker.evaluate({"extra": ""})
        ]


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_its_service_as_its_pod_does(service: str) -> None:
    lines = stages()[service]
    assert json.loads(last(lines, "ENTRYPOINT")) == ["python", "-m", PACKAGES[service]]
    assert (ROOT / PACKAGES[service] / "__main__.py").is_file()
    context = rendered("base").pod(service)["spec"]["securityContext"]
    assert last(lines, "USER") == f"{context['runAsUser']}:{context['runAsGroup']}"
    ports = {port["containerPort"] for port in rendered("base").container(service)["ports"] if port["name"] != "health"}
    assert {int(port) for port in last(lines, "EXPOSE").split()} == ports - {9464}
    # The root file system is read-only: whatever a library writes belongs to /tmp.
    assert any(re.search(r"\bHOME=/tmp\b", line) for line in lines if line.startswith("ENV "))
    (image,) = [container["image"] for container in rendered("base").pod(service)["spec"]["containers"]]
    assert image == f"outrider/{service}:{PROJECT['version']}"


def test_no_model_is_in_a_service() -> None:
    for service in SERVICES:
        assert not any(
            "models" in line for line in stages()[service] if line.startswith(("COPY", "ADD")) and "--from" not in line
        )
    demo = stages()["demo-models"]
    for container in rendered("overlays/cpu-demo").pod("verifier")["spec"]["initContainers"]:
        assert container["image"] == f"outrider/demo-models:{PROJECT['version']}"
        assert container["command"] == ["cp", "-r", "/demo/.", "/models"]
    for role in ("target", "draft"):
        assert f"COPY models/demo/{role} /demo/{role}" in demo
        assert (ROOT / "models" / "demo" / role / "config.json").is_file()


def test_a_wheel_needs_what_the_package_stage_copies() -> None:
    copied = {name for line in stages()["package"] if line.startswith("COPY") for name in line.split()[1:-1]}
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*packages, "protos", "pyproject.toml", "constraints.txt", "build_stubs.py", PROJECT["readme"]} <= copied
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied | {"models"} == kept


def test_the_gateways_requirements_are_the_projects() -> None:
    """Catches a version range that was changed in one of the two places."""
    of_project = {Requirement(line).name: Requirement(line) for line in PROJECT["dependencies"]}
    for requirement in requirements():
        assert of_project[requirement.name] == requirement


def test_the_gateways_requirements_are_all_that_it_imports() -> None:
    """Catches an import that only works because torch brought the library along."""
    needed = set(closure([requirement.name for requirement in requirements()]))
    assert not {"torch", "transformers", "triton"} & needed
    run = subprocess.run(
        [sys.executable, "-c", IMPORTS, "outrider", *needed], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr


def test_the_readme_builds_what_the_overlays_use() -> None:
    text = (K8S / "README.md").read_text()
    images = {
        container["image"]
        for overlay in ("overlays/cpu-demo", "overlays/gpu")
        for item in rendered(overlay).of_kind("Deployment")
        for kind in ("initContainers", "containers")
        for container in item["spec"]["template"]["spec"].get(kind, ())
        if container["image"].startswith("outrider/")
    }
    assert images == {f"outrider/{target}:{PROJECT['version']}" for target in (*SERVICES, "demo-models")}
    for target in (*SERVICES, "demo-models"):
        assert target in stages()
        assert target in text
