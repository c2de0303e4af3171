"""Warming up compiles every kernel that drafting and verifying can ask for."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from drafter_service.model_drafter import ModelDrafter
from engine.model_runner import ModelRunner
from kernels.dispatch import interpreted_kernels
from tests.services.conftest import Pair
from tests.services.harness import (
    decode_client,
    drafter_settings,
    running_drafter,
    running_verifier,
    verifier_settings,
)
from tests.services.reference import prompts
from verifier_service.decode_graph import DecodeGraphs
from verifier_service.target import Target
from verifier_service.verify import warm_up

ROOT = Path(__file__).parents[2]


def late_kernels(*arguments: str) -> dict[str, list[str]]:
    """By service, the kernels that were not compiled when the service was ready."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tests.services.late_kernels", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_no_request_waits_for_a_compiler() -> None:
    """Catches a kernel's variant that warming up leaves out: all sequences wait for it, and may lose their drafter."""
    assert late_kernels() == {"drafter": [], "verifier": []}


def test_kernels_that_are_compiled_late_are_found() -> None:
    found = late_kernels("--cold")
    assert {"_penalties_kernel", "_split_attention_kernel", "_merge_splits_kernel"} <= set(found["drafter"])
    assert {"_penalties_kernel", "_emit_kernel"} <= set(found["verifier"])


def test_warming_up_runs_in_the_interpreter(pair: Pair) -> None:
    """Catches a warm-up that a GPU would end at: nothing else runs all of it without one."""
    path, _ = pair
    runner = ModelRunner(
        path, device=torch.device("cpu"), dtype=torch.float32, num_blocks=12, max_num_batched_tokens=64
    )
    target = Target(lambda: runner)
    drafter = ModelDrafter(
        lambda: runner, name="", revision="", tokenizer_fingerprint="", max_num_batched_tokens=64, num_candidates=8
    )
    with mock.patch.object(ModelRunner, "warm_up"):
        target.load()
    target.graphs = DecodeGraphs(runner, max_sequences=2, max_draft_tokens=2, num_candidates=8)
    with interpreted_kernels(), mock.patch.object(runner, "_warm_up_with") as warm_up_with:
        runner.warm_up()
        drafter.load()
        warm_up(target)
    # Sequences in one part and in several, with one query each and with as many as a program has rows for.
    batches = {call.args for call in warm_up_with.call_args_list}
    assert {(1, 1, 1), (1, 1, 16), (1, 1, 32), (1, 16, 32), (1, 64, 64)} <= batches
    assert all(
        num_sequences * query_len <= 64 and query_len <= context for num_sequences, query_len, context in batches
    )


@pytest.mark.gpu
async def test_requests_on_a_gpu_compile_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """What the program says of an imagined GPU, seen on a real one."""
    target, draft = pair
    kinds: tuple[dict[str, Any], ...] = (
        {"sampling": {"temperature": 0.0}},
        {"sampling": {"temperature": 1.0}},
        {"sampling": {"temperature": 1.0, "top_p": 0.9}},
        {"sampling": {"temperature": 1.0, "top_k": 5, "presence_penalty": 0.5}},
        {"sampling": {"temperature": 0.0, "frequency_penalty": 0.5}},
        {"sampling": {"temperature": 1.0}, "logprobs": 2, "max_draft_tokens": 2},
    )
    async with (
        running_drafter(drafter_settings(model=draft, device="cuda", max_num_batched_tokens=128)) as drafter,
        running_verifier(verifier_settings(target, device="cuda", max_num_batched_tokens=128)) as (verifier, _),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        caplog.clear()
        for batch_size in (1, 3, 12, 40):
            found = await asyncio.gather(
                *(
                    client.decode(
                        prompt, drafter=drafter.address, max_tokens=24, seed=index, **kinds[index % len(kinds)]
                    )
                    for index, prompt in enumerate(prompts(batch_size, step=5))
                )
            )
            assert sum(result.num_accepted for result in found) > 0
    late = [record.getMessage() for record in caplog.records if record.name == "engine.late_compilation"]
    assert late == []
    assert logging.getLogger("engine.late_compilation").isEnabledFor(logging.WARNING)
