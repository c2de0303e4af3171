"""A real Prometheus that scrapes services of a test."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

SCRAPE_SECONDS = 1


class Prometheus:
    """Asks a server's HTTP interface."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._began = time.time()

    async def series(self, expression: str) -> list[dict[str, Any]]:
        """The series of a query with numbers in them, each second since the server was started."""
        result = await self._get(
            "query_range", query=expression, start=f"{self._began:.3f}", end=f"{time.time():.3f}", step="1"
        )
        return [s for s in result["result"] if any(not math.isnan(float(value)) for _, value in s["values"])]

    async def targets_up(self) -> int:
        """How many services were scraped."""
        result = await self._get("query", query="sum(up)")
        return int(result["result"][0]["value"][1]) if result["result"] else 0

    async def alerts(self) -> list[str]:
        """Names of the alerts that fire or are about to."""
        result = await self._get("alerts")
        return [alert["labels"]["alertname"] for alert in result["alerts"]]

    async def rule_errors(self) -> dict[str, str]:
        """What went wrong with rules, by name."""
        result = await self._get("rules")
        rules = [rule for group in result["groups"] for rule in group["rules"]]
        assert rules, "no rules are loaded"
        return {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")}

    async def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        response = await self._client.get(f"/api/v1/{path}", params=parameters)
        body: dict[str, Any] = response.json()
        assert body["status"] == "success", f"{parameters}: {body}"
        data: dict[str, Any] = body["data"]
        return data


@asynccontextmanager
async def running_prometheus(
    directory: Path, address: str, targets: Mapping[str, str], rules: Mapping[str, Any]
) -> AsyncIterator[Prometheus]:
    """A server on host:port, with each target under its job's name, once it has scraped all of them."""
    (directory / "rules.yaml").write_text(yaml.safe_dump(dict(rules)))
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
        ],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    with (directory / "prometheus.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            "--config.file=prometheus.yaml",
            "--storage.tsdb.path=data",
            f"--web.listen-address={address}",
            cwd=directory,
            stdout=log,
            stderr=log,
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=20) as client:
                server = Prometheus(client)
                await _until_up(server, len(targets))
                yield server
        finally:
            process.kill()
            await process.wait()


async def _until_up(server: Prometheus, num_targets: int) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if await server.targets_up() == num_targets:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
