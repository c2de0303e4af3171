"""Log-probabilities against log_softmax by its definition."""

from __future__ import annotations

import pytest
import torch

from kernels.logprobs import token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(device: torch.device, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(7, 111, generator=torch.Generator().manual_seed(0))).to(dtype)
    chosen = torch.arange(7, dtype=torch.int32)
    output = token_logprobs(logits.to(device), chosen.to(device), 5)
    expected = logits.double() - logits.double().logsumexp(dim=1, keepdim=True)
    torch.testing.assert_close(
        output.chosen.cpu().double(), expected[torch.arange(7), torch.arange(7)], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(output.top_logprobs.cpu().double(), expected.topk(5, dim=1).values, atol=1e-5, rtol=0)
    at_top = expected.gather(1, output.top_token_ids.cpu().long())
    torch.testing.assert_close(output.top_logprobs.cpu().double(), at_top, atol=1e-5, rtol=0)


def test_top_n_ends_at_the_vocabulary() -> None:
    logits = torch.randn(2, 4)
    assert token_logprobs(logits, torch.tensor([0, 3]), 20).top_token_ids.shape == (2, 4)
    assert token_logprobs(logits, torch.tensor([0, 3]), 0).top_token_ids.shape == (2, 0)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        token_logprobs(torch.zeros(2, 4), torch.tensor([0]), 1)
    with pytest.raises(ValueError, match="top_n"):
        token_logprobs(torch.zeros(2, 4), torch.tensor([0, 1]), -1)
