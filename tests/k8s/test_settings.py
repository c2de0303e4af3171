"""Manifests against the services' code: settings, ports, health checks, drains."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from drafter_service.settings import DrafterSettings
from gateway.discovery import DNS_SCHEME
from gateway.settings import GatewaySettings
from outrider.service.health import LIVENESS
from outrider.service.settings import ServiceSettings
from outrider.service.telemetry import Telemetry
from outrider.v1 import drafter_pb2, generation_pb2, verifier_pb2
from tests.k8s.manifests import SERVICES, Manifests, rendered
from verifier_service.settings import VerifierSettings

SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
}
GRPC_SERVICES = {
    "gateway": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    "verifier": verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name,
    "drafter": drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name,
}
# Beyond `drain_seconds`, to close streams and to export the last spans and metrics: without a collector that answers,
# both are tried for about 10 s each, and pods ended 19 s after they had drained.
MARGIN_SECONDS = 30
SLOWEST_LOADING_SECONDS = 15 * 60


def settings_of(manifests: Manifests, service: str) -> ServiceSettings:
    """The settings that a service would start with. Raises BadSettingsError as it would."""
    with mock.patch.dict("os.environ", manifests.environment(service), clear=True):
        return SETTINGS[service].load([], program=service)


def port_of(address: str | None) -> int:
    assert address is not None
    host, _, port = address.rpartition(":")
    assert host == "0.0.0.0", "a pod is reached by its own address"
    return int(port)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_starts_with_what_its_pod_is_given(manifests: Manifests, service: str) -> None:
    """Catches a variable that is misspelt, unknown, of a bad value or missing."""
    settings_of(manifests, service)
    environment = manifests.environment(service)
    assert {name for name in environment if name.startswith("OUTRIDER_")} == {
        name for name in environment if name.startswith(f"OUTRIDER_{service.upper()}_")
    }
    assert "args" not in manifests.container(service)
    assert "command" not in manifests.container(service)


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_the_ones_that_the_service_listens_on(manifests: Manifests, service: str) -> None:
    settings = settings_of(manifests, service)
    expected = {
        "grpc": port_of(settings.listen),
        "health": port_of(settings.health_listen),
        "metrics": port_of(settings.metrics_listen),
    }
    if isinstance(settings, GatewaySettings):
        expected["http"] = port_of(settings.http_listen)
    assert {port["name"]: port["containerPort"] for port in manifests.container(service)["ports"]} == expected


@pytest.mark.parametrize("service", SERVICES)
def test_probes_ask_what_the_service_answers(manifests: Manifests, service: str) -> None:
    container = manifests.container(service)
    port = port_of(settings_of(manifests, service).health_listen)
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {probe["grpc"]["port"] for probe in probes.values()} == {port}
    assert probes["readiness"]["grpc"]["service"] == GRPC_SERVICES[service]
    # Readiness would end a pod for loading or draining.
    assert probes["liveness"]["grpc"]["service"] == LIVENESS
    startup = probes["startup"]
    if service == "gateway":
        # It is ready after its verifiers: to restart it for their loading would help nobody.
        assert startup["grpc"]["service"] == LIVENESS
    else:
        assert startup["grpc"]["service"] == GRPC_SERVICES[service]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= SLOWEST_LOADING_SECONDS


@pytest.mark.parametrize("service", SERVICES)
def test_a_pod_may_finish_what_runs(manifests: Manifests, service: str) -> None:
    container = manifests.container(service)
    grace = manifests.pod(service)["spec"]["terminationGracePeriodSeconds"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before >= 5
    assert before + settings_of(manifests, service).drain_seconds + MARGIN_SECONDS <= grace


def test_services_name_each_other_as_dns_does(manifests: Manifests) -> None:
    gateway = settings_of(manifests, "gateway")
    assert isinstance(gateway, GatewaySettings)
    for addresses, name in ((gateway.verifiers, "verifier"), (gateway.drafters, "drafter")):
        service = manifests.get("Service", name)
        assert service["spec"]["clusterIP"] == "None"
        port = port_of(settings_of(manifests, name).listen)
        assert addresses == (f"{DNS_SCHEME}{name}:{port}",)


def test_models_lie_where_the_volume_is(manifests: Manifests) -> None:
    verifier, drafter, gateway = (settings_of(manifests, name) for name in ("verifier", "drafter", "gateway"))
    assert isinstance(verifier, VerifierSettings)
    assert isinstance(drafter, DrafterSettings)
    assert isinstance(gateway, GatewaySettings)
    assert gateway.tokenizer == verifier.model
    for service, path in (("gateway", gateway.tokenizer), ("verifier", verifier.model), ("drafter", drafter.model)):
        assert path is not None
        (mount,) = [m for m in manifests.container(service)["volumeMounts"] if m["name"] == "models"]
        assert Path(mount["mountPath"]) in path.parents
        assert mount["readOnly"] is True


@pytest.mark.parametrize("service", SERVICES)
def test_traces_go_to_the_collector(manifests: Manifests, service: str) -> None:
    environment = manifests.environment(service)
    telemetry = Telemetry.from_environment(service, environment)
    assert telemetry.is_enabled
    telemetry.shutdown()
    endpoint = environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
    (port,) = manifests.get("Service", "collector")["spec"]["ports"]
    is_encrypted = manifests.has("Certificate")
    assert endpoint == f"{'https' if is_encrypted else 'http'}://collector:{port['port']}"


@pytest.mark.parametrize("service", ["verifier", "drafter"])
def test_a_model_uses_the_cores_and_gpus_that_its_pod_has(manifests: Manifests, service: str) -> None:
    settings = settings_of(manifests, service)
    assert isinstance(settings, VerifierSettings | DrafterSettings)
    limits = manifests.container(service)["resources"]["limits"]
    assert settings.num_threads == int(limits["cpu"])
    assert (settings.device == "cuda") == ("nvidia.com/gpu" in limits)


def test_pools_of_gpus_are_apart(manifests: Manifests) -> None:
    """A drafter that took a verifier's GPU would leave a verifier without."""
    pods = [manifests.pod(service)["spec"] for service in ("verifier", "drafter")]
    if not all("nodeSelector" in pod for pod in pods):
        assert not any("nodeSelector" in pod for pod in pods)
        return
    verifier, drafter = (pod["nodeSelector"]["outrider.dev/pool"] for pod in pods)
    assert verifier != drafter
    for pod, pool in zip(pods, (verifier, drafter), strict=True):
        assert {"key": "outrider.dev/pool", "operator": "Equal", "value": pool, "effect": "NoSchedule"} in pod[
            "tolerations"
        ]


def test_routes_lead_to_what_the_gateway_serves() -> None:
    routed = rendered("base", ("gateway-api",))
    gateway = settings_of(routed, "gateway")
    assert isinstance(gateway, GatewaySettings)
    (rule,) = routed.get("GRPCRoute", "gateway")["spec"]["rules"]
    assert [match["method"]["service"] for match in rule["matches"]] == [GRPC_SERVICES["gateway"]]
    assert [backend["port"] for backend in rule["backendRefs"]] == [port_of(gateway.listen)]
    (rule,) = routed.get("HTTPRoute", "gateway")["spec"]["rules"]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1"]
    assert [backend["port"] for backend in rule["backendRefs"]] == [port_of(gateway.http_listen)]
