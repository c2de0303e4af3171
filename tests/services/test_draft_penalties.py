"""Penalised rounds of the draft model in graphs, against those that run step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter_service.model_drafter import ModelDrafter
from drafter_service.sequence import DraftSequence
from engine.step import PassKind
from outrider.protocol.sampling_parameters import SamplingParameters
from tests.services.draft_sequences import Chain, all_chains, begin, commit, draft_sequence
from tests.services.test_draft_executor import loaded_drafter
from tests.tiny_models import save_tiny_llama

VOCABULARY = 64
PENALTIES: list[dict[str, Any]] = [
    {"temperature": 1.0, "repetition_penalty": 1.6, "presence_penalty": 0.7, "frequency_penalty": 0.9, "seed": 1},
    {"temperature": 0.0, "repetition_penalty": 0.6, "logit_bias": {5: 3.0, 9: -100.0}},
    {"temperature": 0.8, "presence_penalty": 1.5, "top_p": 0.9, "seed": 2},
    {"temperature": 1.2, "frequency_penalty": 0.8, "logit_bias": {3: 2.0}, "top_k": 12, "seed": 3},
]
NEIGHBOURS: list[dict[str, Any]] = [{"temperature": 1.0, "seed": 4}, {"temperature": 0.0}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_length=128)


def sequence_with(sampling: dict[str, Any], *, number: int = 0, max_draft_tokens: int = 4) -> DraftSequence:
    generator = np.random.default_rng(number)
    return draft_sequence(
        # Few tokens, many of them again and again, in the prompt and in the output.
        generator.integers(0, 12, 14 + number).tolist(),
        sequence_id=number,
        num_prompt_tokens=6,
        sampling=SamplingParameters(**sampling),
        max_draft_tokens=max_draft_tokens,
    )


def first_drafts(drafter: ModelDrafter, sequences: list[DraftSequence]) -> list[Chain]:
    """The answers to the first verdicts."""
    for sequence in sequences:
        begin(drafter, sequence)
    return all_chains(drafter, sequences)


def first_of(draft: Chain) -> tuple[int, dict[int, int]]:
    """The first draft token, and the distribution that it was drawn from as weights by token."""
    assert draft.candidate_ids is not None
    assert draft.candidate_weights is not None
    weights = zip(draft.candidate_ids[0].tolist(), draft.candidate_weights[0].tolist(), strict=True)
    return draft.token_ids[0], {token_id: weight for token_id, weight in weights if weight}


def assert_same(found: tuple[int, dict[int, int]], expected: tuple[int, dict[int, int]]) -> None:
    """The same token of the same q, but for a few of 65,536: a table adds in another order."""
    assert found[0] == expected[0]
    for token_id in found[1].keys() | expected[1].keys():
        assert abs(found[1].get(token_id, 0) - expected[1].get(token_id, 0)) <= 4


def several_rounds(drafter: ModelDrafter, samplings: list[dict[str, Any]], num_rounds: int) -> list[list[Chain]]:
    """Drafts round by round; what the target commits in between does not depend on them."""
    sequences = [sequence_with(sampling, number=number) for number, sampling in enumerate(samplings)]
    generator, found = np.random.default_rng(7), []
    for sequence in sequences:
        begin(drafter, sequence)
    for _ in range(num_rounds):
        found.append(all_chains(drafter, sequences))
        for draft in found[-1]:
            commit(drafter, draft.sequence, generator.integers(0, 20, generator.integers(1, 4)).tolist())
    for sequence in sequences:
        drafter.release(sequence)
    return found


def test_penalised_rows_draft_in_graphs_what_they_do_step_by_step(model: Path) -> None:
    """Catches tables that do not count what was committed between rounds, and penalties that reach a neighbour."""
    samplings = [PENALTIES[0], NEIGHBOURS[0], *PENALTIES[1:], NEIGHBOURS[1]]
    eager = several_rounds(loaded_drafter(model), samplings, 8)
    plain = several_rounds(loaded_drafter(model), [{**NEIGHBOURS[0], "seed": 1}] * len(samplings), 8)
    for graph_rows in (8, 4):
        for round_number, drafts in enumerate(
            several_rounds(loaded_drafter(model, graph_rows=graph_rows), samplings, 8)
        ):
            for number, (draft, expected) in enumerate(zip(drafts, eager[round_number], strict=True)):
                assert_same(first_of(draft), first_of(expected))
                if samplings[number] in NEIGHBOURS:
                    assert list(draft.token_ids) == list(expected.token_ids)
    # Penalties matter here.
    assert sum(first_of(a[0]) != first_of(b[0]) for a, b in zip(eager, plain, strict=True)) > 4


def test_a_penalised_round_is_one_graph(model: Path) -> None:
    """Catches a sequence with penalties that is drafted step by step, while everybody else's drafts wait."""
    drafter = loaded_drafter(model, graph_rows=8)
    kinds: list[PassKind] = []
    submit = drafter._executor.submit

    def watched(rows: Any) -> Any:
        passes = submit(rows)
        kinds.extend(part.kind for part in passes)
        return passes

    drafter._executor.submit = watched  # type: ignore[method-assign]
    several_rounds(drafter, PENALTIES + NEIGHBOURS, 3)
    assert PassKind.EAGER not in kinds
    assert kinds.count(PassKind.GRAPH) >= 3


def test_a_place_has_nothing_left_of_its_last_sequence(model: Path) -> None:
    """Catches entries of tokens that the new sequence has not, and a place that is never given back."""
    drafter = loaded_drafter(model, graph_rows=4, max_penalized=1)
    old = sequence_with({"temperature": 1.0, "logit_bias": dict.fromkeys(range(20, 40), 9.0)}, number=1)
    first_drafts(drafter, [old])
    drafter.release(old)
    for number, sampling in enumerate(PENALTIES):
        new = sequence_with(sampling, number=number)
        (draft,) = first_drafts(drafter, [new])
        drafter.release(new)
        (expected,) = first_drafts(loaded_drafter(model), [sequence_with(sampling, number=number)])
        assert_same(first_of(draft), first_of(expected))


def test_more_penalised_sequences_than_places(model: Path) -> None:
    """Catches one without a place that has another's penalties, and one that stays without when a place is free."""
    drafter = loaded_drafter(model, graph_rows=4, max_penalized=1)
    unpenalised = {"temperature": 1.0, "seed": 1}
    first, second = (sequence_with({**unpenalised, "presence_penalty": 2.0}, number=number) for number in (1, 2))
    drafts = first_drafts(drafter, [first, second])
    expected = first_drafts(
        loaded_drafter(model),
        [
            sequence_with({**unpenalised, "presence_penalty": 2.0}, number=1),
            sequence_with(unpenalised, number=2),
            sequence_with({**unpenalised, "presence_penalty": 2.0}, number=2),
        ],
    )
    assert first_of(expected[1]) != first_of(expected[2])
    # The one that missed less had its turn first, and the place.
    assert_same(first_of(drafts[0]), first_of(expected[0]))
    assert_same(first_of(drafts[1]), first_of(expected[1]))
    drafter.release(first)
    commit(drafter, second, [])
    (draft,) = all_chains(drafter, [second])
    assert_same(first_of(draft), first_of(expected[2]))


def test_draft_tokens_are_not_counted_in_later_rounds(model: Path) -> None:
    """Catches counts kept from round to round that hold rejected drafts, when rounds run step by step."""
    drafter, sampling = loaded_drafter(model), {**PENALTIES[0], "frequency_penalty": 2.0}
    sequence = sequence_with(sampling)
    begin(drafter, sequence)
    for _ in range(3):
        (draft,) = all_chains(drafter, [sequence])
        commit(drafter, sequence, [])
        (expected,) = first_drafts(loaded_drafter(model), [sequence_with(sampling)])
        assert list(draft.token_ids) == list(expected.token_ids)
