"""A TCP proxy that makes a good network bad: delay, stalls, resets. In a test's event loop, or as a program."""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 1 << 16


class TcpProxy:
    """Passes bytes between whoever dials it and `target`, host:port, both ways."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        # Seconds that each byte spends on the way.
        self.delay = 0.0
        self.num_accepted = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        """Listen; raises OSError when the address is taken."""
        host, _, port = listen.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def stall(self) -> None:
        """Pass nothing on from now on, neither bytes nor the news that a connection has ended."""
        self._flowing.clear()

    def resume(self) -> None:
        """Pass on what has piled up, and go on."""
        self._flowing.set()

    def reset(self) -> int:
        """End all connections as a crashing machine does, with RST on both sides; how many there were."""
        num_reset = len(self._connections)
        for task, writers in list(self._connections.items()):
            for writer in writers:
                connection = writer.get_extra_info("socket")
                if connection is not None:
                    # Without lingering, closing sends RST instead of FIN.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            task.cancel()
        return num_reset

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        task = asyncio.current_task()
        assert task is not None
        writers = self._connections[task] = [writer]
        try:
            await self._flowing.wait()
            host, _, port = self.target.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            writers.append(far_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, far_writer))
                tasks.create_task(self._pass(far_reader, writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            # Nobody waits for this task: its end is the end of the connection.
            pass
        finally:
            del self._connections[task]
            for each in writers:
                each.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Deliver each chunk `delay` seconds after it came, the end of the stream like any other."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        clock = asyncio.get_running_loop().time

        async def deliver() -> None:
            while True:
                due, data = await on_the_way.get()
                await asyncio.sleep(max(0.0, due - clock()))
                await self._flowing.wait()
                if not data:
                    with suppress(OSError):
                        writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(deliver())
            while True:
                data = await reader.read(CHUNK_BYTES)
                on_the_way.put_nowait((clock() + self.delay, data))
                if not data:
                    break


@asynccontextmanager
async def proxied(target: str, listen: str = "127.0.0.1:0") -> AsyncIterator[TcpProxy]:
    """A proxy that runs."""
    proxy = TcpProxy(target)
    await proxy.start(listen)
    try:
        yield proxy
    finally:
        await proxy.stop()


async def _serve(routes: list[str]) -> None:
    """Run a proxy for each LISTEN=TARGET and do what stdin says: `delay S`, `stall`, `resume`, `reset`, each with the
    place of the proxy in front."""
    proxies = []
    for route in routes:
        listen, _, target = route.partition("=")
        proxies.append(TcpProxy(target))
        await proxies[-1].start(listen)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        place, command, *arguments = line.split()
        proxy = proxies[int(place)]
        match command:
            case "delay":
                proxy.delay = float(arguments[0])
            case "stall":
                proxy.stall()
            case "resume":
                proxy.resume()
            case "reset":
                proxy.reset()
            case _:
                raise SystemExit(f"unknown command: {line}")
        print("done", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=_serve.__doc__)
    parser.add_argument("routes", nargs="+", metavar="LISTEN=TARGET")
    asyncio.run(_serve(parser.parse_args().routes))
