"""Greedy decoding through verifier and drafter equals the target model alone, token for token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.v1 import common_pb2
from tests.services.harness import decode_client, drafter_settings, running_drafter, running_verifier, verifier_settings
from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model that agrees with it now and then: the target's own weights, disturbed."""
    root = tmp_path_factory.mktemp("pair")
    target = save_tiny_llama(root / "target", num_layers=2, seed=1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    model.save_pretrained(root / "draft")
    return target, root / "draft"


def greedy(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    return output[0, len(prompt) :].tolist()


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 64, (3 + 7 * i,), generator=generator).tolist() for i in range(count)]


async def test_speculation_changes_nothing(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    async with (
        running_drafter(drafter_settings(model=draft)) as drafter,
        running_verifier(verifier_settings(target)) as (verifier, service),
        decode_client(verifier.address) as client,
    ):
        await client.use_drafters(drafter.address)
        results = await asyncio.gather(
            *(client.decode(prompt, drafter=drafter.address, max_tokens=40) for prompt in prompts(8))
        )
        for prompt, result in zip(prompts(8), results, strict=True):
            assert result.token_ids == greedy(target, prompt, 40)
            assert result.reasons == []
        origins = {origin for result in results for origin in result.origins}
        # Without rejections and full acceptances the comparison would prove nothing.
        assert common_pb2.TOKEN_ORIGIN_RECOVERED in origins
        assert common_pb2.TOKEN_ORIGIN_BONUS in origins
        print([(r.num_steps, r.num_drafted, r.num_accepted) for r in results])
        load = service._engine.load_report()
        assert load.num_free_kv_blocks == load.num_kv_blocks
