"""The page as `outrider up --http-port` serves it: over HTTP, in a browser, and what the services log meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from outrider.bundled import bundled_model
from outrider.client import AsyncClient
from outrider.local import LocalCluster, Options
from tests.browser import CHROMIUM, Browser
from tests.service_device import DRAFTER_FLAGS, SERVICE_DEVICE, VERIFIER_FLAGS

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = 'def read_secret_lines(path):\n    """Return the lines."""\n    with open(path'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """The bundled pair with HTTP, logging everything as a pod would."""
    options = Options(
        target=bundled_model("target"),
        draft=bundled_model("draft"),
        device=SERVICE_DEVICE,
        dtype="float32",
        http_port=0,
        drain_seconds=2.0,
        log_level="DEBUG",
        log_format="json",
        log_directory=tmp_path_factory.mktemp("dashboard-logs"),
        verifier_flags=VERIFIER_FLAGS,
        drafter_flags=DRAFTER_FLAGS,
    )
    environment = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("OTEL_")}
    try:
        async with LocalCluster(options) as cluster:
            yield cluster
    finally:
        os.environ.update(environment)


async def test_one_request_from_the_prompt_to_its_timeline(cluster: LocalCluster) -> None:
    """Catches services whose spans do not reach the page, and text that reaches the logs."""
    base = f"http://{cluster.http_address}/dashboard"
    async with httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as client:
        body = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0.7}
        lines = [json.loads(line) for line in (await client.post("/api/generate", json=body)).text.splitlines()]
        request_id, finished = lines[0]["started"]["request_id"], lines[-1]["finished"]
        pieces = [piece for line in lines[1:-1] for piece in line["tokens"]]
        assert len(pieces) == finished["num_output_tokens"]
        assert {"accepted", "recovered", "bonus"} <= {origin for _, origin in pieces}
        trace = await _trace(client, request_id, finished)
    totals = trace["totals"]
    # What no span explains is little: the answer to "why was it slow?" is here.
    assert totals["other"] < 0.25 * trace["seconds"] + 0.1
    assert min(totals["verify"], totals["draft"], totals["prefill"]) > 0
    steps = trace["steps"]
    assert sum(step["num_steps"] for step in steps) == finished["num_steps"] - 1
    assert sum(step["num_accepted_tokens"] for step in steps) == finished["num_accepted_tokens"]
    assert trace["drafts"], "the drafter's spans are there as well"
    assert [event["name"] for event in trace["events"]][:2] == ["routed", "first_token"]
    text = "".join(text for text, _ in pieces)
    words = [word for word in re.findall(r"\w{6,}", text) if word not in ("import", "return", "unicode", "string")]
    logs = [path.read_text() for path in cluster.log_directory.glob("*.log")]
    assert len(logs) == 3
    for log in logs:
        assert "read_secret_lines" not in log
        assert not re.search(r"with open\(", log)
        for line in log.splitlines():
            if line.startswith("{"):
                assert json.loads(line)["severity"] in ("DEBUG", "INFO", "WARNING")
    longest = max((line.strip() for line in text.splitlines()), key=len)
    assert words
    assert not any(longest in log for log in logs)
    (ended,) = [
        entry
        for line in (cluster.log_directory / "gateway.log").read_text().splitlines()
        if line.startswith("{") and (entry := json.loads(line)).get("request_id") == request_id
        and entry["message"] == "a request ended with OK"
    ]  # fmt: skip
    assert ended["trace_id"] == trace["trace_id"]


async def _trace(client: httpx.AsyncClient, request_id: str, finished: dict[str, Any]) -> dict[str, Any]:
    """The request's trace, once the spans of all services have come."""
    async with asyncio.timeout(20):
        while True:
            response = await client.get(f"/api/requests/{request_id}/trace")
            if response.status_code == 200:
                trace: dict[str, Any] = response.json()
                num_steps = sum(step["num_steps"] for step in trace["steps"])
                if num_steps == finished["num_steps"] - 1 and trace["drafts"]:
                    return trace
            await asyncio.sleep(0.1)


async def test_the_command_finds_the_page(cluster: LocalCluster) -> None:
    async def run(address: str) -> tuple[int | None, bytes, bytes]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "outrider.cli", "dashboard", "--no-open", "--address", address,
            cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, out, err

    assert await run(cluster.http_address) == (0, f"http://{cluster.http_address}/dashboard/\n".encode(), b"")
    status, out, err = await run("127.0.0.1:1")
    assert (status, out) == (1, b"")
    assert b"outrider up --http-port" in err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
async def test_the_page_in_a_browser(cluster: LocalCluster, tmp_path: Path) -> None:
    """Catches scripts that fail, and numbers that never reach the page."""
    async with Browser() as browser, AsyncClient(cluster.address) as client:
        await browser.prefer("light")
        await browser.open(f"http://{cluster.http_address}/dashboard/")
        await browser.wait_for("document.querySelector('.chip.live') !== null")
        # Of another client: shown as it comes, and counted.
        plain = await client.generate(PROMPT, max_tokens=20, temperature=0, speculation=False)
        await browser.wait_for("document.querySelectorAll('#live .token.plain').length >= 20")
        shown = await browser.evaluate("document.querySelector('#live .tokens').textContent")
        assert shown == plain.text
        await browser.wait_for("document.querySelector('#fallbacks').textContent.includes('CLIENT_DISABLED')")

        await browser.evaluate("document.getElementById('max-tokens').value = 110")
        # Sampled at random, the model might well come to an end before.
        await browser.evaluate("document.getElementById('temperature').value = 0")
        await browser.evaluate("document.getElementById('go').click()")
        result = await browser.wait_for(
            "(text => text.includes('target steps') && text)(document.getElementById('result').textContent)", 60
        )
        assert result.startswith("110 tokens in ")
        tokens = await browser.evaluate(
            "[...document.querySelectorAll('#output .token')].map(one => [one.textContent, one.className])"
        )
        assert len(tokens) == 110
        assert {"token accepted", "token recovered", "token bonus", "token plain"} <= {name for _, name in tokens}
        colours = await browser.evaluate(
            "['accepted', 'recovered', 'bonus', 'plain'].map(name =>"
            " getComputedStyle(document.querySelector(`#output .${name}`)).color)"
        )
        assert len(set(colours)) == 4

        for lane in ("request", "draft", "wire", "verify"):
            await browser.wait_for(f"document.querySelectorAll('.lane[data-lane={lane}] .piece').length > 0")
        await browser.wait_for(
            "document.querySelectorAll('.lane[data-lane=verify] .k-verify').length"
            " === document.querySelectorAll('#steps tbody tr').length"
        )
        bars = await browser.wait_for(
            "(bars => bars.length === 4 && bars)([...document.querySelectorAll('#acceptance .fill')]"
            ".map(bar => bar.getBoundingClientRect().width))"
        )
        assert bars[0] > 0
        assert await browser.evaluate("document.querySelectorAll('#pools .dot.ready').length") == 2
        assert await browser.evaluate("document.getElementById('model').textContent") == "target"
        before = await browser.evaluate("document.querySelector('#lanes svg').getBoundingClientRect().width")
        await browser.evaluate(
            "(zoom => { zoom.value = 2; zoom.dispatchEvent(new Event('input')); })(document.getElementById('zoom'))"
        )
        after = await browser.evaluate("document.querySelector('#lanes svg').getBoundingClientRect().width")
        assert after > 2 * before
        light = await browser.evaluate("getComputedStyle(document.body).backgroundColor")
        await browser.prefer("dark")
        assert await browser.evaluate("getComputedStyle(document.body).backgroundColor") != light
        # On a narrow screen nothing but the timeline scrolls sideways.
        await browser.call(
            "Emulation.setDeviceMetricsOverride", width=400, height=900, deviceScaleFactor=1, mobile=True
        )
        assert await browser.evaluate("document.documentElement.scrollWidth <= 400")
        # Every control has a name, every request went to the gateway itself.
        assert await browser.evaluate(
            "[...document.querySelectorAll('input, select, textarea')].every(one => one.labels.length > 0)"
        )
        origins = await browser.evaluate(
            "[...new Set(performance.getEntriesByType('resource').map(entry => new URL(entry.name).origin))]"
        )
        assert origins == [f"http://{cluster.http_address}"]
        await browser.screenshot(tmp_path / "dashboard.png")
        assert (tmp_path / "dashboard.png").stat().st_size > 20_000
        assert browser.problems == []
