"""Rejection sampling, case by case: Triton against the reference, batches, edges. Its statistics: test_lossless.py."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels import random
from kernels.limits import MAX_DRAFT_TOKENS, WEIGHT_TOTAL
from kernels.rejection_sample import RejectionSample
from tests.kernels.conftest import TritonDevice, poisoned_memory
from tests.kernels.sampling_cases import Case, make_case

Words = np.ndarray[Any, np.dtype[np.uint64]]

RAGGED = [0, 1, 3, 2, 4, 0, 1, 5, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("vocab_size", "block_size", "dtype", "has_filters", "has_penalties"),
    [
        (16, 4096, torch.float32, True, False),
        (63, 16, torch.float32, False, False),
        (63, 16, torch.bfloat16, True, True),
        (111, 4096, torch.float16, True, True),
        (1000, 128, torch.bfloat16, False, False),
        (1000, 128, torch.float32, False, True),
    ],
)
def test_triton_equals_reference(
    triton_device: TritonDevice,
    vocab_size: int,
    block_size: int,
    dtype: torch.dtype,
    has_filters: bool,
    has_penalties: bool,
) -> None:
    # The interpreter is slow at searching for thresholds.
    num_draft = [1, 3, 0, 4, 0, 2, 3, 3] if has_filters else RAGGED
    case = make_case(
        num_draft, vocab_size, dtype=dtype, seed=vocab_size, has_filters=has_filters, has_penalties=has_penalties
    )
    with poisoned_memory():
        expected = case.run(_block_size=block_size)
    with triton_device() as device:
        output = case.on(device).run(_block_size=block_size)
    assert_well_formed(output, case)
    assert torch.equal(output.token_ids.cpu(), expected.token_ids)
    assert torch.equal(output.num_accepted.cpu(), expected.num_accepted)
    # A run in which nothing was rejected, or nothing accepted, would compare little.
    drafted = case.cu_num_draft_tokens.diff()
    assert bool((expected.num_accepted < drafted).any())
    assert bool(((expected.num_accepted == drafted) & (drafted > 0)).any())


@pytest.mark.gpu
@pytest.mark.parametrize("has_filters", [False, True])
def test_large_batch_on_the_gpu_equals_reference(triton_device: TritonDevice, has_filters: bool) -> None:
    """Real kernels at a real size. A token may differ where noise falls on a boundary that exp rounds differently."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    case = make_case([4] * 256, 128_256, dtype=torch.bfloat16, num_candidates=64, has_filters=has_filters)
    expected = case.run()
    with triton_device() as device:
        output = case.on(device).run()
    differing = (output.token_ids.cpu() != expected.token_ids).any(dim=1).float().mean()
    assert float(differing) < 0.01


@pytest.mark.gpu
def test_runs_in_a_cuda_graph() -> None:
    """Grids depend on shapes alone: a graph captured on one batch is right for another, ragged otherwise."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    device = torch.device("cuda")
    captured = make_case([4, 2, 0, 3], 5000, has_filters=True).on(device)
    other = make_case([0, 4, 4, 1], 5000, has_filters=True, seed=9).on(device)
    expected = other.run()
    captured.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = captured.run()
    for field in fields(Case):
        value = getattr(captured, field.name)
        if isinstance(value, torch.Tensor):
            value.copy_(getattr(other, field.name))
    output.token_ids.fill_(-9)
    graph.replay()
    assert torch.equal(output.token_ids, expected.token_ids)


def assert_well_formed(output: RejectionSample, case: Case) -> None:
    """Exactly num_accepted + 1 tokens of the vocabulary a sequence, the first of them the accepted drafts."""
    token_ids, num_accepted = output.token_ids.cpu(), output.num_accepted.cpu()
    columns = torch.arange(token_ids.shape[1])
    is_token = columns <= num_accepted.unsqueeze(1)
    assert token_ids.shape == (len(case.seeds), case.max_num_draft_tokens + 1)
    assert bool((num_accepted <= case.cu_num_draft_tokens.diff()).all())
    assert bool(((token_ids >= 0) == is_token).all())
    assert int(token_ids.max()) < case.target_logits.shape[1]
    for sequence, count in enumerate(num_accepted.tolist()):
        start = int(case.cu_num_draft_tokens[sequence])
        assert torch.equal(token_ids[sequence, :count], case.draft_token_ids[start : start + count])


def single(case: Case, sequence: int) -> Case:
    """One sequence of a case as a batch of its own."""
    start, end = case.cu_num_draft_tokens[sequence : sequence + 2].tolist()
    one = slice(sequence, sequence + 1)
    return replace(
        case,
        target_logits=case.target_logits[start + sequence : end + sequence + 1],
        cu_num_draft_tokens=torch.tensor([0, end - start], dtype=torch.int32, device=case.seeds.device),
        draft_token_ids=case.draft_token_ids[start:end],
        candidate_ids=case.candidate_ids[start:end],
        candidate_weights=case.candidate_weights[start:end],
        temperature=case.temperature[one],
        seeds=case.seeds[one],
        positions=case.positions[one],
        is_coupled=None if case.is_coupled is None else case.is_coupled[one],
        top_k=None if case.top_k is None else case.top_k[one],
        top_p=None if case.top_p is None else case.top_p[one],
        min_p=None if case.min_p is None else case.min_p[one],
    )


def test_tokens_do_not_depend_on_the_batch(device: torch.device) -> None:
    """Row index, slot and neighbours change nothing: noise is keyed by seed and position."""
    case = make_case(RAGGED * 4, 300, has_filters=True).on(device)
    together = case.run()
    for sequence in range(len(RAGGED) * 4):
        alone = single(case, sequence).run()
        assert torch.equal(alone.token_ids[0], together.token_ids[sequence])


def test_tokens_do_not_depend_on_padding(device: torch.device) -> None:
    """Longer buffers, as a captured graph has them, and more candidate columns change nothing."""
    case = make_case(RAGGED, 100, has_filters=True).on(device)
    expected = case.run()
    longer = replace(
        case,
        target_logits=torch.cat([case.target_logits, torch.full_like(case.target_logits[:5], torch.nan)]),
        draft_token_ids=torch.cat([case.draft_token_ids, torch.full_like(case.draft_token_ids[:3], -7)]),
        candidate_ids=torch.nn.functional.pad(case.candidate_ids, (0, 5, 0, 3)),
        candidate_weights=torch.nn.functional.pad(case.candidate_weights, (0, 5, 0, 3)),
        max_num_draft_tokens=9,
    )
    output = longer.run()
    assert torch.equal(output.token_ids[:, : expected.token_ids.shape[1]], expected.token_ids)
    assert bool((output.token_ids[:, expected.token_ids.shape[1] :] == -1).all())


def test_a_slice_of_wider_logits_may_be_passed(device: torch.device) -> None:
    """Models pad their vocabulary; the padding is cut off as a view."""
    case = make_case(RAGGED, 100).on(device)
    wider = torch.nn.functional.pad(case.target_logits, (0, 28), value=50.0)[:, :100]
    assert torch.equal(replace(case, target_logits=wider).run().token_ids, case.run().token_ids)


def test_greedy_accepts_the_argmax_and_breaks_ties_downwards(device: torch.device) -> None:
    logits = torch.zeros(5, 9)
    logits[torch.arange(5), torch.tensor([2, 3, 4, 5, 6])] = 1.0
    logits[1, 7] = 1.0  # a tie: token 3 wins
    case = replace(
        make_case([4], 9),
        target_logits=logits,
        draft_token_ids=torch.tensor([2, 3, 8, 5], dtype=torch.int32),
        temperature=torch.zeros(1),
    ).on(device)
    assert case.run().token_ids.tolist() == [[2, 3, 4, -1, -1]]
    drafts = torch.tensor([2, 7, 4, 5], dtype=torch.int32, device=device)
    assert replace(case, draft_token_ids=drafts).run().token_ids.tolist() == [[2, 3, -1, -1, -1]]
    drafts = torch.tensor([2, 3, 4, 5], dtype=torch.int32, device=device)
    assert replace(case, draft_token_ids=drafts).run().token_ids.tolist() == [[2, 3, 4, 5, 6]]


def one_draft(logits: torch.Tensor, draft: int, ids: list[int], weights: list[int], num_sequences: int = 2000) -> Case:
    """Many sequences with one and the same draft token, told apart by their seeds."""
    n = num_sequences
    return Case(
        logits.repeat(n, 1),
        torch.arange(n + 1, dtype=torch.int32),
        torch.full((n,), draft, dtype=torch.int32),
        torch.tensor([ids] * n, dtype=torch.int32).view(n, len(ids)),
        torch.tensor([weights] * n, dtype=torch.int32).view(n, len(ids)),
        torch.ones(n),
        torch.arange(n),
        torch.zeros(n, dtype=torch.int64),
        1,
    )


def test_impossible_tokens_are_never_emitted(device: torch.device) -> None:
    """Filtered tokens have no probability, and a recovered token is one that p likes more than q does."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]]))
    half = WEIGHT_TOTAL // 2
    case = one_draft(logits, 1, [1, 3], [half, half]).on(device)
    output = case.run()
    recovered = output.token_ids[output.num_accepted == 0, 0]
    assert set(recovered.tolist()) == {0, 2}
    n = len(case.seeds)
    filtered = replace(case, top_k=torch.full((n,), 2, dtype=torch.int32, device=device)).run()
    assert set(filtered.token_ids[filtered.num_accepted == 0, 0].tolist()) == {0}
    assert set(filtered.token_ids[filtered.num_accepted == 1, 1].tolist()) == {0, 1}


@pytest.mark.parametrize("extreme", [0, 0xFFFFFFFF])
@pytest.mark.parametrize("is_coupled", [0, 1])
def test_extreme_noise_draws_nothing_impossible(monkeypatch: pytest.MonkeyPatch, extreme: int, is_coupled: int) -> None:
    """First and last tokens have no probability: equal noise for all of them must not choose one of those."""
    words = np.uint64(extreme)
    monkeypatch.setattr(
        random,
        "_philox",
        lambda counter, key: (np.broadcast_to(words, np.broadcast_shapes(*map(np.shape, counter))),) * 4,
    )
    logits = torch.full((2, 40), -torch.inf)
    logits[:, 13:27] = 0.5 * torch.randn(2, 14)
    case = one_draft(logits, 14, [14, 30], [1, WEIGHT_TOTAL - 1], 4)
    case = replace(case, is_coupled=torch.full((4,), is_coupled, dtype=torch.int32))
    for block_size in (4, 8, 4096):
        output = case.run(_block_size=block_size)
        tokens = output.token_ids[output.token_ids >= 0]
        assert bool(((tokens >= 13) & (tokens < 27)).all())
    if not is_coupled:
        # q is p but for rounding: rejected at noise next to 1, if at all, and then with hardly any residual.
        same = one_draft(torch.zeros(2, 2), 0, [0, 1], [WEIGHT_TOTAL // 2] * 2, 4).run()
        assert same.num_accepted.tolist() == [1] * 4


def test_certain_target_and_certain_draft(device: torch.device) -> None:
    """Nothing is left of p behind a q that is equal to it; a certain p rejects every other draft."""
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]]).repeat(2, 1)
    accepted = one_draft(logits, 0, [], []).on(device).run()
    assert set(map(tuple, accepted.token_ids.tolist())) == {(0, 0)}
    rejected = one_draft(logits, 2, [2, 1], [30_000, WEIGHT_TOTAL - 30_000]).on(device).run()
    assert set(map(tuple, rejected.token_ids.tolist())) == {(0, -1)}


def test_nothing_left_of_p_draws_from_p(triton_device: TritonDevice) -> None:
    """A q that claims more than there is, as only a broken drafter's can, leaves nothing: a token of p follows."""
    logits = torch.full((2, 100), -torch.inf)
    logits[:, [7, 40, 90]] = 0.0
    full = WEIGHT_TOTAL - 1
    expected = one_draft(logits, 8, [7, 8, 40, 90], [full] * 4, 300).run(_block_size=32)
    case = one_draft(logits, 8, [7, 8, 40, 90], [full] * 4, 10)
    with triton_device() as device:
        output = case.on(device).run(_block_size=32)
    assert torch.equal(output.token_ids.cpu(), expected.token_ids[:10])
    assert expected.num_accepted.tolist() == [0] * 300
    counts = torch.bincount(expected.token_ids[:, 0].long(), minlength=100)
    assert int(counts.sum()) == int(counts[[7, 40, 90]].sum())
    assert int(counts[[7, 40, 90]].min()) > 60


def test_coupled_tokens_are_the_targets_own(triton_device: TritonDevice) -> None:
    """Whatever is drafted, a coupled sequence gets what it would get without drafts."""
    case = make_case([3, 4, 2, 0, 1, 4, 3, 4], 111, has_filters=True)
    case = replace(case, is_coupled=torch.ones(8, dtype=torch.int32))
    plain = replace(
        case,
        cu_num_draft_tokens=torch.arange(len(case.target_logits) + 1, dtype=torch.int32) * 0,
        draft_token_ids=case.draft_token_ids[:0],
        candidate_ids=case.candidate_ids[:0],
        candidate_weights=case.candidate_weights[:0],
        max_num_draft_tokens=0,
        is_coupled=None,
    )
    plain = replace(plain, **per_row(case))
    own = plain.run().token_ids[:, 0]
    with triton_device() as device:
        assert torch.equal(plain.on(device).run().token_ids[:, 0].cpu(), own)
        output = case.on(device).run()
    assert_well_formed(output, case)
    starts = case.cu_num_draft_tokens[:-1] + torch.arange(8)
    counts = set()
    for sequence, count in enumerate(output.num_accepted.tolist()):
        row = int(starts[sequence])
        assert torch.equal(output.token_ids[sequence, : count + 1].cpu(), own[row : row + count + 1])
        counts.add(count)
    assert len(counts) > 1


def per_row(case: Case) -> dict[str, Any]:
    """What belongs to sequences, for each row as a sequence of its own."""
    num_rows = case.cu_num_draft_tokens.diff() + 1
    sequences = torch.arange(len(num_rows)).repeat_interleave(num_rows)
    steps = torch.arange(len(sequences)) - (num_rows.cumsum(0) - num_rows)[sequences]
    names = ("temperature", "seeds", "top_k", "top_p", "min_p")
    return {name: getattr(case, name)[sequences] for name in names} | {"positions": case.positions[sequences] + steps}


@pytest.mark.parametrize("fill", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_yield_tokens(device: torch.device, fill: float, temperature: float) -> None:
    """Rows all NaN or all -inf yield token 0, a row all +inf any token; nothing hangs and nothing is out of range."""
    case = one_draft(torch.full((2, 5000), fill), 17, [17, 4999], [WEIGHT_TOTAL // 2] * 2, 8).on(device)
    output = replace(case, temperature=torch.full_like(case.temperature, temperature)).run()
    tokens = output.token_ids[output.token_ids >= 0]
    if fill == torch.inf and temperature > 0:
        assert int(tokens.max()) < 5000
    else:
        assert set(tokens.tolist()) == {0}


def test_nan_and_infinities_among_finite_logits(device: torch.device) -> None:
    logits = torch.tensor([[torch.nan, 1.0, 1.0, -torch.inf], [torch.nan, torch.inf, 3.0, torch.inf]])
    output = one_draft(logits, 0, [], []).on(device).run()
    assert set(output.token_ids[:, 0].tolist()) == {1, 2}
    output = one_draft(logits, 1, [1], [WEIGHT_TOTAL]).on(device).run()
    assert set(output.token_ids[output.num_accepted == 1, 1].tolist()) == {1, 3}


def test_token_ids_outside_the_vocabulary_are_rejected(triton_device: TritonDevice) -> None:
    """A bad proposal costs speed, never memory safety: the draft is rejected and its candidates count as absent."""
    logits = torch.zeros(2, 8)
    for draft, ids in ((-5, [2, 3]), (8, [2, 3]), (2**31 - 1, [2**31 - 1, 3]), (1, [-(2**31), 1])):
        case = one_draft(logits, draft, ids, [WEIGHT_TOTAL // 2] * 2, 4)
        expected = case.run()
        with triton_device() as device:
            output = case.on(device).run()
        assert torch.equal(output.token_ids.cpu(), expected.token_ids)
        if not 0 <= draft < 8:
            assert expected.num_accepted.tolist() == [0] * 4
        assert int(expected.token_ids.max()) < 8


def test_empty_batch_and_no_drafts(device: torch.device) -> None:
    empty = make_case([], 16).on(device).run()
    assert empty.token_ids.shape == (0, 1)
    plain = make_case([0, 0, 0], 16).on(device).run()
    assert plain.token_ids.shape == (3, 1)
    assert plain.num_accepted.tolist() == [0, 0, 0]


def test_arguments_are_checked() -> None:
    case = make_case([1, 2], 16, has_filters=True)
    wrong = {
        "target_logits": replace(case, target_logits=case.target_logits.double()),
        "cu_num_draft_tokens": replace(case, cu_num_draft_tokens=case.cu_num_draft_tokens[1:]),
        "draft_token_ids": replace(case, draft_token_ids=case.draft_token_ids.long()),
        "candidate_ids": replace(case, candidate_ids=case.candidate_ids[1:]),
        "candidate_weights": replace(case, candidate_weights=case.candidate_weights[:, 1:]),
        "temperature": replace(case, temperature=case.temperature.double()),
        "seeds": replace(case, seeds=case.seeds.int()),
        "positions": replace(case, positions=case.positions[:1]),
        "is_coupled": replace(case, is_coupled=torch.ones(2, dtype=torch.bool)),
        "top_p": replace(case, top_p=case.top_k),
        "max_num_draft_tokens": replace(case, max_num_draft_tokens=MAX_DRAFT_TOKENS + 1),
    }
    for name, broken in wrong.items():
        with pytest.raises(ValueError, match=name):
            broken.run()
