"""`outrider up`: the three services on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from rich.console import Console

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
            console.print(f"HTTP on {scheme}://{cluster.http_address}, dashboard at /dashboard/", highlight=False)
        console.print("Ctrl-C ends it; a second Ctrl-C does not wait for what runs", style="dim")
        ended = asyncio.create_task(cluster.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await cluster.stop(drain=stopped.is_set())
        if stopped.is_set():
            return 0
        console.print("outrider: the gateway ended by itself", style="red")
        return 1
