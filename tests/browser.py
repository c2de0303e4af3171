"""A headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Browser:
    """One page. What the page logs as an error, and what it throws, is kept in `problems`."""

    def __init__(self, width: int = 1360, height: int = 1400) -> None:
        self.problems: list[str] = []
        self._size = (width, height)
        self._ids = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""

    async def __aenter__(self) -> Self:
        assert CHROMIUM is not None
        self._directory = tempfile.mkdtemp(prefix="chromium-")
        down, self._commands = os.pipe()
        answers, up = os.pipe()
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={self._directory}", "about:blank"]

        def connect() -> None:
            # Where the browser looks for them. High first: the ends may be 3 and 4 themselves.
            os.dup2(down, 30), os.dup2(up, 31)
            os.dup2(30, 3), os.dup2(31, 4)

        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        os.close(down)
        os.close(up)
        self._reader = asyncio.create_task(self._read(answers))
        targets = await self.call("Target.getTargets")
        [page] = [target for target in targets["targetInfos"] if target["type"] == "page"]
        attached = await self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        width, height = self._size
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._commands)
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._reader.cancel()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def open(self, url: str) -> None:
        """Go to a page."""
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    async def wait_for(self, expression: str, seconds: float = 30.0) -> Any:
        """The value of an expression, as soon as it is true."""
        async with asyncio.timeout(seconds):
            while not (value := await self.evaluate(expression)):
                await asyncio.sleep(0.1)
            return value

    async def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page as it is, or what the window shows of it, as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        self._ids += 1
        message = {"id": self._ids, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        answer = self._answers[self._ids] = asyncio.get_running_loop().create_future()
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return await asyncio.wait_for(answer, 60)

    async def _read(self, descriptor: int) -> None:
        reader = asyncio.StreamReader(limit=1 << 26)
        pipe = os.fdopen(descriptor, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while True:
                self._take(json.loads((await reader.readuntil(b"\0"))[:-1]))
        except asyncio.IncompleteReadError:
            return
        finally:
            transport.close()

    def _take(self, message: dict[str, Any]) -> None:
        if answer := self._answers.pop(message.get("id", 0), None):
            if "error" in message:
                answer.set_exception(AssertionError(message["error"]))
            else:
                answer.set_result(message["result"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(str(message["params"]["entry"]))
