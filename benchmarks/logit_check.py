"""Whether the project's runner computes what transformers computes, before anything of it is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.pair_weights import load_reference
from benchmarks.records import RefusalError
from benchmarks.shapes import ModelShape
from benchmarks.timing import free_memory
from engine.batch import SequenceSlice
from engine.model_runner import ModelRunner

# An odd number of sequences, so that batches padded to a bucket are among those checked.
_PROMPT_LENGTHS = (37, 64, 1, 16, 90)
_NUM_STEPS = 2
# What is allowed beyond twice the error of transformers' own arithmetic in the same number format.
_SLACK = 1e-4


@dataclass(frozen=True)
class ReferenceLogits:
    """transformers' eager logits of a few sequences, in the model's number format and in float32."""

    token_ids: Sequence[Sequence[int]]
    logits: Sequence[torch.Tensor]  # a sequence each, [num_tokens, vocab_size]
    exact_logits: Sequence[torch.Tensor]  # the same from float32 weights and arithmetic


@dataclass(frozen=True)
class LogitError:
    """Errors against float32, as norm of the difference over norm."""

    runner: float
    transformers: float
    same_argmax: float  # share of positions where runner and float32 have the same most likely token


def reference_logits(
    directory: Path, shape: ModelShape, device: torch.device, *, num_positions: int
) -> ReferenceLogits:
    """Compute the reference; the models that it takes are gone from the device afterwards."""
    generator = torch.Generator().manual_seed(7)
    token_ids = [
        torch.randint(shape.vocab_size, (length + _NUM_STEPS * num_positions,), generator=generator).tolist()
        for length in _PROMPT_LENGTHS
    ]
    model = load_reference(directory, shape, device, attention="eager")
    logits = [_forward(model, ids, device) for ids in token_ids]
    model = model.float()
    exact = [_forward(model, ids, device) for ids in token_ids]
    del model
    free_memory(device)
    return ReferenceLogits(token_ids, logits, exact)


def check_logits(runner: ModelRunner, reference: ReferenceLogits, *, num_positions: int) -> LogitError:
    """Compute the reference's sequences in the ways that serving does: a prompt, then steps of several positions.

    Raises RefusalError when the runner is further from float32 than transformers' arithmetic explains.
    """
    num_sequences = len(reference.token_ids)
    num_blocks = -(-max(map(len, reference.token_ids)) // runner.block_size)
    # Not in order, so that a block table that is ignored shows.
    blocks = list(range(num_sequences * num_blocks))[::-1]
    block_ids = [blocks[index::num_sequences] for index in range(num_sequences)]
    parts: list[list[torch.Tensor]] = [[] for _ in reference.token_ids]
    starts = [0 for _ in reference.token_ids]
    for step in range(_NUM_STEPS + 1):
        lengths = _PROMPT_LENGTHS if step == 0 else (num_positions,) * len(_PROMPT_LENGTHS)
        slices = [
            SequenceSlice(ids[start : start + length], start, own_blocks, length)
            for ids, start, length, own_blocks in zip(reference.token_ids, starts, lengths, block_ids, strict=True)
        ]
        computed = torch.split(runner.execute(slices).float(), list(lengths))
        for index, rows in enumerate(computed):
            parts[index].append(rows.clone())
            starts[index] += lengths[index]
    ours = torch.cat([torch.cat(rows) for rows in parts])
    exact = torch.cat(list(reference.exact_logits))
    error = LogitError(
        runner=_relative(ours, exact),
        transformers=_relative(torch.cat(list(reference.logits)), exact),
        same_argmax=float((ours.argmax(1) == exact.argmax(1)).float().mean()),
    )
    # Written so that NaN fails.
    if not error.runner <= 2 * error.transformers + _SLACK:
        raise RefusalError(
            f"the runner's logits are off by {error.runner:.2e}, those of transformers in the same number format by "
            f"{error.transformers:.2e}"
        )
    return error


@torch.inference_mode()
def _forward(model: torch.nn.Module, token_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    ids = torch.tensor([token_ids], device=device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
