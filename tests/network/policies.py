"""What the NetworkPolicies of k8s/ let through, read as a network plugin reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

POLICIES = Path(__file__).resolve().parents[2] / "k8s/components/network-policies"
PART_OF = {"app.kubernetes.io/part-of": "outrider"}
SERVICES = ("gateway", "verifier", "drafter")
# Somebody outside of the namespace, whom no policy of ours governs.
CLIENT = "client"

Edge = tuple[str, str, int]


def allowed_edges(directory: Path = POLICIES) -> set[Edge]:
    """(source, destination, TCP port) of every connection that may be opened between the services and a client.

    A connection needs the leave of both ends. A pod that some policy selects for a direction may do in it what one of
    its policies lists; a pod that none selects may do everything.
    """
    policies = [
        document["spec"]
        for path in sorted(directory.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] == "NetworkPolicy"
    ]
    ports = {entry["port"] for policy in policies for rule in _rules(policy) for entry in rule.get("ports", ())}
    names = (CLIENT, *SERVICES)
    return {
        (source, destination, port)
        for source in names
        for destination in SERVICES
        for port in ports
        if source != destination
        and _may(policies, "Egress", source, destination, port)
        and _may(policies, "Ingress", destination, source, port)
    }


def _rules(policy: dict[str, Any]) -> list[dict[str, Any]]:
    return [*policy.get("ingress", ()), *policy.get("egress", ())]


def _may(policies: list[dict[str, Any]], direction: str, own: str, peer: str, port: int) -> bool:
    if own == CLIENT:
        return True
    governing = [
        policy for policy in policies if direction in policy["policyTypes"] and _selects(policy["podSelector"], own)
    ]
    key, peers = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    return not governing or any(
        _has_port(rule, port) and (peers not in rule or any(_is_peer(entry, peer) for entry in rule[peers]))
        for policy in governing
        for rule in policy.get(key, ())
    )


def _has_port(rule: dict[str, Any], port: int) -> bool:
    return "ports" not in rule or any(entry["protocol"] == "TCP" and entry["port"] == port for entry in rule["ports"])


def _is_peer(entry: dict[str, Any], name: str) -> bool:
    # Other namespaces and address blocks are none of the services.
    return name != CLIENT and entry.keys() == {"podSelector"} and _selects(entry["podSelector"], name)


def _selects(selector: dict[str, Any], name: str) -> bool:
    assert not selector.keys() - {"matchLabels"}, "the test cannot read this selector"
    labels = {"app.kubernetes.io/name": name, **PART_OF}
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
