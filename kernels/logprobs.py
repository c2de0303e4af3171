"""Log-probabilities of tokens in the target's own distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.arguments import check_logits, check_tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities before penalties, temperature and filters."""

    chosen: torch.Tensor  # [n] float32
    top_token_ids: torch.Tensor  # [n, top_n] int32, most likely first
    top_logprobs: torch.Tensor  # [n, top_n] float32


def token_logprobs(
    target_logits: torch.Tensor,  # [n, vocab_size] float32, bfloat16 or float16
    token_ids: torch.Tensor,  # [n] int32 or int64, inside the vocabulary
    top_n: int,
) -> TokenLogprobs:
    """Log-probabilities of the chosen tokens and of the top_n most likely ones (fewer if the vocabulary is smaller).

    One row a token: index the rows first, the whole is copied to float32. Raises ValueError, naming the argument, when
    shapes or types do not fit.
    """
    check_logits("target_logits", target_logits)
    check_tensor("token_ids", token_ids, (len(target_logits),), (torch.int32, torch.int64), target_logits.device)
    if top_n < 0:
        raise ValueError(f"top_n is {top_n}, expected at least 0")
    logprobs = target_logits.float().log_softmax(dim=1)
    top = logprobs.topk(min(top_n, logprobs.shape[1]), dim=1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
    return TokenLogprobs(chosen, top.indices.int(), top.values)
