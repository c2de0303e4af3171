"""Certificates, the names they are for, and who trusts whom."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gateway.settings import GatewaySettings
from tests.k8s.manifests import COMPONENTS, SERVICES, Manifests, rendered
from tests.k8s.test_settings import settings_of

# Who dials whom, and so whose certificate a server lets in.
CLIENTS = {"verifier": "gateway", "drafter": "verifier"}
HOURS_BEFORE_IT_ENDS = 24 * 7


@pytest.fixture(params=[("base", ("mtls",)), ("base", COMPONENTS), ("overlays/gpu", ())], ids=["alone", "all", "gpu"])
def encrypted(request: pytest.FixtureRequest) -> Manifests:
    return rendered(*request.param)


def hours(duration: str) -> int:
    assert duration.endswith("h")
    return int(duration[:-1])


@pytest.mark.parametrize("service", [*SERVICES, "collector"])
def test_a_certificate_is_for_every_name_of_its_service(encrypted: Manifests, service: str) -> None:
    certificate = encrypted.get("Certificate", service)["spec"]
    labels = encrypted.pod(service)["metadata"]["labels"]
    names = [
        item["metadata"]["name"]
        for item in encrypted.of_kind("Service")
        if item["spec"]["selector"].items() <= labels.items()
    ]
    suffixes = ("", ".outrider", ".outrider.svc", ".outrider.svc.cluster.local")
    assert set(certificate["dnsNames"]) == {name + suffix for name in names for suffix in suffixes}
    assert "server auth" in certificate["usages"]
    assert ("client auth" in certificate["usages"]) == (service != "collector")
    assert hours(certificate["duration"]) > hours(certificate["renewBefore"]) > HOURS_BEFORE_IT_ENDS


@pytest.mark.parametrize("service", [*SERVICES, "collector"])
def test_a_certificate_is_mounted_so_that_it_can_be_renewed(encrypted: Manifests, service: str) -> None:
    (volume,) = [v for v in encrypted.pod(service)["spec"]["volumes"] if v["name"] == "tls"]
    assert volume["secret"] == {"secretName": encrypted.get("Certificate", service)["spec"]["secretName"]}
    (mount,) = [m for m in encrypted.container(service)["volumeMounts"] if m["name"] == "tls"]
    # The kubelet renews a mounted Secret, but no file of it that is mounted alone.
    assert "subPath" not in mount
    if service != "collector":
        settings = settings_of(encrypted, service)
        files = [settings.tls_certificate, settings.tls_key, settings.tls_client_ca, settings.tls_ca]
        # What cert-manager puts into a Secret.
        found = {Path(file).relative_to(mount["mountPath"]).name for file in files if file is not None}
        assert {"tls.crt", "tls.key"} <= found <= {"tls.crt", "tls.key", "ca.crt"}


def test_one_authority_signs_all(encrypted: Manifests) -> None:
    authority = encrypted.get("Certificate", "authority")["spec"]
    assert authority["isCA"] is True
    assert authority["issuerRef"]["name"] == "self-signed"
    assert encrypted.get("Issuer", "self-signed")["spec"] == {"selfSigned": {}}
    assert encrypted.get("Issuer", "authority")["spec"] == {"ca": {"secretName": authority["secretName"]}}
    for service in (*SERVICES, "collector"):
        assert encrypted.get("Certificate", service)["spec"]["issuerRef"]["name"] == "authority"


def test_services_let_in_only_whom_they_serve(encrypted: Manifests) -> None:
    for service in SERVICES:
        settings = settings_of(encrypted, service)
        assert not settings.allow_plaintext
        if service in CLIENTS:
            client = CLIENTS[service]
            assert settings_of(encrypted, client).tls_ca is not None, "it dials without TLS"
            assert settings.tls_client_ca is not None
            assert settings.tls_allowed_clients == (client,)
            assert client in encrypted.get("Certificate", client)["spec"]["dnsNames"]
            assert not settings.allow_unauthenticated


def test_clients_of_a_cluster_in_earnest_need_a_key() -> None:
    gateway = settings_of(rendered("overlays/gpu"), "gateway")
    assert isinstance(gateway, GatewaySettings)
    assert not gateway.allow_unauthenticated
    assert gateway.api_keys is not None
    (mount,) = [m for m in rendered("overlays/gpu").container("gateway")["volumeMounts"] if m["name"] == "api-keys"]
    assert gateway.api_keys.parent == Path(mount["mountPath"])


def test_the_collector_reads_its_certificate_again(encrypted: Manifests) -> None:
    arguments = encrypted.container("collector")["args"]
    volumes = {volume["name"]: volume for volume in encrypted.pod("collector")["spec"]["volumes"]}
    files = encrypted.config_maps[volumes["config"]["configMap"]["name"]]
    assert [argument.rpartition("/")[2] for argument in arguments] == ["collector.yaml", "tls.yaml"] == sorted(files)
    tls = yaml.safe_load(files["tls.yaml"])["receivers"]["otlp"]["protocols"]["grpc"]["tls"]
    assert tls["reload_interval"]
    (mount,) = [m for m in encrypted.container("collector")["volumeMounts"] if m["name"] == "tls"]
    assert {Path(tls[key]).parent for key in ("cert_file", "key_file")} == {Path(mount["mountPath"])}
    trusted = encrypted.environment("gateway")["OTEL_EXPORTER_OTLP_CERTIFICATE"]
    assert trusted == f"{mount['mountPath']}/ca.crt"


def test_no_service_of_an_encrypted_port_says_that_it_is_plain(encrypted: Manifests) -> None:
    for service in encrypted.of_kind("Service"):
        for port in service["spec"]["ports"]:
            if port["name"] != "metrics":
                assert port["appProtocol"] == "https", (service["metadata"]["name"], port["name"])
