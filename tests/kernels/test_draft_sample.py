"""Draft sampling: integer weights by largest remainders, tokens drawn from exactly them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from scipy import stats

from kernels.draft_sample import DraftSample, draft_sample
from kernels.integer_weights import exponential_weights
from kernels.limits import NUM_CANDIDATES, WEIGHT_TOTAL
from kernels.random import Purpose, random_words, target_exponentials
from kernels.rejection_sample import rejection_sample
from tests.kernels.conftest import TritonDevice, poisoned_memory
from tests.kernels.sampling_cases import shaped_probabilities


def inputs(batch_size: int, vocab_size: int, scale: float = 2.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    return {
        "logits": scale * torch.randn(batch_size, vocab_size, generator=generator),
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.5]).repeat(batch_size)[:batch_size],
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator),
        "positions": torch.randint(0, 2**40, (batch_size,), generator=generator),
    }


def sample(
    arguments: dict[str, torch.Tensor], num_candidates: int = NUM_CANDIDATES, num_outcomes: int = 0
) -> DraftSample:
    return draft_sample(
        arguments["logits"],
        arguments["temperature"],
        arguments["seeds"],
        arguments["positions"],
        top_k=arguments.get("top_k"),
        top_p=arguments.get("top_p"),
        num_candidates=num_candidates,
        max_candidates=arguments.get("max_candidates"),
        is_coupled=arguments.get("is_coupled"),
        num_outcomes=num_outcomes,
    )


def assert_same(output: DraftSample, expected: DraftSample) -> None:
    """Equal but for single units of weight, as exp rounds differently in numpy, torch and on the GPU."""
    assert torch.equal(output.candidate_ids.cpu(), expected.candidate_ids)
    differences = output.candidate_weights.cpu() - expected.candidate_weights
    assert int(differences.abs().max()) <= 1
    assert bool((differences.sum(dim=1) == 0).all())
    is_equal = (differences == 0).all(dim=1)
    assert int(is_equal.sum()) >= 5
    assert torch.equal(output.token_ids.cpu()[is_equal], expected.token_ids[is_equal])
    if expected.outcome_ids is not None:
        assert output.outcome_ids is not None
        assert torch.equal(output.outcome_ids.cpu()[is_equal], expected.outcome_ids[is_equal])
        assert output.outcome_scores is not None
        assert expected.outcome_scores is not None
        # The distance to an infinite logit, taken for the largest number, overflows in some units.
        differences = output.outcome_scores.cpu().clamp_min(-1e37) - expected.outcome_scores.clamp_min(-1e37)
        assert float(differences[is_equal].abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("vocab_size", "num_candidates", "num_outcomes"),
    [(16, 64, 0), (63, 64, 8), (111, 20, 3), (1000, 64, 0), (1000, 200, 4), (1000, 1, 1)],
)
def test_triton_equals_reference(
    triton_device: TritonDevice, vocab_size: int, num_candidates: int, num_outcomes: int
) -> None:
    arguments = inputs(13, vocab_size)
    if vocab_size != 63:
        arguments["is_coupled"] = (torch.arange(13) % 3 == 1).int()
    arguments["logits"][3] = torch.nan
    arguments["logits"][6, :5] = torch.inf
    filters = {}
    if num_outcomes in (1, 3):
        # Of many groups only a few are kept.
        filters = {"top_p": torch.tensor([0.9, 1.0]).repeat(7)[:13], "top_k": (torch.arange(13) % 5).int()}
    with poisoned_memory():
        expected = sample(arguments | filters, num_candidates, num_outcomes)
    with triton_device() as device:
        moved = {name: value.to(device) for name, value in (arguments | filters).items()}
        output = sample(moved, num_candidates, num_outcomes)
    assert_same(output, expected)


@pytest.mark.parametrize("num_candidates", [1, 20, 64])
def test_of_equal_logits_the_lower_ids_are_candidates(triton_device: TritonDevice, num_candidates: int) -> None:
    """The cut through equal logits is where a parallel search would depend on chance; bfloat16 ties are everyday."""
    vocab_size = 5000
    generator = torch.Generator().manual_seed(num_candidates)
    logits = torch.randint(-3, 4, (5, vocab_size), generator=generator) / 4
    logits[0] *= torch.rand(vocab_size, generator=generator) < 0.002  # few large ones, and zeros of both signs
    logits[1] = -torch.inf
    logits[1, [4999, 77]] = -2.0
    logits[2] = logits[2].sort().values
    logits[3] += 4 * (torch.rand(vocab_size, generator=generator) < 0.005)
    arguments = inputs(5, vocab_size) | {"logits": logits.bfloat16()}
    expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :num_candidates]
    with poisoned_memory():
        reference = sample(arguments, num_candidates)
    with triton_device() as device:
        moved = {name: value.to(device) for name, value in arguments.items()}
        output = sample(moved, num_candidates)
    assert torch.equal(reference.candidate_ids.long(), expected)
    assert torch.equal(output.candidate_ids.cpu().long(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_candidates", [64, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_vocabulary(num_candidates: int, dtype: torch.dtype) -> None:
    """Sizes as served: candidates from all over the vocabulary, cut exactly, and weights as the reference has them."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    arguments = inputs(40, 128_256, scale=4.0)
    arguments["logits"] = arguments["logits"].to(dtype)
    arguments["logits"][7] = torch.nan
    arguments["logits"][9, ::2] = -torch.inf
    arguments["is_coupled"] = (torch.arange(40) % 3 == 1).int()
    filters = {"top_k": torch.tensor([0, 90], dtype=torch.int32).repeat(20), "top_p": torch.full((40,), 0.95)}
    for shaping in ({}, filters):
        expected = sample(arguments | shaping, num_candidates, 4)
        moved = {name: value.to("cuda") for name, value in (arguments | shaping).items()}
        assert_same(sample(moved, num_candidates, 4), expected)


@pytest.mark.gpu
def test_runs_in_a_cuda_graph() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    static = {name: value.to("cuda") for name, value in inputs(8, 5000).items()}
    static["top_p"] = torch.full((8,), 0.9, device="cuda")
    sample(static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sample(static)
    static["logits"].copy_(static["logits"].flip(1) * 1.5)
    static["seeds"] += 1
    graph.replay()
    expected = sample(static)
    for name in ("token_ids", "candidate_ids", "candidate_weights"):
        assert torch.equal(getattr(output, name), getattr(expected, name))


def test_weights_are_the_largest_remainders(device: torch.device) -> None:
    """Each weight is within one unit of its exact share, and rounding up went to the largest remainders."""
    arguments = {name: value.to(device) for name, value in inputs(40, 200).items()}
    output = sample(arguments, 32)
    for row in range(40):
        weights = output.candidate_weights[row].tolist()
        if float(arguments["temperature"][row]) == 0:
            assert weights == [0] * 32
            assert int(output.token_ids[row]) == int(arguments["logits"][row].argmax())
            continue
        logits = arguments["logits"][row, output.candidate_ids[row].long()].cpu()
        assert logits.tolist() == sorted(logits.tolist(), reverse=True)
        exact = exponential_weights(logits[None], logits[:1], arguments["temperature"][row : row + 1].cpu())[0].tolist()
        shares = [Fraction(int(weight)) * WEIGHT_TOTAL / int(sum(exact)) for weight in exact]
        assert sum(weights) == WEIGHT_TOTAL
        # The slack is for exp, which GPU and CPU round differently in the last bits of a share.
        slack = 0.1 if device.type == "cuda" else 0.02
        assert all(abs(weight - share) < 1 + slack for weight, share in zip(weights, shares, strict=True))
        ups = [share - int(share) for weight, share in zip(weights, shares, strict=True) if weight > share]
        downs = [share - int(share) for weight, share in zip(weights, shares, strict=True) if weight < share]
        assert min(ups, default=Fraction(1)) >= max(downs, default=Fraction(0)) - slack


def test_token_is_drawn_from_the_integers_with_draft_noise(device: torch.device) -> None:
    """The drawn token is the one whose span of cumulative weight holds the noise's upper 16 bits."""
    arguments = {name: value.to(device) for name, value in inputs(200, 50).items()}
    output = sample(arguments)
    draws = random_words(arguments["seeds"], arguments["positions"], Purpose.DRAFT)[:, 0] >> 16
    ends = output.candidate_weights.cumsum(dim=1)
    places = (ends <= draws.unsqueeze(1)).sum(dim=1).clamp_max(49)
    expected = output.candidate_ids.gather(1, places.unsqueeze(1)).squeeze(1)
    is_random = arguments["temperature"] > 0
    assert torch.equal(output.token_ids[is_random], expected[is_random])


def test_tokens_follow_the_weights(device: torch.device) -> None:
    """Chi-squared over 200,000 draws of one distribution, cut to its top 12 tokens and filtered."""
    n = 200_000
    logits = torch.randn(16, generator=torch.Generator().manual_seed(3))
    output = draft_sample(
        logits.to(device).expand(n, 16),
        torch.full((n,), 0.8, device=device),
        torch.arange(n, device=device),
        torch.full((n,), 11, device=device),
        top_p=torch.full((n,), 0.9, device=device),
        num_candidates=12,
    )
    weights = torch.zeros(16)
    weights[output.candidate_ids[0].long().cpu()] = output.candidate_weights[0].float().cpu()
    p = shaped_probabilities(logits[None].numpy(), 0.8, top_p=0.9)[0]
    assert abs(weights.numpy() / WEIGHT_TOTAL - p).max() < 2 / WEIGHT_TOTAL
    counts = torch.bincount(output.token_ids.long().cpu(), minlength=16)
    assert bool((counts[weights == 0] == 0).all())
    test = stats.chisquare(counts[weights > 0], weights[weights > 0].double() / WEIGHT_TOTAL * n)
    assert test.pvalue > 1e-4


def test_certain_rows_have_no_weights(device: torch.device) -> None:
    """No weight is ever 65,536, which would not fit the 16 bits that it has on the wire."""
    logits = torch.tensor([[0.0, 50.0, 0.0], [-torch.inf] * 3, [1.0, 1.0, -torch.inf], [torch.nan] * 3], device=device)
    output = draft_sample(
        logits,
        torch.ones(4, device=device),
        torch.arange(4, device=device),
        torch.arange(4, device=device),
        num_candidates=5,
    )
    assert output.candidate_weights.tolist() == [[0] * 5, [0] * 5, [32768, 32768, 0, 0, 0], [0] * 5]
    assert output.token_ids.tolist()[0] == 1
    assert output.token_ids.tolist()[1] == 0
    assert output.candidate_ids[0].tolist() == [1, 0, 2, 0, 0]
    assert bool(((output.token_ids >= 0) & (output.token_ids < 3)).all())


def test_tokens_do_not_depend_on_the_batch(device: torch.device) -> None:
    arguments = {name: value.to(device) for name, value in inputs(30, 300).items()}
    together = sample(arguments)
    for row in range(30):
        alone = sample({name: value[row : row + 1] for name, value in arguments.items()})
        assert torch.equal(alone.token_ids[0], together.token_ids[row])
        assert torch.equal(alone.candidate_weights[0], together.candidate_weights[row])


@pytest.mark.parametrize("vocab_size", [16, 1000])
def test_a_sequence_of_fewer_candidates_is_sampled_from_them_alone(
    triton_device: TritonDevice, vocab_size: int
) -> None:
    """Catches weight behind the limit, which would be lost on the wire, as top-k leaves where logits are equal."""
    limits = [1, 2, 3, 5, 8, 15, 16, 40, 1024, 7, 7, 7]
    arguments = inputs(len(limits), vocab_size, scale=1.0)
    arguments["temperature"][8:10] = 0.9
    # Coarse logits: there is a tie at nearly every limit, and one among all in the last row.
    arguments["logits"] = (arguments["logits"] * 2).round() / 2
    arguments["logits"][11] = 1.0
    arguments["top_p"] = torch.tensor([1.0] * 9 + [0.5, 1.0, 1.0])
    limited = arguments | {"max_candidates": torch.tensor(limits, dtype=torch.int32)}
    with poisoned_memory():
        expected = [
            sample({name: value[row : row + 1] for name, value in arguments.items()}, min(limit, 40))
            for row, limit in enumerate(limits)
        ]
        reference = sample(limited, 40)
    with triton_device() as device:
        output = sample({name: value.to(device) for name, value in limited.items()}, 40)
    assert_same(output, reference)
    for row, (limit, alone) in enumerate(zip(limits, expected, strict=True)):
        kept = min(limit, 40)
        assert torch.equal(reference.token_ids[row], alone.token_ids[0])
        assert torch.equal(reference.candidate_ids[row, :kept], alone.candidate_ids[0])
        assert torch.equal(reference.candidate_weights[row, :kept], alone.candidate_weights[0])
        assert not reference.candidate_weights[row, kept:].any()
        if arguments["temperature"][row] > 0 and limit > 1:
            assert int(reference.candidate_weights[row].sum()) == WEIGHT_TOTAL
            is_drawn = reference.candidate_ids[row] == reference.token_ids[row]
            assert bool((is_drawn & (reference.candidate_weights[row] > 0)).any())


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.02}])
def test_a_coupled_draft_is_what_the_target_would_draw(device: torch.device, filters: dict[str, float]) -> None:
    """A drafter that has the target's logits predicts every token that the target chooses itself, over all tokens."""
    n = 300
    arguments = {name: value.to(device) for name, value in inputs(n, 700).items()}
    shaping = {
        name: torch.full((n,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=device)
        for name, value in filters.items()
    }
    no_drafts = torch.empty((0, 1), dtype=torch.int32, device=device)
    target = rejection_sample(
        arguments["logits"],
        torch.zeros(n + 1, dtype=torch.int32, device=device),
        no_drafts[:, 0],
        no_drafts,
        no_drafts,
        arguments["temperature"],
        arguments["seeds"],
        arguments["positions"],
        max_num_draft_tokens=0,
        **shaping,  # type: ignore[arg-type]  # one type for all of them
    )
    output = sample(arguments | shaping | {"is_coupled": torch.ones(n, dtype=torch.int32, device=device)}, 4, 3)
    assert torch.equal(output.token_ids, target.token_ids[:, 0])
    assert not output.candidate_weights.any()
    assert output.outcome_ids is not None
    assert torch.equal(output.outcome_ids[:, 0], output.token_ids)
    is_among_candidates = (sample(arguments, 4).candidate_ids == output.token_ids[:, None]).any(dim=1)
    assert bool(filters) or not bool(is_among_candidates.all())


def test_outcomes_are_ranked_by_their_definition(device: torch.device) -> None:
    """Coupled: log q + g over all tokens; greedy: the logits; else what was drawn, then log q + g among candidates."""
    n, vocab_size, num_candidates, num_outcomes = 60, 90, 12, 5
    arguments = inputs(n, vocab_size)
    is_coupled = (torch.arange(n) % 3 == 0).int()
    arguments |= {"is_coupled": is_coupled, "top_p": torch.full((n,), 0.9), "max_candidates": torch.full((n,), 6).int()}
    moved = {name: value.to(device) for name, value in arguments.items()}
    output = sample(moved, num_candidates, num_outcomes)
    without = sample(moved, num_candidates)
    for name in ("token_ids", "candidate_ids", "candidate_weights"):
        assert torch.equal(getattr(output, name), getattr(without, name))
    assert output.outcome_ids is not None
    assert output.outcome_scores is not None
    noise = target_exponentials(arguments["seeds"], arguments["positions"], vocab_size)
    num_replaced = 0
    for row in range(n):
        logits, temperature = arguments["logits"][row].double(), float(arguments["temperature"][row])
        ids, scores = output.outcome_ids[row].tolist(), output.outcome_scores[row].double().cpu()
        assert len(set(ids)) == num_outcomes
        assert ids[0] == int(output.token_ids[row])
        if temperature == 0:
            expected = logits - logits.max()
            assert ids == logits.argsort(descending=True)[:num_outcomes].tolist()
        else:
            p = shaped_probabilities(logits[None].numpy(), temperature, top_p=0.9)[0]
            log_q = torch.from_numpy(p).log()
            if is_coupled[row]:
                expected = log_q - log_q.max() - noise[row].log()
                best = expected
            else:
                candidates = logits.argsort(descending=True)[:num_candidates]
                log_q = torch.full_like(logits, -torch.inf).scatter(0, candidates, log_q[candidates])
                expected = log_q - log_q.exp().sum().log() - noise[row].log()
                best = expected.scatter(0, torch.tensor(ids[0]), torch.inf)
                num_replaced += ids[0] != int(expected.argmax())
            is_possible = best[ids] > -torch.inf
            ranked = best.argsort(descending=True)[: int(is_possible.sum())].tolist()
            assert ids[: len(ranked)] == ranked
        assert torch.allclose(scores, expected[ids], atol=1e-5)
    assert num_replaced > 5


def test_results_go_where_there_is_room(triton_device: TritonDevice) -> None:
    """As graphs write them: weights in 16 bits, to places that were there before."""
    arguments = inputs(9, 111) | {"is_coupled": (torch.arange(9) % 2).int()}
    expected = sample(arguments, 20, 3)
    with triton_device() as device:
        room = DraftSample(
            torch.empty(9, dtype=torch.int32, device=device),
            torch.empty((9, 20), dtype=torch.int32, device=device),
            torch.empty((9, 20), dtype=torch.int16, device=device),
            torch.empty((9, 3), dtype=torch.int32, device=device),
            torch.empty((9, 3), device=device),
        )
        output = draft_sample(
            **{name: value.to(device) for name, value in arguments.items()}, num_candidates=20, num_outcomes=3, out=room
        )
    assert output is room
    assert_same(replace(room, candidate_weights=room.candidate_weights.int() & 0xFFFF), expected)


def test_arguments_are_checked() -> None:
    arguments = inputs(3, 16)
    for name, value in {
        "temperature": torch.ones(2),
        "seeds": torch.zeros(3),
        "positions": torch.zeros(2),
        "max_candidates": torch.ones(3),
        "is_coupled": torch.ones(3, dtype=torch.bool),
    }.items():
        with pytest.raises(ValueError, match=name):
            sample(arguments | {name: value})
    for num_candidates in (0, 1025):
        with pytest.raises(ValueError, match="num_candidates"):
            sample(arguments, num_candidates)
    for num_outcomes in (-1, 4, 9):
        with pytest.raises(ValueError, match="num_outcomes"):
            sample(arguments, 3 if num_outcomes == 4 else 64, num_outcomes)
    with pytest.raises(ValueError, match="out has no room for outcomes"):
        draft_sample(
            arguments["logits"],
            arguments["temperature"],
            arguments["seeds"],
            arguments["positions"],
            num_candidates=8,
            num_outcomes=2,
            out=sample(arguments, 8),
        )
