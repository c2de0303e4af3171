"""Real processes, the bundled pair and small random pairs, and what the target alone would say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.bundled import bundled_model
from outrider.local import LocalCluster, Options
from tests.service_device import DRAFTER_FLAGS, SERVICE_DEVICE, VERIFIER_FLAGS
from tests.tiny_models import save_tiny_llama


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """The bundled pair as `outrider up` runs it, for every test that leaves it as it was. See `services` for more."""
    options = Options(
        target=bundled_model("target"),
        draft=bundled_model("draft"),
        device=SERVICE_DEVICE,
        dtype="float32",
        log_directory=tmp_path_factory.mktemp("logs"),
        drain_seconds=2.0,
        verifier_flags=VERIFIER_FLAGS,
        drafter_flags=DRAFTER_FLAGS,
    )
    async with LocalCluster(options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter of 16 tokens that often disagree, so that every branch of verification is taken."""
    root = tmp_path_factory.mktemp("tiny-pair")
    target = save_tiny_llama(root / "target", vocab_size=16, seed=1, scale=0.6)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.06 * torch.randn_like(parameter))
    model.save_pretrained(root / "draft")
    return target, root / "draft"


@cache
def load_model(path: Path) -> PreTrainedModel:
    """A model in float32, as transformers runs it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.train(False)
    return model


def assert_greedy(path: Path, prompt: Sequence[int], token_ids: Sequence[int], num_tokens: int) -> None:
    """So many tokens, each the one that the model finds most likely behind the prompt and the tokens before it.

    That is what `generate(do_sample=False)` continues the prompt with, end of sequence ignored, said of a continuation
    that is there: one forward pass in place of one a token.
    """
    assert len(token_ids) == num_tokens
    assert list(token_ids) == most_likely(path, tuple(prompt), tuple(token_ids))


@cache
@torch.inference_mode()
def most_likely(path: Path, prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> list[int]:
    """At each place of the continuation."""
    tokens = torch.tensor([[*prompt, *token_ids[:-1]]])
    logits = load_model(path)(tokens, logits_to_keep=len(token_ids)).logits[0]
    choices: list[int] = logits.argmax(dim=-1).tolist()
    return choices
