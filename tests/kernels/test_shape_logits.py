"""Thresholds and penalties: against their definitions, against transformers, and Triton against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.penalties import PenalizedSequence, Penalties, TokenHistory
from kernels.shape_logits import PenalizedLogits, apply_penalties, logit_thresholds
from tests.kernels.conftest import TritonDevice
from tests.kernels.sampling_cases import moved, shaped_probabilities

FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.7},
    {"top_k": 12, "top_p": 0.95, "min_p": 0.02},
    {"top_k": 10**6, "top_p": 1.0, "min_p": 0.0},
]


def thresholds_of(logits: torch.Tensor, temperature: float, filters: dict[str, Any]) -> torch.Tensor:
    """One threshold a row, all rows with the same parameters."""
    n, device = len(logits), logits.device
    types = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    given = {
        name: torch.full((n,), filters[name], dtype=dtype, device=device) if name in filters else None
        for name, dtype in types.items()
    }
    thresholds = logit_thresholds(logits, torch.full((n,), temperature, device=device), **given)
    assert thresholds is not None
    return thresholds


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [16, 111, 1000, 5000])
def test_keeps_what_the_definition_keeps(device: torch.device, vocab_size: int, filters: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # Narrow rows are sorted whole, peaked ones are pruned first.
    logits = torch.cat([scale * torch.randn(5, vocab_size, generator=generator) for scale in (0.1, 1.0, 6.0)])
    for temperature in (0.6, 1.0, 2.0):
        thresholds = thresholds_of(logits.to(device), temperature, filters).cpu()
        expected = shaped_probabilities(logits.numpy(), temperature, **filters) > 0
        differences = ((logits >= thresholds.unsqueeze(1)).numpy() != expected).sum(axis=1)
        # In a flat row float32 and float64 may disagree about the one token at the edge.
        assert differences.max() <= 1
        assert (differences > 0).mean() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [63, 1000])
def test_triton_equals_reference(triton_device: TritonDevice, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(5, vocab_size, generator=generator)).to(dtype)
    logits[1, ::3] = -torch.inf
    logits[2, 5] = torch.nan
    logits[3] = -logits[3].abs()
    logits[4, 7] = torch.inf
    temperature = torch.tensor([0.0, 0.7, 1.0])
    parameters = (
        temperature,
        torch.tensor([3, 20, 0], dtype=torch.int32),
        torch.tensor([0.5, 0.8, 0.9]),
        torch.tensor([0.1, 0.0, 0.01]),
        torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32),
    )
    expected = logit_thresholds(logits, *parameters)
    with triton_device() as device:
        thresholds = logit_thresholds(logits.to(device), *(moved(value, device) for value in parameters))
    assert expected is not None
    assert thresholds is not None
    assert expected[0] == -torch.inf
    kept = logits.float() >= expected.unsqueeze(1)
    assert torch.equal(logits.float() >= thresholds.cpu().unsqueeze(1), kept)
    assert bool((kept.sum(dim=1) > 0).all())


@pytest.mark.parametrize(
    "filters", [{"top_k": 150}, {"top_k": 700}, {"top_p": 0.5}, {"top_p": 0.99}, {"top_k": 40, "top_p": 0.6}], ids=str
)
def test_triton_finds_thresholds_in_flat_rows(triton_device: TritonDevice, filters: dict[str, Any]) -> None:
    """More logits than groups are kept, or so many that the search has to look into more groups than at first."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(4, 5001, generator=generator).mul_(torch.tensor([[0.0], [0.05], [1.0], [5.0]])).bfloat16()
    expected = thresholds_of(logits, 1.0, filters)
    with triton_device() as device:
        thresholds = thresholds_of(logits.to(device), 1.0, filters).cpu()
    kept = (logits.float() >= expected.unsqueeze(1)).sum(dim=1)
    assert torch.equal((logits.float() >= thresholds.unsqueeze(1)).sum(dim=1), kept)
    assert int(kept[0]) == 5001
    assert 0 < int(kept[3]) < 5001


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_ties_at_the_edge_are_all_kept(device: torch.device, filters: dict[str, Any]) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, -1.0]], device=device)
    threshold = thresholds_of(logits, 1.0, filters)
    assert threshold.tolist() == [1.0]


def test_no_filter_costs_nothing(device: torch.device) -> None:
    assert logit_thresholds(torch.zeros(2, 8, device=device), torch.ones(2, device=device), None, None, None) is None


def test_agrees_with_transformers() -> None:
    """The same tokens survive as in Hugging Face's chain of processors, in its order."""
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = 3 * torch.randn(20, 300, generator=torch.Generator().manual_seed(1))
    chain = [
        processors.TemperatureLogitsWarper(0.8),
        processors.TopKLogitsWarper(40),
        processors.TopPLogitsWarper(0.9),
        processors.MinPLogitsWarper(0.02),
    ]
    ids = torch.zeros(20, 1, dtype=torch.int64)
    scores = logits.clone()
    for processor in chain:
        scores = processor(ids, scores)
    thresholds = thresholds_of(logits, 0.8, {"top_k": 40, "top_p": 0.9, "min_p": 0.02})
    assert torch.equal(logits >= thresholds.unsqueeze(1), scores > -torch.inf)


def naive_penalties(
    row: np.ndarray[Any, Any], prompt: list[int], output: list[int], bias: dict[int, float], penalties: list[float]
) -> np.ndarray[Any, Any]:
    """Penalties by their definition, one token at a time."""
    repetition, presence, frequency = penalties
    row = row.astype(np.float64)
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= frequency * output.count(token) + presence
    for token, value in bias.items():
        row[token] += value
    return row


@pytest.mark.parametrize("vocab_size", [16, 63, 1000])
@pytest.mark.parametrize("is_triton", [False, True])
def test_penalties_follow_the_definition_at_every_row(
    triton_device: TritonDevice, vocab_size: int, is_triton: bool
) -> None:
    """Draft tokens count as output in the rows behind them, and only there; rows of others are not even copied."""
    rng = np.random.default_rng(vocab_size)
    num_draft = [3, 0, 2, 5]
    cu = np.cumsum([0, *num_draft])
    drafts = rng.integers(0, vocab_size, cu[-1])
    drafts[1] = drafts[0]
    prompts = [rng.integers(0, vocab_size, 20).tolist() for _ in num_draft]
    outputs = [rng.integers(0, vocab_size, 9).tolist() for _ in num_draft]
    biases: list[dict[int, float]] = [{1: 2.0}, {}, {}, {0: -100.0, int(drafts[6]): 1.0}]
    values = [[1.2, 0.5, 0.25], [1.5, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, -0.5, 1.0]]
    histories = [
        TokenHistory(prompt, output[:4], bias) for prompt, output, bias in zip(prompts, outputs, biases, strict=True)
    ]
    for history, output in zip(histories, outputs, strict=True):
        history.append(output[4:])
    penalized = [PenalizedSequence(index, histories[index], *values[index]) for index in (3, 0, 1)]
    logits = torch.from_numpy(rng.normal(size=(cu[-1] + 4, vocab_size)).astype(np.float32)).bfloat16()
    penalties = Penalties.build(penalized, cu, drafts)
    arguments = (logits, penalties, torch.from_numpy(drafts).int())
    if is_triton:
        with triton_device() as device:
            rows = apply_penalties(*(moved(argument, device) for argument in arguments))
            rows = PenalizedLogits(*(moved(part, torch.device("cpu")) for part in vars(rows).values()))
    else:
        rows = apply_penalties(*arguments)
    assert rows.replacements is not None
    assert len(rows.replacements) == 6 + 4 + 1
    dense = rows.dense(slice(None)).numpy()
    for sequence in range(4):
        for step in range(num_draft[sequence] + 1):
            row = int(cu[sequence]) + sequence + step
            expected = logits[row].float().numpy()
            if sequence != 2:
                output = outputs[sequence] + drafts[cu[sequence] : cu[sequence] + step].tolist()
                expected = naive_penalties(expected, prompts[sequence], output, biases[sequence], values[sequence])
            np.testing.assert_allclose(dense[row], expected, rtol=1e-5, atol=1e-5)


def test_repetition_penalty_agrees_with_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    tokens = [3, 7, 7, 21]
    penalties = Penalties.build(
        [PenalizedSequence(0, TokenHistory(tokens[:2], tokens[2:]), repetition_penalty=1.4)],
        np.array([0, 0]),
        np.array([], dtype=np.int64),
    )
    rows = apply_penalties(logits, penalties, torch.empty(0, dtype=torch.int32))
    expected = processors.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([tokens]), logits.clone())
    torch.testing.assert_close(rows.dense(slice(None)), expected)


def test_what_is_banned_is_so_until_the_output_is_long_enough(triton_device: TritonDevice) -> None:
    """Catches a ban that a bias can lift, that reaches other tokens, or that never ends."""
    logits = torch.tensor([[5.0, -1.0, 0.0, 2.0, 1e30]])
    nothing = torch.empty(0, dtype=torch.int32)
    history = TokenHistory([3], [2], {3: 100.0, 1: 1.0}, banned_token_ids=[0, 3, 4, 99], min_output=2)

    def penalties() -> Penalties | None:
        return Penalties.build([PenalizedSequence(0, history)], np.array([0, 0]), np.array([], dtype=np.int64))

    def on_triton() -> torch.Tensor:
        with triton_device() as device:
            rows = apply_penalties(*(moved(value, device) for value in (logits, penalties(), nothing)))
        assert rows.replacements is not None
        return rows.replacements.cpu()

    expected = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf, -torch.inf]])
    assert torch.equal(apply_penalties(logits, penalties(), nothing).dense(slice(None)), expected)
    assert torch.equal(on_triton(), expected)
    history.append([2])
    expected = torch.tensor([[5.0, 0.0, 0.0, 102.0, 1e30]])
    assert torch.equal(apply_penalties(logits, penalties(), nothing).dense(slice(None)), expected)
    assert torch.equal(on_triton(), expected)


def test_token_ids_outside_the_vocabulary_are_skipped(triton_device: TritonDevice) -> None:
    logits = torch.randn(1, 16)
    history = TokenHistory([2, 40], [-3, 5], {99: 1.0})
    penalties = Penalties.build(
        [PenalizedSequence(0, history, presence_penalty=1.0)], np.array([0, 0]), np.array([], dtype=np.int64)
    )
    expected = logits.clone()
    expected[0, 5] -= 1
    nothing = torch.empty(0, dtype=torch.int32)
    assert torch.equal(apply_penalties(logits, penalties, nothing).dense(slice(None)), expected)
    with triton_device() as device:
        rows = apply_penalties(*(moved(value, device) for value in (logits, penalties, nothing)))
    assert rows.replacements is not None
    assert torch.equal(rows.replacements.cpu(), expected)


def test_arguments_are_checked() -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="top_k"):
        logit_thresholds(logits, torch.ones(2), torch.ones(2), None, None)
    with pytest.raises(ValueError, match="row_sequences"):
        logit_thresholds(logits, torch.ones(3), torch.ones(3, dtype=torch.int32), None, None)
    with pytest.raises(ValueError, match="logits"):
        logit_thresholds(logits.t(), torch.ones(8), torch.ones(8, dtype=torch.int32), None, None)
    with pytest.raises(ValueError, match="index"):
        Penalties.build([PenalizedSequence(1, TokenHistory([1]))], np.array([0, 0]), np.array([], dtype=np.int64))
    assert Penalties.build([], np.array([0, 0]), np.array([], dtype=np.int64)) is None
