"""The gateway's page: how `outrider up` switches it on, and how `outrider dashboard` opens it."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Mapping

from outrider.service.loopback import is_loopback

PATH = "/dashboard/"
# Every request on a machine that somebody tries things on, and no load worth mentioning on one that is busy.
MAX_TRACES_PER_SECOND = 2
# Variables by which a user says where traces go: what the page would want comes second.
_USERS_OWN = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
    "OTEL_SDK_DISABLED",
)


class NoDashboardError(Exception):
    """There is no page at that address; the message is for the user."""


def gateway_flags(host: str, otlp_port: int | None) -> list[str]:
    """What makes a gateway serve the page; without a port it takes no traces."""
    flags = ["--dashboard"]
    if is_loopback(host):
        # Whoever can open the page is on this machine, as its clients are.
        flags.append("--dashboard-texts")
    if otlp_port is not None:
        flags += ["--dashboard-otlp-listen", f"127.0.0.1:{otlp_port}"]
        flags += ["--max-traces-per-second", str(MAX_TRACES_PER_SECOND)]
    return flags


def wants_traces(environment: Mapping[str, str]) -> bool:
    """Whether traces may go to the page: not where the user sends them elsewhere, or wants none."""
    return not any(environment.get(name) for name in _USERS_OWN)


def trace_environment(otlp_port: int) -> dict[str, str]:
    """What makes the services send their traces to the page, soon enough to look at them."""
    return {
        # Of traces alone: it takes nothing else.
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{otlp_port}",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        # The gateway ends first: what the others have left then has nowhere to go and must not hold them up.
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }


def find(address: str) -> str:
    """The URL of the page of the gateway whose HTTP is at `address`. Raises NoDashboardError."""
    url = f"http://{address}{PATH}"
    # This machine's own services are never behind the proxy that the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5.0):
            return url
    except urllib.error.HTTPError as error:
        problem = f"answers {error.code} to {PATH}: it serves no dashboard (--dashboard)"
    except http.client.HTTPException:
        problem = "answers, but not by HTTP: the page is on the port of --http-port, which gRPC's is not"
    except (OSError, ValueError) as error:
        problem = f"does not answer ({getattr(error, 'reason', error)}); start one with `outrider up --http-port 8080`"
    raise NoDashboardError(f"the gateway at http://{address} {problem}")


def show(url: str, *, opens_browser: bool) -> None:
    """Print the page's URL, and open it where there is a browser and the user wants one."""
    print(url, flush=True)
    if opens_browser:
        webbrowser.open(url)
