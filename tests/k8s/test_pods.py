"""The demo's pods started for real, with what their manifests and images say: user, variables, files, ports, probes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import trustme

from outrider.bundled import heldout_prompt
from tests.k8s.manifests import ROOT, SERVICES, Manifests, rendered
from tests.k8s.node import NODE, Plan, Pod
from tests.k8s.test_hardening import megabytes
from tests.k8s.test_image import last, stages

NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
ADDRESSES = {"gateway": "10.42.0.11", "verifier": "10.42.0.12", "drafter": "10.42.0.13", "collector": NODE}


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "chroot", "mount"))):
        return False
    script = "ip link add veth0 type veth peer name veth1 && ip link add br0 type bridge && mount -t tmpfs tmpfs /mnt"
    return subprocess.run([*NAMESPACES, "sh", "-c", script], capture_output=True, check=False).returncode == 0


class Secrets:
    """What cert-manager makes of Certificates, as the kubelet mounts it, twice: at first and once renewed."""

    def __init__(self, manifests: Manifests, directory: Path) -> None:
        authority = trustme.CA()
        self.authority = authority.cert_pem.bytes().decode() if manifests.has("Certificate") else ""
        self.renewals: dict[str, str] = {}
        self.directories: dict[str, Path] = {}
        for certificate in manifests.of_kind("Certificate"):
            if "dnsNames" not in certificate["spec"]:
                continue
            place = directory / certificate["spec"]["secretName"]
            for version in ("..old", "..new"):
                (place / version).mkdir(parents=True)
                issued = authority.issue_cert(*certificate["spec"]["dnsNames"])
                (place / version / "tls.crt").write_bytes(issued.cert_chain_pems[0].bytes())
                (place / version / "tls.key").write_bytes(issued.private_key_pem.bytes())
                (place / version / "ca.crt").write_bytes(authority.cert_pem.bytes())
            (place / "..data").symlink_to("..old")
            for name in ("tls.crt", "tls.key", "ca.crt"):
                (place / name).symlink_to(f"..data/{name}")
            self.renewals[str(place / "..data")] = "..new"
            self.directories[certificate["spec"]["secretName"]] = place


def pod_of(manifests: Manifests, service: str, secrets: Secrets) -> Pod:
    container = manifests.container(service)
    lines = stages()[service]
    image = dict(variable.split("=", 1) for line in lines if line.startswith("ENV ") for variable in line.split()[1:])
    module = json.loads(last(lines, "ENTRYPOINT"))[1:]
    context = manifests.pod(service)["spec"]["securityContext"]
    interpreters = {str(ROOT), sys.prefix, sys.base_prefix}
    (models,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "models"]
    mounts = {place: place for place in interpreters} | {models: str(ROOT / "models" / "demo")}
    for volume in manifests.pod(service)["spec"]["volumes"]:
        if "secret" in volume:
            (place,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
            mounts[place] = str(secrets.directories[volume["secret"]["secretName"]])
    return Pod(
        name=service,
        address=ADDRESSES[service],
        command=[sys.executable, *module],
        environment={**image, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **manifests.environment(service)},
        user=f"{context['runAsUser']}:{context['runAsGroup']}",
        mounts=mounts,
        readiness=container["readinessProbe"],
        liveness=container["livenessProbe"],
    )


def logs_of(report: dict[str, Any]) -> str:
    return "\n".join(f"{service}:\n{report['logs'][service]}" for service in SERVICES)


@pytest.fixture(scope="module", params=[(), ("mtls",)], ids=["plain", "encrypted"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not can_make_namespaces():
        pytest.skip("pods need namespaces, which only root can make, where it may")
    manifests = rendered("overlays/cpu-demo", request.param)
    directory = tmp_path_factory.mktemp("node")
    secrets = Secrets(manifests, directory / "secrets")
    plan = Plan(
        pods=[pod_of(manifests, service, secrets) for service in SERVICES],
        hosts=ADDRESSES,
        prompt=heldout_prompt(),
        max_tokens=48,
        authority=secrets.authority,
        renewals=secrets.renewals,
        collector_tls=str(secrets.directories["collector-tls"]) if secrets.authority else "",
    )
    (directory / "pods").mkdir()
    run = subprocess.run(
        [*NAMESPACES, sys.executable, "-m", "tests.k8s.node", str(directory / "pods")],
        input=json.dumps(asdict(plan)),
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    if found["ready_seconds"].keys() != set(SERVICES):
        pytest.fail(f"only {found['ready_seconds']} became ready\n{run.stderr}\n{logs_of(found)}")
    found["is_encrypted"] = bool(secrets.authority)
    return found


def test_the_pods_generate_together(report: dict[str, Any]) -> None:
    assert report["text"]
    assert report["num_accepted"] > 0
    assert report["http_status"] == 200
    assert report["is_renewed"] == report["is_encrypted"]


def test_a_pod_lives_while_it_is_not_ready(report: dict[str, Any]) -> None:
    assert report["was_alive_before_it_was_ready"] == dict.fromkeys(SERVICES, True)


def test_a_pod_writes_nowhere_but_to_its_temporary_files(report: dict[str, Any]) -> None:
    for service in SERVICES:
        places = [place for place in report["writable"][service] if not Path(place).is_relative_to("/proc")]
        assert [place for place in places if not Path(place).is_relative_to("/dev")] == ["/tmp"]


def test_the_collector_hears_of_every_pod(report: dict[str, Any]) -> None:
    everyone = sorted(f"{service}-0" for service in SERVICES)
    assert (report["traced"], report["measured"]) == (everyone, everyone), logs_of(report)


def test_a_pod_ends_in_order(report: dict[str, Any]) -> None:
    assert report["exit_codes"] == dict.fromkeys(SERVICES, 0), logs_of(report)
    grace = rendered("overlays/cpu-demo").pod("gateway")["spec"]["terminationGracePeriodSeconds"]
    assert max(report["stop_seconds"].values()) < grace


def test_a_pod_has_the_memory_that_it_takes(report: dict[str, Any]) -> None:
    for service in SERVICES:
        resources = rendered("overlays/cpu-demo").container(service)["resources"]
        assert report["peak_megabytes"][service] < megabytes(resources["requests"]["memory"])
