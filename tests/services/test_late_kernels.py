"""Warming up compiles every kernel that drafting and verifying can ask for."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from drafter_service.executor import DraftExecutor
from engine.model_runner import ModelRunner
from kernels.dispatch import interpreted_kernels
from tests.compiling import report_of
from tests.services.conftest import Pair
from tests.services.drafted_trees import OPTIONS
from tests.services.harness import (
    decode_client,
    drafter_settings,
    running_drafter,
    running_verifier,
    verifier_settings,
)
from tests.services.reference import prompts
from verifier_service.executor import TargetExecutor


@pytest.fixture(scope="module")
def late_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """What a program finds, of services that warm up and of others: by service, the kernels asked for late."""
    found: dict[str, dict[str, list[str]]] = report_of(
        "tests.services.late_kernels", cache=tmp_path_factory.mktemp("cache")
    )
    return found


def test_no_request_waits_for_a_compiler(late_kernels: dict[str, dict[str, list[str]]]) -> None:
    """Catches a kernel's variant that warming up leaves out: all sequences wait for it, and may lose their drafter."""
    assert late_kernels["warm"] == {"drafter": [], "verifier": []}


def test_kernels_that_are_compiled_late_are_found(late_kernels: dict[str, dict[str, list[str]]]) -> None:
    found = late_kernels["cold"]
    assert "_split_attention_kernel" in found["drafter"]
    assert {"_penalties_kernel", "_last_draw_kernel"} <= set(found["verifier"])


def test_warming_up_runs_in_the_interpreter(pair: Pair) -> None:
    """Catches a warm-up that a GPU would end at, and batches that break the runner's limits."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton interprets only where there is no GPU")
    path, _ = pair
    runner = ModelRunner(
        path,
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_blocks=12,
        max_num_batched_tokens=64,
        max_length=65,
        num_reserved_slots=2 * OPTIONS.max_expansions,
    )
    target = TargetExecutor(runner, max_rows=2, max_draft_tokens=2, num_candidates=8)
    target.use_graphs(None)
    options = replace(OPTIONS, max_rows=2, max_draft_tokens=2, num_candidates=8)
    drafter = DraftExecutor(runner, num_slots=2, options=options)
    with interpreted_kernels():
        # As far as the batches and what is checked of them: the interpreter would take minutes to compute them all.
        with mock.patch.object(runner, "forward") as forward:
            runner.warm_up()
        drafter.warm_up()
        target.warm_up()
    batches = [call.args[0] for call in forward.call_args_list]
    # Contexts in one part and in several, up to the model's last position.
    assert {1, 16, 48, 65} <= {int(batch.context_lens.max()) for batch in batches}
    assert {(1, 1), (64, 64)} <= {(batch.max_query_len, batch.num_tokens) for batch in batches}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
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
