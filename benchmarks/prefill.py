"""Random sequences in a runner's cache, for timing what comes behind them."""

from __future__ import annotations

import random

from engine.batch import SequenceSlice
from engine.model_runner import ModelRunner


def prefill(runner: ModelRunner, batch_size: int, context: int) -> list[list[int]]:
    """Fill the cache with random sequences, the batch's n-th in the n-th run of blocks; each sequence's block ids."""
    numbers = random.Random(3)
    num_blocks = -(-(context + 64) // runner.block_size)
    sequences = [list(range(index * num_blocks, (index + 1) * num_blocks)) for index in range(batch_size)]
    at_once = max(1, runner.max_num_batched_tokens // context)
    for first in range(0, batch_size, at_once):
        runner.execute(
            [
                SequenceSlice([numbers.randrange(runner.vocab_size) for _ in range(context)], 0, block_ids, 1)
                for block_ids in sequences[first : first + at_once]
            ]
        )
    return sequences


def next_tokens(block_ids: list[int], context: int, num_positions: int, vocab_size: int) -> SequenceSlice:
    """Random tokens behind such a sequence's context, with logits for all of them."""
    numbers = random.Random(block_ids[0])
    token_ids = [numbers.randrange(vocab_size) for _ in range(num_positions)]
    return SequenceSlice(token_ids, context, block_ids, num_positions)
