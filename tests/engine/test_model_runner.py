"""The model runner against transformers' own eager attention: same logits, same greedy tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.batch import Batch, SequenceSlice, build_batch
from engine.model_loader import ModelLoadError
from engine.model_runner import ModelRunner
from tests.engine.small_models import FAMILIES, MAX_LENGTH, VOCAB_SIZE, save_model

NUM_BLOCKS = 60
BLOCK_SIZE = 16


class Sequence:
    """A sequence with blocks in random order, as the scheduler would own it."""

    def __init__(self, free_blocks: list[int], token_ids: list[int], max_length: int = MAX_LENGTH) -> None:
        self.token_ids = token_ids
        self.block_ids = [free_blocks.pop() for _ in range(-(-max_length // BLOCK_SIZE))]

    def slice(self, start: int, end: int, num_logit_rows: int) -> SequenceSlice:
        return SequenceSlice(self.token_ids[start:end], start, self.block_ids, num_logit_rows)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device(request.param)


@pytest.fixture(scope="module", params=list(FAMILIES))
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param))


def eager_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype)
    model.train(False)
    return model


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> PreTrainedModel:
    """The same model with transformers' attention, on the CPU in float32."""
    return eager_model(model_path)


@pytest.fixture(scope="module")
def runner(model_path: Path, device: torch.device) -> ModelRunner:
    return make_runner(model_path, device)


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(FAMILIES["llama"](), tmp_path_factory.mktemp("llama-alone"))


@pytest.fixture
def free_blocks() -> list[int]:
    return random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)


def make_runner(path: Path, device: torch.device) -> ModelRunner:
    return ModelRunner(path, device=device, dtype=torch.float32, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


@torch.inference_mode()
def oracle_logits(oracle: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:  # [len(token_ids), vocab_size]
    logits: torch.Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    logits = logits.cpu()
    torch.testing.assert_close(logits, expected, atol=1e-4 * max(1.0, float(expected.abs().max())), rtol=0.0)
    assert torch.equal(logits.argmax(dim=1), expected.argmax(dim=1))


def test_whole_prompt(runner: ModelRunner, oracle: PreTrainedModel, free_blocks: list[int]) -> None:
    sequence = Sequence(free_blocks, random_tokens(77))
    logits = runner.execute([sequence.slice(0, 77, 77)])
    assert logits.dtype == torch.float32
    assert_same(logits, oracle_logits(oracle, sequence.token_ids))


def test_chunks_then_single_tokens_then_several(
    runner: ModelRunner, oracle: PreTrainedModel, free_blocks: list[int]
) -> None:
    """Chunks end inside blocks; inner chunks give no logits; rows come for the last tokens of a slice only."""
    sequence = Sequence(free_blocks, random_tokens(70))
    expected = oracle_logits(oracle, sequence.token_ids)
    assert runner.execute([sequence.slice(0, 19, 0)]).shape == (0, VOCAB_SIZE)
    assert_same(runner.execute([sequence.slice(19, 50, 2)]), expected[48:50])
    for position in range(50, 56):
        assert_same(runner.execute([sequence.slice(position, position + 1, 1)]), expected[position : position + 1])
    assert_same(runner.execute([sequence.slice(56, 61, 5)]), expected[56:61])
    assert_same(runner.execute([sequence.slice(61, 70, 3)]), expected[67:70])


def test_rejected_tokens_leave_no_trace(runner: ModelRunner, oracle: PreTrainedModel, free_blocks: list[int]) -> None:
    """After a rejection the next slice starts earlier with other tokens."""
    sequence = Sequence(free_blocks, random_tokens(40) + random_tokens(8, seed=1))
    runner.execute([sequence.slice(0, 40, 0)])
    runner.execute([sequence.slice(40, 48, 8)])
    sequence.token_ids[43:] = random_tokens(30, seed=2)
    expected = oracle_logits(oracle, sequence.token_ids)
    assert_same(runner.execute([sequence.slice(43, 48, 5)]), expected[43:48])
    assert_same(runner.execute([sequence.slice(48, 73, 25)]), expected[48:])


def test_mixed_batch(runner: ModelRunner, oracle: PreTrainedModel, free_blocks: list[int]) -> None:
    """A chunk, a single token, a verify step and a prompt in one step, and the rows come in the slices' order."""
    sequences = [Sequence(free_blocks, random_tokens(60, seed), max_length=64) for seed in range(4)]
    runner.execute([sequences[0].slice(0, 10, 0), sequences[1].slice(0, 40, 0), sequences[2].slice(0, 55, 0)])
    logits = runner.execute(
        [
            sequences[2].slice(55, 56, 1),
            sequences[0].slice(10, 43, 0),
            sequences[3].slice(0, 21, 1),
            sequences[1].slice(40, 45, 5),
        ]
    )
    rows = [(2, 55, 56), (3, 20, 21), (1, 40, 45)]
    expected = [oracle_logits(oracle, sequences[index].token_ids)[start:end] for index, start, end in rows]
    assert_same(logits, torch.cat(expected))


def test_greedy_generation_equals_generate(
    runner: ModelRunner, oracle: PreTrainedModel, free_blocks: list[int]
) -> None:
    prompts = [random_tokens(length, seed=length) for length in (3, 16, 37)]
    sequences = [Sequence(free_blocks, list(prompt)) for prompt in prompts]
    num_new = 40
    logits = runner.execute([sequence.slice(0, len(sequence.token_ids), 1) for sequence in sequences])
    for _ in range(num_new):
        for sequence, token_id in zip(sequences, logits.argmax(dim=1).tolist(), strict=True):
            sequence.token_ids.append(token_id)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        logits = runner.execute(
            [sequence.slice(length - 1, length, 1) for sequence, length in zip(sequences, lengths, strict=True)]
        )
    for prompt, sequence in zip(prompts, sequences, strict=True):
        generated = oracle.generate(  # type: ignore[operator]  # every causal language model has it
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
        )
        assert sequence.token_ids == generated[0].tolist()
        assert len(set(sequence.token_ids[len(prompt) :])) > 5, "a model that repeats itself proves nothing"


def test_slots_that_the_sequence_has_not_written_are_never_read(
    llama_path: Path, device: torch.device, free_blocks: list[int]
) -> None:
    runner = make_runner(llama_path, device)
    sequence = Sequence(free_blocks, random_tokens(50))

    def run() -> torch.Tensor:
        runner.execute([sequence.slice(0, 20, 0)])
        return runner.execute([sequence.slice(20, 50, 30)])

    clean = run()
    assert not bool(clean.isnan().any())
    for cache in (*runner._cache.keys, *runner._cache.values):
        cache.fill_(float("nan"))
    assert torch.equal(run(), clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(
    llama_path: Path, device: torch.device, dtype: torch.dtype, free_blocks: list[int]
) -> None:
    """No further from float32 than transformers' own attention in the same precision."""
    runner = ModelRunner(llama_path, device=device, dtype=dtype, num_blocks=NUM_BLOCKS)
    sequence = Sequence(free_blocks, random_tokens(50))
    logits = runner.execute([sequence.slice(0, 50, 50)])
    assert logits.dtype == dtype
    exact, rounded = (
        oracle_logits(
            eager_model(llama_path, precision),
            sequence.token_ids,
        )
        for precision in (torch.float32, dtype)
    )
    error = (logits.cpu().float() - exact).abs().mean()
    assert float(error) < 1.3 * float((rounded.float() - exact).abs().mean())


def test_model_without_logits_to_keep(
    llama_path: Path, device: torch.device, free_blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(llama_path, device)
    sequence = Sequence(free_blocks, random_tokens(30))
    slices = [sequence.slice(0, 12, 2), sequence.slice(12, 30, 3)]
    expected = [runner.execute([part]) for part in slices]
    monkeypatch.setattr(runner, "_keeps_chosen_logits", False)
    actual = [runner.execute([part]) for part in slices]
    torch.testing.assert_close(torch.cat(actual), torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_padding_to_a_fixed_shape_changes_nothing(
    llama_path: Path, device: torch.device, free_blocks: list[int]
) -> None:
    """What a captured step needs: tokens that are stored nowhere, sequences of no length."""
    runner = make_runner(llama_path, device)
    sequences = [Sequence(free_blocks, random_tokens(30, seed), max_length=48) for seed in range(2)]
    for sequence in sequences:
        runner.execute([sequence.slice(0, 25, 0)])
    slices = [sequences[0].slice(25, 30, 5), sequences[1].slice(25, 27, 2)]
    expected = runner.execute(slices)
    caches = [cache.clone() for cache in (*runner._cache.keys, *runner._cache.values)]

    batch = build_batch(slices, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, device=device)

    def padded(tensor: torch.Tensor, length: int, value: int) -> torch.Tensor:
        padding = tensor.new_full((length - tensor.shape[0], *tensor.shape[1:]), value)
        return torch.cat([tensor, padding])

    logits = runner.forward(
        Batch(
            token_ids=padded(batch.token_ids, 20, 0),
            positions=padded(batch.positions, 20, 0),
            slot_mapping=padded(batch.slot_mapping, 20, -1),
            logit_rows=torch.arange(20, device=device),
            cu_query_lens=padded(batch.cu_query_lens, 5, 7),
            context_lens=padded(batch.context_lens, 4, 0),
            block_tables=padded(batch.block_tables, 4, 0),
            max_query_len=5,
        )
    )
    torch.testing.assert_close(logits[:7], expected, atol=1e-4, rtol=1e-4)
    for cache, before in zip((*runner._cache.keys, *runner._cache.values), caches, strict=True):
        torch.testing.assert_close(cache, before, atol=1e-5, rtol=1e-5)


def test_facts_about_the_model(llama_path: Path, device: torch.device) -> None:
    runner = make_runner(llama_path, device)
    assert (runner.vocab_size, runner.max_length, runner.eos_token_ids) == (VOCAB_SIZE, MAX_LENGTH, ())
    assert (runner.num_blocks, runner.block_size) == (NUM_BLOCKS, BLOCK_SIZE)
    runner.warm_up()


def test_length_is_limited_by_setting_and_by_cache(llama_path: Path, device: torch.device) -> None:
    short = ModelRunner(llama_path, device=device, dtype=torch.float32, num_blocks=60, max_length=100)
    assert short.max_length == 100
    small = ModelRunner(llama_path, device=device, dtype=torch.float32, num_blocks=3)
    assert small.max_length == 48
    small.warm_up()


def test_cache_size_follows_the_budget(llama_path: Path) -> None:
    # 4 layers, keys and values, 2 kv heads of 16 in float32: 1,024 bytes a token.
    cpu = torch.device("cpu")
    runner = ModelRunner(llama_path, device=cpu, dtype=torch.float32, cpu_cache_bytes=100_000)
    assert runner.num_blocks == 100_000 // (1024 * 16)
    with pytest.raises(MemoryError, match="16,384 bytes and 16,383 are left"):
        ModelRunner(llama_path, device=cpu, dtype=torch.float32, cpu_cache_bytes=16_383)


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        ([], "at least one slice"),
        ([SequenceSlice([], 0, [1], 0)], "slice 0 has no tokens"),
        ([SequenceSlice([1], 0, [1], 1), SequenceSlice([1] * 17, 0, [2], 1)], "slice 1 .* do not cover"),
        ([SequenceSlice([1], 0, [NUM_BLOCKS], 1)], "names a block outside"),
        ([SequenceSlice([1], 0, [-1], 1)], "names a block outside"),
        ([SequenceSlice([1, 2], 0, [0], 3)], "wants 3 rows of logits of 2 tokens"),
        ([SequenceSlice([1], -1, [0], 1)], "position -1"),
        ([SequenceSlice([VOCAB_SIZE], 0, [0], 1)], "token id outside 0..98"),
        ([SequenceSlice([-1], 0, [0], 1)], "token id outside 0..98"),
        ([SequenceSlice([1], MAX_LENGTH, range(11), 1)], f"max_length is {MAX_LENGTH}"),
        ([SequenceSlice([1] * 100, 0, range(7), 1)] * 21, "exceeds max_num_batched_tokens=2048"),
    ],
)
def test_bad_slices_are_refused(
    llama_path: Path, device: torch.device, slices: list[SequenceSlice], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        make_runner(llama_path, device).execute(slices)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"block_size": 24}, "block_size must be a power of two"),
        ({"block_size": 8}, "block_size must be a power of two"),
        ({"dtype": torch.float64}, "dtype must be one of"),
        ({"num_blocks": 0}, "at least one block"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be positive"),
    ],
)
def test_bad_settings_are_refused(llama_path: Path, options: dict[str, object], problem: str) -> None:
    settings = {"device": torch.device("cpu"), "dtype": torch.float32, "num_blocks": 4} | options
    with pytest.raises(ValueError, match=problem):
        ModelRunner(llama_path, **settings)  # type: ignore[arg-type]


def test_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        make_runner(tmp_path, torch.device("cpu"))
