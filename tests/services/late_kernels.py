"""Which kernels drafter and verifier need that warming up has not compiled, without a GPU and without compiling any.

Prints as JSON, by service, the kernels that were asked for late: of services that warm up, and of others that leave
parts of it out, to see that they are missed. Triton is told of a GPU and kept from compiling; what it would launch is
noted and left out, so that every kernel's result is zeros. A program of its own, because Triton either interprets or
compiles in one process.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import kernels.paged_attention_split_triton
import kernels.paged_attention_triton
import kernels.rms_norm_triton
import kernels.rotary_triton
import kernels.silu_mul_triton
from drafter_service.executor import DraftExecutor, TreeOptions
from drafter_service.model_drafter import ModelDrafter
from engine.block_manager import BlockManager, BlockTable
from engine.draft_tokens import DraftRows, DraftTokens
from engine.model_runner import ModelRunner
from engine.sampling_tensors import new_history
from engine.slots import Slot, SlotPool
from engine.step import Row, Wanted
from kernels.dispatch import interpreted_kernels
from outrider.protocol.fingerprint import TokenizerDigest
from outrider.protocol.sampling_parameters import SamplingParameters
from tests.services.draft_sequences import AHEAD, LIMITS, begin, commit, draft_sequence
from verifier_service.executor import TargetExecutor

VOCABULARY = 8192
K = 4
CANDIDATES = 128
BATCH_SIZES = (1, 2, 3, 5, 8, 16, 40, 64)
# Of prompts: in the first half of the batches, and in the second.
SHORT = (3, 5, 9, 12)
MIXED = (1, 2, 5, 12, 30, 128, 128, 400, 700)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 50},
    "penalty": {"frequency_penalty": 0.3},
    "penalty and min-p": {"presence_penalty": 0.3, "min_p": 0.1},
}


class Gpu:
    """As much of Triton's driver as a launch asks before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Launches:
    """The kernels asked for, each in the types and constants that it would be compiled for."""

    def __init__(self) -> None:
        self.has_warmed_up = False
        self.late: dict[str, str] = {}  # the kernel by all that it depends on
        self._known: set[str] = set()

    def note(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Triton's hook in front of a compilation; true keeps it from compiling and launching."""
        variant = f"{fn.name} {key}"
        if self.has_warmed_up and variant not in self._known:
            self.late[variant] = fn.name
        self._known.add(variant)
        return True


class Pool:
    """In place of a pool of CUDA graphs: runs what would be captured."""

    def capture(self, work: Callable[[], None]) -> Any:
        work()
        return mock.Mock(replay=work)


@contextmanager
def results_of_zeros() -> Iterator[None]:
    """Memory comes zeroed, as no kernel writes it: what happened to be there would be no token ids.

    Products are not computed either: in these sizes and types they take a CPU most of a minute.
    """

    def zeroed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments, **options: function(*arguments, **options).zero_()

    def product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return inputs.new_zeros(*inputs.shape[:-1], len(weight))

    with (
        mock.patch.object(torch, "empty", zeroed(torch.empty)),
        mock.patch.object(torch, "empty_like", zeroed(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", zeroed(torch.Tensor.new_empty)),
        mock.patch.object(torch.nn.functional, "linear", product),
        mock.patch.object(torch.Tensor, "addmm_", lambda self, *_: self),
    ):
        yield


def make_runner(path: Path, num_kv_heads: int) -> ModelRunner:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4 * num_kv_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)  # type: ignore[arg-type]  # declared without `self`
    return ModelRunner(
        path,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        num_blocks=4000,
        max_num_batched_tokens=512,
        is_fused=True,
    )


def draft(runner: ModelRunner, launches: Launches, rng: np.random.Generator) -> None:
    """Load a drafter and let it draft for all kinds of batches, prompts and what follows."""

    options = TreeOptions(
        max_rows=16,
        max_nodes=32,
        num_passes=1,
        max_draft_tokens=K,
        num_children=4,
        max_expansions=64,
        min_probability=0.0,
        num_candidates=CANDIDATES,
    )
    drafter = ModelDrafter(
        lambda: runner,
        lambda runner: DraftExecutor(runner, num_slots=64, options=options),
        name="draft",
        revision="",
        tokenizer=TokenizerDigest(),
        max_num_batched_tokens=runner.max_num_batched_tokens,
        num_slots=64,
        takes_turns=False,
        has_graphs=False,
    )
    drafter.load()
    drafter._executor.capture(Pool())  # type: ignore[arg-type]
    launches.has_warmed_up = True
    for number, num_sequences in enumerate(BATCH_SIZES * 2):
        sampling = list(KINDS.values())[number % len(KINDS)]
        lengths = SHORT if number < len(BATCH_SIZES) else MIXED
        sequences = [
            draft_sequence(
                rng.integers(0, VOCABULARY, 1 + int(rng.choice(lengths))).tolist(),
                sequence_id=index,
                num_prompt_tokens=1,
                sampling=SamplingParameters(**(sampling if index % 3 else {})),
                max_draft_tokens=K,
                limits=LIMITS if number % 2 else AHEAD,
            )
            for index in range(num_sequences)
        ]
        for sequence in sequences:
            begin(drafter, sequence)
        for _ in range(6):
            drafts = drafter.draft()
            assert not drafts.refusals
            for sequence in sequences:
                if rng.random() < 0.5:
                    commit(drafter, sequence, rng.integers(0, VOCABULARY, int(rng.integers(1, K + 2))).tolist())
        for sequence in sequences:
            drafter.release(sequence)
        while drafter.has_work:
            drafter.draft()


def verify(runner: ModelRunner, launches: Launches, rng: np.random.Generator, *, is_cold: bool) -> None:
    """Warm a target up and let it verify all kinds of batches."""
    runner.warm_up()
    executor = TargetExecutor(runner, max_rows=64, max_draft_tokens=K, num_candidates=CANDIDATES)
    executor.use_graphs(Pool())  # type: ignore[arg-type]
    if not is_cold:
        executor.warm_up()
    launches.has_warmed_up = True
    blocks, pool = BlockManager(runner.num_blocks, runner.block_size), SlotPool(64)
    for number, num_sequences in enumerate(BATCH_SIZES * 2):
        sampling = list(KINDS.values())[number % len(KINDS)]
        lengths = SHORT if number < len(BATCH_SIZES) else MIXED
        rows, num_tokens = [], 0
        for index in range(num_sequences):
            length, num_logprobs = int(rng.choice(lengths)), 2 if number % 5 == 0 else None
            row = random_row(rng, length, SamplingParameters(**(sampling if index % 3 else {})), pool.take())
            row.num_logprobs = num_logprobs if row.wanted is Wanted.TOKENS else None
            assert blocks.grow(row.blocks, length + K)
            if num_tokens + len(row.token_ids) + len(row.drafts) <= runner.max_num_batched_tokens:
                rows.append(row)
                num_tokens += len(row.token_ids) + len(row.drafts)
            else:
                blocks.free(row.blocks)
                pool.give_back(row.slot)
        for part in executor.submit(rows):
            part.collect()
        for row in rows:
            blocks.free(row.blocks)
            pool.give_back(row.slot)


def random_row(rng: np.random.Generator, length: int, sampling: SamplingParameters, slot: Slot) -> Row:
    """A prompt, the end or an inner chunk of one, or a sequence that decodes, some of them with draft tokens."""
    token_ids = [0] * length
    start = int(rng.choice([0, length // 2, max(length - 7, 0), length - 1]))
    row = Row(slot, sampling, BlockTable(), start, token_ids[start:])
    num_missing = length - start
    if num_missing > 1 and rng.random() < 0.3:
        row.token_ids, row.wanted = token_ids[start : start + num_missing // 2], Wanted.NOTHING
        return row
    row.history = new_history(sampling, token_ids, length)
    num_drafts = int(rng.integers(0, K + 1))
    if num_drafts:
        width = int(rng.choice([0, 64, CANDIDATES]))
        ids = np.tile(np.arange(width, dtype=np.int32), (num_drafts, 1))
        candidates = DraftRows(np.zeros(num_drafts, np.int32), ids, np.full(ids.shape, 512, np.uint16))
        row.drafts = DraftTokens.of([0] * num_drafts, candidates)
    return row


def late_kernels(*, is_cold: bool) -> dict[str, list[str]]:
    """By service, what was asked for late; `is_cold`: of services that leave most of their warm-up out."""
    found: dict[str, list[str]] = {"drafter": [], "verifier": []}
    rng = np.random.default_rng(0)
    for num_kv_heads in (8,) if is_cold else (8, 2):
        for service in found:
            launches = Launches()
            knobs.runtime.jit_cache_hook = launches.note
            with tempfile.TemporaryDirectory() as directory:
                runner = make_runner(Path(directory), num_kv_heads)
            with interpreted_kernels(), results_of_zeros():
                if service == "drafter":
                    draft(runner, launches, rng)
                else:
                    verify(runner, launches, rng, is_cold=is_cold)
            found[service] += sorted(launches.late.values())
    return found


def main() -> None:
    driver.set_active(Gpu())
    for module in (
        kernels.paged_attention_split_triton,
        kernels.paged_attention_triton,
        kernels.rms_norm_triton,
        kernels.rotary_triton,
        kernels.silu_mul_triton,
    ):
        if hasattr(module, "has_dependent_launch"):
            module.has_dependent_launch = lambda device: True  # type: ignore[attr-defined]
    found = {"warm": late_kernels(is_cold=False)}
    ModelRunner._attention_batches = lambda self, query_len: set()  # type: ignore[method-assign]
    DraftExecutor.warm_up = lambda self: None  # type: ignore[method-assign]
    found["cold"] = late_kernels(is_cold=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
