"""Who may reach whom: NetworkPolicies evaluated as a network plugin does."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

import pytest

from tests.k8s.manifests import Manifests, Object, rendered

GRPC = {"gateway": 50051, "verifier": 50052, "drafter": 50053}
OTLP = {"collector": 4317}
PORTS = {"gateway": [50051, 8080, 9464, 50050], "verifier": [50052, 9464, 50050], "drafter": [50053, 9464, 50050]}


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside of the cluster."""

    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    address: str = ""


OUTSIDE = Peer(address="203.0.113.7")
OTHER_POD = Peer("elsewhere", {"app": "client"})
# With the labels of a service, but in another namespace.
IMPOSTOR = Peer("elsewhere", {"app.kubernetes.io/name": "gateway", "app.kubernetes.io/part-of": "outrider"})
NEIGHBOUR = Peer("outrider", {"app": "something-else"})
DNS = Peer("kube-system", {"k8s-app": "kube-dns"})
PROMETHEUS = Peer("monitoring", {"app.kubernetes.io/name": "prometheus"})


def pods(manifests: Manifests) -> dict[str, Peer]:
    """A pod of each Deployment."""
    return {
        item["metadata"]["name"]: Peer("outrider", item["spec"]["template"]["metadata"]["labels"])
        for item in manifests.of_kind("Deployment")
    }


def allows(manifests: Manifests, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection is let out at its source and in at its target."""
    return _passes(manifests, "egress", source, target, port, protocol) and _passes(
        manifests, "ingress", target, source, port, protocol
    )


def _passes(manifests: Manifests, direction: str, pod: Peer, other: Peer, port: int, protocol: str) -> bool:
    policies = [
        policy["spec"]
        for policy in manifests.of_kind("NetworkPolicy")
        if policy["metadata"]["namespace"] == pod.namespace
        and direction.capitalize() in policy["spec"]["policyTypes"]
        and _matches(policy["spec"]["podSelector"], pod.labels)
    ]
    # Nobody isolates this pod; from the first policy on, only what one of them names may pass.
    return not policies or any(
        _rule_allows(rule, direction, pod, other, port, protocol)
        for policy in policies
        for rule in policy.get(direction, ())
    )


def _rule_allows(rule: Object, direction: str, pod: Peer, other: Peer, port: int, protocol: str) -> bool:
    peers = rule.get("from" if direction == "ingress" else "to")
    # Ports are written as numbers: not every plugin resolves names in both directions.
    ports = {(entry["protocol"], int(entry["port"])) for entry in rule["ports"]}
    return (protocol, port) in ports and (peers is None or any(_is_peer(peer, pod, other) for peer in peers))


def _is_peer(peer: Object, pod: Peer, other: Peer) -> bool:
    assert peer.keys() <= {"podSelector", "namespaceSelector", "ipBlock"}
    if "ipBlock" in peer:
        return bool(other.address) and ipaddress.ip_address(other.address) in ipaddress.ip_network(
            peer["ipBlock"]["cidr"]
        )
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        in_namespace = _matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace})
    else:
        in_namespace = other.namespace == pod.namespace
    return in_namespace and _matches(peer.get("podSelector", {}), other.labels)


def _matches(selector: Object, labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def with_policies() -> list[Manifests]:
    return [
        rendered("base", ("network-policies",)),
        rendered("overlays/cpu-demo"),
        rendered("overlays/gpu"),
    ]


@pytest.mark.parametrize("index", range(3), ids=["component", "cpu-demo", "gpu"])
def test_clients_reach_only_the_gateway_and_services_only_whom_they_need(index: int) -> None:
    manifests = with_policies()[index]
    known = pods(manifests)
    sources = known | {"outside": OUTSIDE, "other pod": OTHER_POD, "impostor": IMPOSTOR, "neighbour": NEIGHBOUR}
    reached = {
        (source, target, port)
        for source, peer in sources.items()
        for target, pod in known.items()
        if source != target
        for port in [*PORTS.get(target, [4317, 13133])]
        if allows(manifests, peer, pod, port)
    }
    clients = ("outside", "other pod", "impostor")
    assert reached == {
        *((client, "gateway", port) for client in clients for port in (50051, 8080)),
        ("gateway", "verifier", 50052),
        ("verifier", "drafter", 50053),
        *((service, "collector", 4317) for service in GRPC),
    }


@pytest.mark.parametrize("index", range(3), ids=["component", "cpu-demo", "gpu"])
def test_everyone_may_ask_dns_and_nobody_the_world(index: int) -> None:
    manifests = with_policies()[index]
    for name, pod in pods(manifests).items():
        assert allows(manifests, pod, DNS, 53, "UDP"), name
        assert allows(manifests, pod, DNS, 53, "TCP"), name
        assert not allows(manifests, pod, DNS, 443), name
        assert not allows(manifests, pod, OUTSIDE, 443), name
        assert not allows(manifests, pod, OUTSIDE, 53, "UDP"), name
        assert not allows(manifests, pod, Peer("kube-system", {"k8s-app": "else"}), 53, "UDP"), name


def test_monitoring_alone_closes_nothing() -> None:
    """A policy that lets Prometheus in would shut everyone else out where there is no other."""
    monitored = rendered("base", ("monitoring",))
    assert not monitored.has("NetworkPolicy")


def test_prometheus_scrapes_where_monitoring_is_wanted_and_nothing_else() -> None:
    monitored = rendered("overlays/gpu")
    assert monitored.has("ServiceMonitor")
    for name, pod in pods(monitored).items():
        for port in PORTS.get(name, [4317]):
            # The gateway's own doors are open to everyone.
            expected = port == 9464 or (name == "gateway" and port in (50051, 8080))
            assert allows(monitored, PROMETHEUS, pod, port) == expected, (name, port)
            if port == 9464:
                assert not allows(monitored, OTHER_POD, pod, port)
    for name, pod in pods(rendered("base", ("network-policies",))).items():
        if name in GRPC:
            assert not allows(rendered("base", ("network-policies",)), PROMETHEUS, pod, 9464)
