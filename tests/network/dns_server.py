"""A small name server whose answers a test changes. In a test's event loop, or as a program that reads a file."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import dns.asyncresolver
import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.resolver
import dns.rrset

from gateway.discovery import ResolveError

# IP addresses, or what goes wrong: "SERVFAIL", "NXDOMAIN", "silence". A name without an entry does not exist.
Answer = Sequence[str] | str


class DnsServer(asyncio.DatagramProtocol):
    """Answers A and AAAA questions over UDP from `answers`, by name without the last dot."""

    def __init__(self, answers: Callable[[], Mapping[str, Answer]]) -> None:
        self._answers = answers
        self._transport: asyncio.DatagramTransport | None = None
        self.num_questions = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not its class, but what it is.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.num_questions += 1
        query = dns.message.from_wire(data)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        question = query.question[0]
        answer = self._answers().get(question.name.to_text(omit_final_dot=True).lower(), "NXDOMAIN")
        if answer == "silence":
            return
        if isinstance(answer, str):
            response.set_rcode(dns.rcode.from_text(answer))
        else:
            is_wanted = {dns.rdatatype.A: lambda a: ":" not in a, dns.rdatatype.AAAA: lambda a: ":" in a}
            chosen = [address for address in answer if is_wanted.get(question.rdtype, lambda _: False)(address)]
            if chosen:
                response.answer.append(dns.rrset.from_text(question.name, 0, "IN", question.rdtype, *chosen))
        assert self._transport is not None
        self._transport.sendto(response.to_wire(), addr)


@asynccontextmanager
async def dns_server(answers: Mapping[str, Answer], host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """A name server that answers from `answers`, which may change; its port."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: DnsServer(lambda: answers), (host, port))
    try:
        yield transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


class TestResolver:
    """Asks a name server on a port of its own, as the system's resolver cannot."""

    __test__ = False

    def __init__(self, port: int) -> None:
        self._resolver = dns.asyncresolver.Resolver(configure=False)
        self._resolver.nameservers = ["127.0.0.1"]
        self._resolver.port = port
        self._resolver.lifetime = self._resolver.timeout = 0.5

    async def resolve(self, host: str) -> Sequence[str]:
        """All addresses of a name. Raises ResolveError."""
        try:
            found = await self._resolver.resolve_name(host)
        except dns.exception.DNSException as error:
            raise ResolveError(type(error).__name__) from error
        if (task := asyncio.current_task()) is not None and task.cancelling():
            # dnspython waits by `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes together
            # with the answer (python/cpython#86296).
            raise asyncio.CancelledError
        return list(found.addresses())


async def _serve(listen: list[str], path: Path) -> None:
    loop = asyncio.get_running_loop()
    for address in listen:
        host, _, port = address.rpartition(":")
        await loop.create_datagram_endpoint(lambda: DnsServer(lambda: json.loads(path.read_text())), (host, int(port)))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", nargs="+", required=True, metavar="HOST:PORT")
    parser.add_argument("--answers", type=Path, required=True, help="JSON file, read anew for each question")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.listen, arguments.answers))
