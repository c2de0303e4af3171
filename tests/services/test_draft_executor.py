"""The draft model's rounds in graphs, against those that run step by step.

Without a GPU the same work runs unrecorded, which covers its layout and padding; on one (make gpu-test) it replays.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from drafter_service.executor import DraftExecutor
from drafter_service.model_drafter import ModelDrafter
from drafter_service.sequence import DraftSequence
from engine.cuda_graph import batch_buckets
from engine.model_runner import ModelRunner
from kernels.limits import MAX_DRAFT_TOKENS
from outrider.protocol.fingerprint import TokenizerDigest
from outrider.protocol.handshake import DraftLimits
from outrider.protocol.sampling_parameters import SamplingParameters
from outrider.protocol.wire import MAX_EXPANSIONS
from outrider.v1 import common_pb2
from tests.service_device import SERVICE_DEVICE, graph_pool
from tests.services.draft_sequences import LIMITS, all_chains, begin, chains_of, commit, draft_sequence
from tests.tiny_models import save_tiny_llama

VOCABULARY = 64
SAMPLING = [
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=1.0, seed=1),
    SamplingParameters(temperature=0.8, seed=(1 << 64) - 3),
    SamplingParameters(temperature=1.2, top_k=20, seed=3),
    SamplingParameters(temperature=1.0, top_p=0.7, min_p=0.02, seed=4),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_length=128)


def make_runner(model: Path, *, num_blocks: int = 128) -> ModelRunner:
    return ModelRunner(model, device=torch.device(SERVICE_DEVICE), dtype=torch.float32, num_blocks=num_blocks)


def loaded_drafter(
    model: Path, *, num_blocks: int = 128, graph_rows: int = 0, max_draft_tokens: int = 4, max_penalized: int = 64
) -> ModelDrafter:
    """A drafter of 16 candidates, with graphs for so many rows, or none."""

    def make_executor(runner: ModelRunner) -> DraftExecutor:
        return DraftExecutor(
            runner,
            num_slots=32,
            max_graph_rows=graph_rows,
            max_draft_tokens=max_draft_tokens,
            num_candidates=16,
            max_penalized=max_penalized,
        )

    drafter = ModelDrafter(
        lambda: make_runner(model, num_blocks=num_blocks),
        make_executor,
        name="tiny",
        revision="",
        tokenizer=TokenizerDigest(),
        max_num_batched_tokens=512,
        max_sequences=32,
        has_graphs=False,
    )
    drafter.load()
    if graph_rows:
        drafter._executor.use_graphs(graph_pool())
    return drafter


@pytest.mark.parametrize("most", [1, 5, 8, 64, 100, 300])
def test_buckets_end_where_they_should(most: int) -> None:
    """Catches a batch size without a bucket."""
    buckets = batch_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most


def draft_sequences() -> list[DraftSequence]:
    generator = np.random.default_rng(3)
    return [
        draft_sequence(
            generator.integers(0, VOCABULARY, 3 + 9 * index).tolist(),
            sequence_id=index,
            num_prompt_tokens=1,
            sampling=sampling,
            verification=common_pb2.VERIFICATION_GREEDY if sampling.is_greedy else common_pb2.VERIFICATION_REJECTION,
            max_draft_tokens=1 + index % 4,
            limits=replace(LIMITS, max_candidates=(16, 16, 3, 5, 64)[index]),
        )
        for index, sampling in enumerate(SAMPLING)
    ]


def test_a_graphed_round_drafts_what_an_eager_one_does(model: Path) -> None:
    """Catches a token fed back at the wrong place, and a cache that is wrong after one or two tokens of catching up."""

    def three_rounds(drafter: ModelDrafter) -> list[tuple[list[int], list[dict[int, int]]]]:
        """Of each draft the tokens, and for each of them the weights of its candidates."""
        sequences = draft_sequences()
        for sequence in sequences:
            begin(drafter, sequence)
        found: list[tuple[list[int], list[dict[int, int]]]] = []
        for round_number in range(3):
            for draft in all_chains(drafter, sequences):
                sequence, tokens = draft.sequence, draft.token_ids
                if draft.candidate_ids is None or draft.candidate_weights is None:
                    found.append((tokens, []))
                else:
                    assert not draft.candidate_weights[:, sequence.limits.max_candidates :].any()
                    rows = zip(draft.candidate_ids.tolist(), draft.candidate_weights.tolist(), strict=True)
                    # Candidates without weight are padding, and may be any.
                    found.append((tokens, [{i: w for i, w in zip(*row, strict=True) if w} for row in rows]))
                # All accepted and a bonus token in one round, a rejection at the first token in the next.
                is_accepted = (round_number + sequence.sequence_id) % 2
                commit(drafter, sequence, [*tokens, 7] if is_accepted else [(tokens[0] + 1) % VOCABULARY])
        for sequence in sequences:
            drafter.release(sequence)
        return found

    eager = three_rounds(loaded_drafter(model))
    for graph_rows in (5, 8, 2):
        graphed = three_rounds(loaded_drafter(model, graph_rows=graph_rows))
        assert [tokens for tokens, _ in graphed] == [tokens for tokens, _ in eager]
        for (_, here), (_, there) in zip(graphed, eager, strict=True):
            for one, other in zip(here, there, strict=True):
                # On a GPU, a product of another shape rounds otherwise.
                assert all(abs(one.get(i, 0) - other.get(i, 0)) <= 4 for i in one.keys() | other.keys())


def test_verifiers_may_ask_for_what_graphs_make(model: Path) -> None:
    """Catches a request that is drafted without a graph, step by step, while everybody else waits."""
    limits = DraftLimits(MAX_DRAFT_TOKENS, 16, 1, MAX_EXPANSIONS, takes_turns=True)
    assert loaded_drafter(model).limits == limits
    assert loaded_drafter(model, graph_rows=8).limits == replace(limits, max_draft_tokens=4)


def test_a_graph_stays_within_learnt_positions(tmp_path: Path) -> None:
    """Catches a round that looks up positions which the model has not, for drafts that nobody asked for."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY, n_positions=20, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)

    def drafted(drafter: ModelDrafter) -> list[int]:
        sequence = draft_sequence(range(18), sampling=SAMPLING[1], max_draft_tokens=8)
        begin(drafter, sequence)
        (chain,) = all_chains(drafter, [sequence])
        return chain.token_ids

    eager = drafted(loaded_drafter(tmp_path))
    assert drafted(loaded_drafter(tmp_path, graph_rows=2, max_draft_tokens=8)) == eager
    assert len(eager) == 2


def test_a_prompt_does_not_hold_up_those_that_draft(model: Path) -> None:
    """Catches a prompt, computed step by step, in one round with what a graph holds; and one that is never computed."""
    drafter = loaded_drafter(model, graph_rows=8)
    old, new = draft_sequences()[2:4]
    begin(drafter, old)
    all_chains(drafter, [old])
    begin(drafter, new)
    answers: list[set[DraftSequence]] = []
    for _ in range(4):
        if not answers or old in answers[-1]:
            commit(drafter, old, [1])
        drafts = drafter.draft()
        answers.append({chain.sequence for chain in chains_of(drafts)})
        assert set(drafts.computing) == [{new}, {old, new}, set(), set()][len(answers) - 1]
    assert answers == [{old}, set(), {old, new}, {old}]


def test_a_prompt_is_computed_before_the_first_verdict(model: Path) -> None:
    """Catches one that the first verdict waits for, and a drafter that works on although nothing is to be done."""
    for graph_rows in (0, 8):
        drafter = loaded_drafter(model, graph_rows=graph_rows)
        sequence = draft_sequence(range(40))
        drafter.open(sequence)
        assert drafter.has_work
        assert not list(chains_of(drafter.draft()))
        assert not drafter.has_work
        assert sequence.num_missing == 1, "the last one is computed with what follows it"
        commit(drafter, sequence, [41])
        (chain,) = chains_of(drafter.draft())
        assert len(chain.token_ids) == 4
        assert not drafter.has_work
        # A chain that was accepted in part, and not contradicted, is drafted anew: the same tokens, and more of them.
        commit(drafter, sequence, chain.token_ids[:2])
        (again,) = chains_of(drafter.draft())
        assert again.token_ids[:2] == chain.token_ids[2:]
        drafter.release(sequence)
        assert drafter.num_free_kv_blocks == drafter.num_kv_blocks
        assert not drafter.has_work


def test_a_full_cache_changes_no_draft(model: Path) -> None:
    """Catches a sequence that is evicted by one before it in the same round, and goes on as if its cache were there."""

    def drafts(num_blocks: int) -> list[tuple[int, list[int]]]:
        drafter = loaded_drafter(model, num_blocks=num_blocks)
        generator = np.random.default_rng(6)
        sequences = [
            draft_sequence(
                generator.integers(0, VOCABULARY, 26 + 3 * index).tolist(),
                sequence_id=index,
                num_prompt_tokens=1,
                sampling=SamplingParameters(temperature=1.0, seed=index),
            )
            for index in range(6)
        ]
        for sequence in sequences:
            begin(drafter, sequence)
        found = []
        for _ in range(30):
            drafts = all_chains(drafter, sequences)
            for sequence, draft in zip(sequences, drafts, strict=True):
                assert draft.candidate_weights is not None
                found += [(sequence.sequence_id, sorted(row)) for row in draft.candidate_weights.tolist()]
                # What the target commits does not depend on what was drafted: always something else.
                commit(drafter, sequence, [int(generator.integers(0, VOCABULARY))])
        return found

    # Behind the first draft token, later ones follow what was drawn, which may fall on either side of a rounded weight.
    enough, scarce = (drafts(num_blocks)[::4] for num_blocks in (128, 14))
    assert len(enough) == len(scarce) == 180
    for (number, weights), (other_number, other_weights) in zip(enough, scarce, strict=True):
        assert number == other_number
        assert max(abs(a - b) for a, b in zip(weights, other_weights, strict=True)) < 100
