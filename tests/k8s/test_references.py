"""What the objects say of each other: labels and selectors, ports and names, mounts and volumes."""

from __future__ import annotations

from typing import Any

from tests.k8s.manifests import Manifests, Object

# Made by whoever runs the cluster. All other Secrets are cert-manager's.
OUTSIDE_CLAIMS = {"models"}
OUTSIDE_SECRETS = {"api-keys"}


def workloads(manifests: Manifests) -> list[Object]:
    return manifests.of_kind("Deployment")


def selects(selector: Object, labels: Object) -> bool:
    assert set(selector) <= {"matchLabels"}, "only matchLabels is used"
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def selected(manifests: Manifests, selector: Object) -> list[str]:
    """Names of the Deployments whose pods a selector selects."""
    return [
        item["metadata"]["name"]
        for item in workloads(manifests)
        if selects(selector, item["spec"]["template"]["metadata"]["labels"])
    ]


def test_each_deployment_selects_its_own_pods_alone(manifests: Manifests) -> None:
    for item in workloads(manifests):
        assert selected(manifests, item["spec"]["selector"]) == [item["metadata"]["name"]]
        for constraint in item["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert selected(manifests, constraint["labelSelector"]) == [item["metadata"]["name"]]


def test_each_service_has_pods_with_its_ports(manifests: Manifests) -> None:
    for service in manifests.of_kind("Service"):
        (name,) = selected(manifests, {"matchLabels": service["spec"]["selector"]})
        ports = {port["name"]: port["containerPort"] for port in manifests.container(name)["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


def test_each_deployment_but_the_collector_is_found_by_dns(manifests: Manifests) -> None:
    headless = [item for item in manifests.of_kind("Service") if item["spec"].get("clusterIP") == "None"]
    found = [selected(manifests, {"matchLabels": item["spec"]["selector"]}) for item in headless]
    assert sorted(found) == [["drafter"], ["gateway"], ["verifier"]]
    for item in headless:
        # A pod that is loading or draining must not be found.
        assert not item["spec"].get("publishNotReadyAddresses", False)


def test_budgets_autoscalers_and_monitors_mean_something_that_exists(manifests: Manifests) -> None:
    for budget in manifests.of_kind("PodDisruptionBudget"):
        assert selected(manifests, budget["spec"]["selector"]) == [budget["metadata"]["name"]]
    for scaler in manifests.of_kind("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        deployment = manifests.get(target["kind"], target["name"])
        assert deployment["apiVersion"] == target["apiVersion"]
        # Both would fight over the number of pods at each rollout.
        assert "replicas" not in deployment["spec"]
    for monitor in manifests.of_kind("ServiceMonitor"):
        services = [
            service
            for service in manifests.of_kind("Service")
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
        ]
        for endpoint in monitor["spec"]["endpoints"]:
            # One Service a monitor has the port: a pod that two lead to would be counted twice.
            with_port = [s for s in services if endpoint["port"] in {port["name"] for port in s["spec"]["ports"]}]
            assert len(with_port) == 1, monitor["metadata"]["name"]
    for route in manifests.of_kind("GRPCRoute", "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                service = manifests.get("Service", backend["name"])
                assert backend["port"] in {port["port"] for port in service["spec"]["ports"]}
                assert service["spec"].get("clusterIP") != "None"


def test_pods_use_only_what_there_is(manifests: Manifests) -> None:
    secrets = OUTSIDE_SECRETS | {item["spec"]["secretName"] for item in manifests.of_kind("Certificate")}
    for item in workloads(manifests):
        pod = item["spec"]["template"]["spec"]
        manifests.get("ServiceAccount", pod["serviceAccountName"])
        for volume in pod["volumes"]:
            check_volume(manifests, volume, secrets)
        containers = [*pod.get("initContainers", ()), *pod["containers"]]
        mounted = {mount["name"] for container in containers for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        for container in containers:
            for source in container.get("envFrom", ()):
                assert source["configMapRef"]["name"] in manifests.config_maps
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            assert len(set(paths)) == len(paths)


def check_volume(manifests: Manifests, volume: dict[str, Any], secrets: set[str]) -> None:
    match volume:
        case {"emptyDir": {"sizeLimit": _}}:
            pass
        case {"configMap": {"name": name}}:
            assert name in manifests.config_maps
        case {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}:
            assert name in OUTSIDE_CLAIMS
        case {"secret": {"secretName": name}}:
            assert name in secrets
        case _:
            raise AssertionError(f"{volume}: no known kind of volume")
