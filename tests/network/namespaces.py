"""Network namespaces joined by a router, which lets through what it is told to: a cluster's network on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.network.policies import CLIENT, POLICIES, SERVICES, Edge

# Rules of the router, first match: what is cut off, its own traffic, what is allowed, and the rest.
CUT, OWN, ALLOWED, REST = 50, 90, 100, 1000
_ETC = Path("/etc/netns")
ROUTER = "router"


@cache
def why_not() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` here (iproute2)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    name = f"outrider-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    # A container may make one and be allowed nothing inside.
    tried = subprocess.run(
        ["ip", "-n", name, "rule", "add", "pref", "5", "blackhole"], capture_output=True, check=False
    )
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return "" if tried.returncode == 0 else "the kernel has no routing rules"


class Network:
    """A namespace for each service and one for the router; the client is the test's own process.

    NAME's address is `address(NAME)`, the router's own one on NAME's side `near(NAME)`. Packets that are not allowed,
    or cut off, vanish without a word, as a network policy lets them.
    """

    def __init__(self) -> None:
        pid = os.getpid()
        self._prefix = f"or{pid}"
        self._net = f"10.{200 + pid % 50}"
        self._places = {name: place for place, name in enumerate((CLIENT, *SERVICES), start=1)}
        self.router = self.namespace(ROUTER)

    def address(self, name: str) -> str:
        """Where a service, or the client, is found."""
        return f"{self._net}.{self._places[name]}.2"

    def near(self, name: str) -> str:
        """Where it finds the router."""
        return f"{self._net}.{self._places[name]}.1"

    def namespace(self, name: str) -> str:
        """The namespace of a service, or of the router."""
        return f"{self._prefix}-{name}"

    def create(self, allowed: Iterable[Edge]) -> None:
        """Make everything; `delete` is safe to call whatever of it worked."""
        _ip("netns", "add", self.router)
        self._inside(self.router, "link", "set", "lo", "up")
        subprocess.run(
            ["ip", "netns", "exec", self.router, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True, timeout=20
        )
        for name, place in self._places.items():
            self._join(name, place)
        self._rule("add", OWN, "iif", "lo", "lookup", "main")
        for number, (source, destination, port) in enumerate(sorted(allowed)):
            there = ["from", self.address(source), "to", self.address(destination), "dport", str(port)]
            back = ["from", self.address(destination), "to", self.address(source), "sport", str(port)]
            for way in (there, back):
                self._rule("add", ALLOWED + number, "ipproto", "tcp", *way, "lookup", "main")
        self._rule("add", REST, "blackhole")

    def cut(self, one: str, other: str) -> None:
        """From now on, packets between the two vanish."""
        for source, destination in ((one, other), (other, one)):
            self._rule("add", CUT, "from", self.address(source), "to", self.address(destination), "blackhole")

    def heal(self) -> None:
        """Undo every cut."""
        while _ip("-n", self.router, "rule", "delete", "pref", str(CUT), is_checked=False):
            pass

    def start(self, name: str, arguments: Sequence[str], log: IO[bytes], **options: Any) -> subprocess.Popen[bytes]:
        """Run Python in the namespace of a service, or of the router."""
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(POLICIES.parents[2])}
        command = ["ip", "netns", "exec", self.namespace(name), sys.executable, "-P", *arguments]
        return subprocess.Popen(command, stderr=log, env=environment, **options)

    def delete(self) -> None:
        """Take everything down."""
        for name in (*SERVICES, ROUTER):
            _ip("netns", "delete", self.namespace(name), is_checked=False)
            shutil.rmtree(_ETC / self.namespace(name), ignore_errors=True)
        _ip("link", "delete", f"{self._prefix}c", is_checked=False)

    def _join(self, name: str, place: int) -> None:
        device = f"to-{name}"
        if name == CLIENT:
            own = f"{self._prefix}c"
            inside: Callable[..., object] = _ip
            _ip("link", "add", own, "type", "veth", "peer", "name", device, "netns", self.router)
        else:
            own, namespace = "eth0", self.namespace(name)
            _ip("netns", "add", namespace)
            (_ETC / namespace).mkdir(parents=True)
            (_ETC / namespace / "resolv.conf").write_text(
                f"nameserver {self.near(name)}\noptions timeout:1 attempts:1\n"
            )

            def inside(*arguments: str) -> None:
                self._inside(namespace, *arguments)

            inside("link", "set", "lo", "up")
            _ip("-n", self.router, "link", "add", device, "type", "veth", "peer", "name", own, "netns", namespace)
        self._inside(self.router, "addr", "add", f"{self.near(name)}/24", "dev", device)
        self._inside(self.router, "link", "set", device, "up")
        inside("addr", "add", f"{self._net}.{place}.2/24", "dev", own)
        inside("link", "set", own, "up")
        inside("route", "add", f"{self._net}.0.0/16", "via", self.near(name))

    def _rule(self, verb: str, pref: int, *rule: str) -> None:
        self._inside(self.router, "rule", verb, "pref", str(pref), *rule)

    def _inside(self, namespace: str, *arguments: str) -> None:
        _ip("-n", namespace, *arguments)


def _ip(*arguments: str, is_checked: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=20)
    if is_checked and done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.returncode == 0
