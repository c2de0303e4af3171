"""A node of a cluster in small: runs containers as pods with namespaces, addresses, probes and ends of their own.

A program, started in network, mount and process namespaces of its own (`unshare --net --mount --pid --fork --kill-child
--mount-proc`), so that nothing is left of it when it ends. Reads one JSON object from stdin (`Plan`) and writes one to
stdout (`Report`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc

# Its own address, where the collector is.
NODE = "10.42.0.1"
BRIDGE = "02:00:0a:2a:00:01"


@dataclass(frozen=True)
class Pod:
    """One container, as its manifest and its image describe it."""

    name: str
    address: str
    command: list[str]
    environment: dict[str, str]
    user: str  # uid:gid
    # What it sees of the file system by place, all of it read-only; only /tmp can be written.
    mounts: dict[str, str]
    readiness: dict[str, Any]
    liveness: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to run, and what to ask of the gateway."""

    pods: list[Pod]
    hosts: dict[str, str]
    prompt: str
    max_tokens: int
    # PEM of the authority that signed the pods' certificates; empty: nothing is encrypted.
    authority: str
    # What cert-manager does when it renews: links to swap, and what they then lead to.
    renewals: dict[str, str]
    # Directory of the collector's certificate.
    collector_tls: str


@dataclass
class Report:
    """What was seen."""

    was_alive_before_it_was_ready: dict[str, bool] = field(default_factory=dict)
    ready_seconds: dict[str, float] = field(default_factory=dict)
    text: str = ""
    num_accepted: int = 0
    http_status: int = 0
    # Whether the gateway showed another certificate after the renewal, and worked on.
    is_renewed: bool = False
    # Pods whose spans and metrics came to the collector.
    traced: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    peak_megabytes: dict[str, float] = field(default_factory=dict)
    writable: dict[str, list[str]] = field(default_factory=dict)
    exit_codes: dict[str, int] = field(default_factory=dict)
    stop_seconds: dict[str, float] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)


# Waits until its network is there, builds a root of read-only mounts, becomes the user and the program.
ENTER = """
set -eu
read -r _
ip link set lo up
ip address add {address}/24 dev eth0
ip link set eth0 up
mount -t tmpfs tmpfs {root}
for place in {places}; do
    mkdir -p {root}$place
    mount --rbind $place {root}$place
    mount -o remount,bind,ro {root}$place
done
# Before what is mounted below it, as a checkout may be.
mkdir -p {root}/tmp
mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
{binds}
for link in bin sbin lib lib64; do
    if test -L /$link && ! test -e {root}/$link; then cp -P /$link {root}/$link; fi
done
mkdir -p {root}/proc {root}/dev {root}/etc
cp {root}.hosts {root}/etc/hosts
mount --rbind /proc {root}/proc
mount --rbind /dev {root}/dev
mount -o remount,bind,ro {root}
cd {root}/tmp
exec chroot --userspec={user} --groups= {root} env -C /tmp -i {environment} {command}
"""


def sh(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def start(pod: Pod, hosts: dict[str, str], directory: Path) -> subprocess.Popen[str]:
    """Start a pod's container in namespaces of its own."""
    root = directory / pod.name
    root.mkdir()
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
    Path(f"{root}.hosts").write_text("\n".join(lines) + "\n")
    system = [place for place in ("/usr", "/bin", "/sbin", "/lib", "/lib64") if Path(place).is_dir()]
    places = [place for place in system if not Path(place).is_symlink()]
    binds = [
        f"mkdir -p {root}{place}; mount --rbind {source} {root}{place}; mount -o remount,bind,ro {root}{place}"
        for place, source in pod.mounts.items()
        if not any(Path(place).is_relative_to(known) for known in places)
    ]
    script = ENTER.format(
        address=pod.address,
        root=root,
        places=" ".join(places),
        binds="\n".join(binds),
        user=pod.user,
        environment=" ".join(shlex.quote(f"{name}={value}") for name, value in pod.environment.items()),
        command=shlex.join(pod.command),
    )
    with Path(f"{root}.log").open("w") as log:
        process = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
        )
    # Only once it has unshared can its end of the cable be put into its namespace.
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{process.pid}/ns/net") == own:
        time.sleep(0.01)
    place = f"v{pod.address.rpartition('.')[2]}"
    sh("ip", "link", "add", place, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
    sh("ip", "link", "set", place, "master", "br0", "up")
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return process


async def probe(pod: Pod, wanted: dict[str, Any]) -> bool:
    """Ask as the kubelet asks."""
    async with grpc.aio.insecure_channel(f"{pod.address}:{wanted['grpc']['port']}") as channel:
        request = health_pb2.HealthCheckRequest(service=wanted["grpc"]["service"])
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=wanted.get("timeoutSeconds", 1))
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def run(plan: Plan, directory: Path) -> Report:
    """Start everything at once, wait until it is ready, ask, and end it again."""
    report = Report()
    sh("ip", "link", "set", "lo", "up")
    # With an address of its own: else it has the lowest of its ports', which changes when the first pod is gone, and
    # what the others send to the node for their last exports is lost until they have asked for the address again.
    sh("ip", "link", "add", "br0", "address", BRIDGE, "type", "bridge")
    sh("ip", "address", "add", f"{NODE}/24", "dev", "br0")
    sh("ip", "link", "set", "br0", "up")
    processes = {pod.name: start(pod, plan.hosts, directory) for pod in plan.pods}
    try:
        async with collector(plan) as (spans, metrics):
            async with asyncio.timeout(150):
                await asyncio.gather(*(wait_until_ready(pod, processes[pod.name], report) for pod in plan.pods))
            if len(report.ready_seconds) == len(plan.pods):
                await ask(plan, report)
                if plan.renewals:
                    await renew(plan, report)
                for name, process in processes.items():
                    look_at(name, process, report)
                await asyncio.gather(*(asyncio.to_thread(end, *item, report) for item in processes.items()))
            report.traced, report.measured = sorted(spans.pods), sorted(metrics.pods)
    except TimeoutError:
        print("not everything became ready", file=sys.stderr)
    # Whatever still runs ends with this program.
    report.logs = {name: (directory / f"{name}.log").read_text()[-4000:] for name in processes}
    return report


async def wait_until_ready(pod: Pod, process: subprocess.Popen[str], report: Report) -> None:
    began = time.monotonic()
    while process.poll() is None:
        if await probe(pod, pod.readiness):
            report.ready_seconds[pod.name] = round(time.monotonic() - began, 1)
            return
        if await probe(pod, pod.liveness):
            report.was_alive_before_it_was_ready[pod.name] = True
        await asyncio.sleep(0.05)


async def ask(plan: Plan, report: Report) -> None:
    """A completion over gRPC, health over HTTP."""
    address = plan.hosts["gateway"]
    async with channel_to(plan, f"{address}:50051") as channel:
        request = generation_pb2.GenerateRequest(
            prompt=plan.prompt,
            sampling=common_pb2.SamplingParameters(temperature=0.0),
            stopping=generation_pb2.StoppingParameters(max_tokens=plan.max_tokens),
        )
        report.text, report.num_accepted = "", 0
        async for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60):
            report.text += response.chunk.text
            if response.HasField("finished"):
                report.num_accepted = response.finished.speculation.num_accepted_tokens
    tls = ssl.create_default_context(cadata=plan.authority) if plan.authority else None
    name = "gateway" if plan.authority else None
    reader, writer = await asyncio.open_connection(address, 8080, ssl=tls, server_hostname=name)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n")
    report.http_status = int((await reader.readline()).split()[1])
    writer.close()


def channel_to(plan: Plan, address: str) -> grpc.aio.Channel:
    """A client's, as it would dial the Service."""
    # A pool of its own for each, or gRPC would go on with a connection from before.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "gateway")]
    if not plan.authority:
        return grpc.aio.insecure_channel(address, options[:1])
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(plan.authority.encode()), options)


async def renew(plan: Plan, report: Report) -> None:
    """Swap the certificates, as the kubelet swaps a Secret's, and ask again."""
    gateway = (plan.hosts["gateway"], 50051)
    before = await asyncio.to_thread(ssl.get_server_certificate, gateway)
    for link, target in plan.renewals.items():
        fresh = Path(f"{link}.new")
        fresh.symlink_to(target)
        fresh.replace(link)
    async with asyncio.timeout(30):
        while await asyncio.to_thread(ssl.get_server_certificate, gateway) == before:
            await asyncio.sleep(0.2)
    await ask(plan, report)
    report.is_renewed = True


def look_at(name: str, process: subprocess.Popen[str], report: Report) -> None:
    """Its memory, and where it could write: its mounts without `ro`. `exec` made the program of what was started."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    report.peak_megabytes[name] = int(peak.split()[1]) / 1024
    mounts = [line.split() for line in Path(f"/proc/{process.pid}/mounts").read_text().splitlines()]
    report.writable[name] = sorted({where for _, where, _, options, *_ in mounts if "ro" not in options.split(",")})


class Exports:
    """One kind of what a collector takes; notes which pods sent any."""

    def __init__(self, resources: Callable[[Any], Iterable[Any]], response: type) -> None:
        self._resources = resources
        self._response = response
        self.pods: set[str] = set()

    async def Export(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Take it in."""
        for item in self._resources(request):
            attributes = {pair.key: pair.value.string_value for pair in item.resource.attributes}
            self.pods.add(attributes["k8s.pod.name"])
        return self._response()


@asynccontextmanager
async def collector(plan: Plan) -> AsyncIterator[tuple[Exports, Exports]]:
    """A collector for spans and metrics on the node."""
    spans = Exports(lambda request: request.resource_spans, trace_service_pb2.ExportTraceServiceResponse)
    metrics = Exports(lambda request: request.resource_metrics, metrics_service_pb2.ExportMetricsServiceResponse)
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(spans, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, server)  # type: ignore[no-untyped-call]
    if plan.collector_tls:
        key, certificate = (Path(plan.collector_tls, name).read_bytes() for name in ("tls.key", "tls.crt"))
        server.add_secure_port(f"{NODE}:4317", grpc.ssl_server_credentials([(key, certificate)]))
    else:
        server.add_insecure_port(f"{NODE}:4317")
    await server.start()
    try:
        yield spans, metrics
    finally:
        await server.stop(grace=None)


def end(name: str, process: subprocess.Popen[str], report: Report) -> None:
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    try:
        report.exit_codes[name] = process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    report.stop_seconds[name] = round(time.monotonic() - began, 1)


if __name__ == "__main__":
    loaded = json.load(sys.stdin)
    plan = Plan(**{**loaded, "pods": [Pod(**pod) for pod in loaded["pods"]]})
    print(json.dumps(asdict(asyncio.run(run(plan, Path(sys.argv[1]))))))
