"""Sends the spans of one real request to a running Arize Phoenix and asserts what it shows of them.

    pip install arize-phoenix      (in an environment of its own: it pins much)
    phoenix serve
    python -m tests.tools.phoenix_check --screenshot docs/images/trace.png

Phoenix is a receiver that others wrote: what it stores and shows is what an operator's own backend gets.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx

from outrider.bundled import bundled_model
from outrider.client import AsyncClient, Completion
from outrider.local import LocalCluster, Options
from tests.browser import CHROMIUM, Browser

PROMPT = 'def read_lines(path):\n    """Return the lines of a text file, without their ends."""\n    with open(path'
EXPORT_SECONDS = 30.0


async def one_request(otlp: str) -> Completion:
    """Run the services with their traces going to `otlp`, and one request."""
    os.environ.update({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": otlp, "OTEL_BSP_SCHEDULE_DELAY": "300"})
    options = Options(bundled_model("target"), bundled_model("draft"), device="cpu", drain_seconds=5.0)
    async with LocalCluster(options) as cluster, AsyncClient(cluster.address) as client:
        return await client.generate(
            PROMPT, max_tokens=160, temperature=0.7, seed=4, request_id=f"check-{time.time():.0f}"
        )


async def spans_of(client: httpx.AsyncClient, request_id: str) -> list[dict[str, Any]]:
    """All spans of the request's trace, once they have come; the services have ended, so that all were sent."""
    deadline = time.monotonic() + EXPORT_SECONDS
    while time.monotonic() < deadline:
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            parameters: dict[str, str | int] = {"limit": 1000, **({"cursor": cursor} if cursor else {})}
            answer = (await client.get("/v1/projects/default/spans", params=parameters)).raise_for_status().json()
            found += answer["data"]
            cursor = answer.get("next_cursor")
            if not cursor:
                break
        for span in found:
            if _attribute(span, "gen_ai.response.id") == request_id:
                trace_id = span["context"]["trace_id"]
                return [one for one in found if one["context"]["trace_id"] == trace_id]
        await asyncio.sleep(0.5)
    raise AssertionError(f"Phoenix shows no span of request {request_id}")


def check(spans: list[dict[str, Any]], completion: Completion) -> None:
    """Assert that the tree is whole and agrees with what the client was told."""
    by_id = {span["context"]["span_id"]: span for span in spans}
    [root] = [span for span in spans if span["name"].startswith("text_completion")]
    [decode] = [span for span in spans if span["name"].startswith("decode")]
    assert decode["parent_id"] == root["context"]["span_id"]
    children = [span for span in spans if span["parent_id"] == decode["context"]["span_id"]]
    names = {span["name"].split()[0] for span in children}
    assert {"queue", "prefill", "verify_step", "draft"} <= names, names
    assert all(span["parent_id"] in by_id for span in spans if span is not root), "a span without its parent"
    steps = [span for span in children if span["name"].startswith("verify_step")]
    for name, expected in (
        ("num_draft_tokens", completion.speculation.num_draft_tokens),
        ("num_accepted_tokens", completion.speculation.num_accepted_tokens),
    ):
        assert sum(_attribute(step, f"outrider.{name}") for step in steps) == expected, name
    num_steps = sum(_attribute(step, "outrider.num_steps") or 1 for step in steps)
    assert num_steps == completion.speculation.num_steps - 1
    assert {"outrider.routed", "outrider.first_token"} <= {event["name"] for event in root["events"]}
    assert _attribute(root, "gen_ai.usage.output_tokens") == completion.usage.num_output_tokens
    assert "read_lines" not in str(spans), "the prompt is in the trace"


async def take_screenshot(url: str, path: Path) -> None:
    """The trace's page, its third step chosen."""

    async def click(expression: str) -> None:
        await browser.wait_for(f"(found => found && (found.click(), true))({expression})")
        await asyncio.sleep(1)

    async with Browser(1500, 1000) as browser:
        await browser.prefer("light")
        await browser.open(url)
        await browser.wait_for("document.body?.innerText.includes('verify_step')", 60)
        await click("[...document.querySelectorAll('span, p')].filter(one => one.innerText === 'verify_step')[2]")
        await click("[...document.querySelectorAll('[role=tab]')].find(one => one.innerText.startsWith('Attributes'))")
        await browser.screenshot(path)


def _attribute(span: dict[str, Any], name: str) -> Any:
    return span["attributes"].get(name)


async def _main(options: argparse.Namespace) -> None:
    completion = await one_request(options.otlp)
    async with httpx.AsyncClient(base_url=options.phoenix, timeout=30, trust_env=False) as client:
        spans = await spans_of(client, completion.request_id)
        check(spans, completion)
        print(f"{len(spans)} spans of request {completion.request_id} in Phoenix, as they should be")
        if options.screenshot:
            [project] = [
                one for one in (await client.get("/v1/projects")).json()["data"] if one["name"] == "default"
            ]  # fmt: skip
            trace_id = spans[0]["context"]["trace_id"]
            await take_screenshot(f"{options.phoenix}/projects/{project['id']}/traces/{trace_id}", options.screenshot)
            print(f"screenshot in {options.screenshot}")


def main() -> None:
    """Run; an assertion that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--otlp", default="http://127.0.0.1:4317", help="Phoenix's OTLP over gRPC (default %(default)s)"
    )
    parser.add_argument("--phoenix", default="http://127.0.0.1:6006", help="Phoenix's HTTP (default %(default)s)")
    parser.add_argument("--screenshot", type=Path, help="where to put a picture of the trace; needs Chromium")
    options = parser.parse_args()
    if options.screenshot and CHROMIUM is None:
        parser.error("--screenshot needs Chromium")
    asyncio.run(_main(options))


if __name__ == "__main__":
    main()
