"""What every pod must be: unprivileged, bounded, watched, spread, and free of surprises."""

from __future__ import annotations

import pytest

from tests.k8s.manifests import SERVICES, Manifests, Object, millicores


def containers(manifests: Manifests) -> list[tuple[str, Object]]:
    """All containers with their Deployment's name, init containers too."""
    return [
        (item["metadata"]["name"], container)
        for item in manifests.of_kind("Deployment")
        for kind in ("initContainers", "containers")
        for container in item["spec"]["template"]["spec"].get(kind, ())
    ]


def test_only_known_kinds_of_workload(manifests: Manifests) -> None:
    """Every other test here looks at Deployments: a pod of another kind would pass unseen."""
    others = {"Pod", "StatefulSet", "DaemonSet", "Job", "CronJob", "ReplicaSet"}
    assert not manifests.of_kind(*others)
    assert {item["metadata"]["name"] for item in manifests.of_kind("Deployment")} == {*SERVICES, "collector"}


def test_pods_are_unprivileged(manifests: Manifests) -> None:
    for item in manifests.of_kind("Deployment"):
        pod = item["spec"]["template"]["spec"]
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 10_000
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
    for _, container in containers(manifests):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    namespace = manifests.get("Namespace", "outrider")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_no_variables_from_the_names_of_services(manifests: Manifests) -> None:
    """Catches OUTRIDER_..._SERVICE_HOST, which Kubernetes makes up and a service refuses to start with."""
    for item in manifests.of_kind("Deployment"):
        assert item["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_containers_ask_for_what_they_need_and_get_no_more(manifests: Manifests) -> None:
    for name, container in containers(manifests):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests.keys() == limits.keys() >= {"cpu", "memory", "ephemeral-storage"}, name
        assert millicores(requests["cpu"]) <= millicores(limits["cpu"])
        assert megabytes(requests["memory"]) <= megabytes(limits["memory"])
        assert megabytes(requests["ephemeral-storage"]) <= megabytes(limits["ephemeral-storage"])


def megabytes(quantity: str) -> float:
    units = {"Mi": 1.0, "Gi": 1024.0}
    return float(quantity[:-2]) * units[quantity[-2:]]


def test_temporary_files_fit_into_what_the_container_may_store(manifests: Manifests) -> None:
    for item in manifests.of_kind("Deployment"):
        pod = item["spec"]["template"]["spec"]
        volumes = [megabytes(v["emptyDir"]["sizeLimit"]) for v in pod["volumes"] if "emptyDir" in v]
        (container,) = pod["containers"]
        assert sum(volumes) <= megabytes(container["resources"]["limits"]["ephemeral-storage"])


def test_images_are_pinned(manifests: Manifests) -> None:
    for _, container in containers(manifests):
        image, _, digest = container["image"].partition("@")
        _, _, tag = image.rpartition(":")
        assert tag[:1].isdigit(), container["image"]
        # What others build is held to the very bytes; our own images are built by whoever deploys them.
        assert digest.startswith("sha256:") or image.startswith("outrider/")


def test_everything_is_probed(manifests: Manifests) -> None:
    for item in manifests.of_kind("Deployment"):
        for container in item["spec"]["template"]["spec"]["containers"]:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


@pytest.mark.parametrize("service", SERVICES)
def test_pods_of_a_service_are_spread(manifests: Manifests, service: str) -> None:
    constraints = manifests.pod(service)["spec"]["topologySpreadConstraints"]
    assert {item["topologyKey"] for item in constraints} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }
