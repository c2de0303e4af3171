"""`outrider up`: the three services on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from rich.console import Console

from outrider.arguments import DEFAULT_PORT
from outrider.dashboard import PATH
from outrider.front_door import FrontDoor
from outrider.local import LocalCluster, Options, StartError
from outrider.progress import ClusterProgress


def run_up(options: Options, console: Console) -> int:
    """Serve until told to stop; the exit status."""
    return asyncio.run(_up(options, console))


async def _up(options: Options, console: Console) -> int:
    stopped = asyncio.Event()
    with ClusterProgress(console) as progress:
        cluster = LocalCluster(options, progress.report)

        def on_signal() -> None:
            if stopped.is_set():
                # Asked twice: leave without draining.
                cluster.kill()
            stopped.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        stopping = asyncio.create_task(stopped.wait())
        starting = asyncio.create_task(cluster.start())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return 0
        try:
            await starting
        except StartError as error:
            stopping.cancel()
            console.print(f"outrider: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            return 1
        console.print(f"serving on [bold]{cluster.address}[/bold], logs in {cluster.log_directory}", highlight=False)
        if options.http_port is not None:
            scheme = "https" if options.front_door.tls_certificate is not None else "http"
            http = f"{scheme}://{cluster.http_address}"
            console.print(f"OpenAI's API at {http}/v1, the page at {http}{PATH}", highlight=False, soft_wrap=True)
            metrics = {"gateway": f"{http}/metrics"}
            metrics |= {name: f"http://{address}/metrics" for name, address in cluster.metrics_addresses.items()}
            console.print("metrics: " + ", ".join(map(" ".join, metrics.items())), highlight=False, soft_wrap=True)
        if options.front_door == FrontDoor():
            console.print(f"try it: [bold]{_next_command(cluster.address)}[/bold]", highlight=False, soft_wrap=True)
        console.print("Ctrl-C ends it; a second Ctrl-C does not wait for what runs", style="dim")
        ended = asyncio.create_task(cluster.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await cluster.stop(drain=stopped.is_set())
        if stopped.is_set():
            return 0
        console.print("outrider: the gateway ended by itself", style="red")
        return 1


def _next_command(address: str) -> str:
    """What a user may type next, in another terminal."""
    elsewhere = "" if address == f"127.0.0.1:{DEFAULT_PORT}" else f"--address {address} "
    return f'outrider generate {elsewhere}--show-speculation "def main():"'
