"""The fixed shapes that CUDA graphs record, against the paths without a shape.

Without a GPU the same work runs unrecorded, which covers its layout and padding; on one (make gpu-test) it replays.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from drafter_service.draft_graph import DraftGraphs
from drafter_service.drafter import Draft
from drafter_service.model_drafter import ModelDrafter
from drafter_service.sequence import DraftSequence
from engine.cuda_graph import GraphPool, batch_buckets
from engine.draft_tokens import DraftRows, DraftTokens
from engine.model_runner import ModelRunner
from outrider.protocol.sampling_parameters import SamplingParameters
from tests.service_device import SERVICE_DEVICE
from tests.services.sequences import LINK, arrive, target_sequence
from tests.tiny_models import save_tiny_llama
from verifier_service.decode_graph import DecodeGraphs
from verifier_service.scheduler import Scheduled
from verifier_service.sequence import TargetSequence
from verifier_service.speculation import Speculation
from verifier_service.target import Target
from verifier_service.verify import verify

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


def loaded_drafter(model: Path, *, num_blocks: int = 128) -> ModelDrafter:
    """A drafter of 16 candidates that has no graphs yet."""
    drafter = ModelDrafter(
        lambda: make_runner(model, num_blocks=num_blocks),
        name="tiny",
        revision="",
        tokenizer_fingerprint="",
        max_num_batched_tokens=512,
        num_candidates=16,
    )
    drafter.load()
    return drafter


def capture(graphs: DecodeGraphs | DraftGraphs) -> None:
    if SERVICE_DEVICE != "cpu":
        graphs.capture(GraphPool(torch.device(SERVICE_DEVICE)))


def random_draft(generator: np.random.Generator, num_tokens: int, num_candidates: int) -> DraftTokens:
    """Draft tokens with a uniform q over some candidates, or none at all."""
    if num_candidates == 0:
        ids = generator.integers(0, VOCABULARY, (num_tokens, 1)).astype(np.int32)
        return DraftTokens(ids[:, 0].tolist(), DraftRows(ids[:, 0], ids[:, :0], ids[:, :0]))
    rows = [generator.choice(VOCABULARY, num_candidates, replace=False) for _ in range(num_tokens)]
    ids = np.stack(rows).astype(np.int32)
    weights = np.full((num_tokens, num_candidates), 65536 // num_candidates, np.int32)
    return DraftTokens(ids[:, 0].tolist(), DraftRows(ids[:, 0], ids, weights))


def prefilled(target: Target, sampling: SamplingParameters, length: int, seed: int) -> TargetSequence:
    """A sequence all of whose tokens but the last are computed."""
    generator = np.random.default_rng(seed)
    sequence = target_sequence(
        token_ids=generator.integers(0, VOCABULARY, length).tolist(), sampling=sampling, length_limit=120
    )
    assert target.blocks.grow(sequence.block_ids, length + 5)
    if length > 1:
        verify(target, [Scheduled(sequence, length - 1, 0, False)])
    sequence.num_computed = length - 1
    sequence.num_committed_here = 1
    return sequence


@pytest.mark.parametrize("most", [1, 5, 8, 64, 100, 300])
def test_buckets_end_where_they_should(most: int) -> None:
    """Catches a batch size without a bucket."""
    buckets = batch_buckets(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most


@pytest.mark.parametrize("num_drafts", [(4, 0, 2, 3, 4), (0, 0, 0, 0, 0), (1, 4, 4)])
@pytest.mark.parametrize("num_candidates", [0, 8])
def test_a_graphed_step_samples_what_an_eager_one_does(
    model: Path, num_drafts: tuple[int, ...], num_candidates: int
) -> None:
    """Catches padding that reaches a real sequence, and ragged drafts laid out at the wrong rows."""
    target = Target(lambda: make_runner(model))
    target.load()
    generator = np.random.default_rng(len(num_drafts) + num_candidates)
    batch = []
    for index, count in enumerate(num_drafts):
        sequence = prefilled(target, SAMPLING[index], 1 + 13 * index, seed=index)
        if count:
            draft = random_draft(generator, count, num_candidates)
            arrive(sequence, draft)
        batch.append(Scheduled(sequence, 1, count, True))
    eager = verify(target, batch)
    # A bucket that the batch fills, and one with room for padding.
    for max_sequences in (len(batch), 16):
        target.graphs = DecodeGraphs(target.runner, max_sequences=max_sequences, max_draft_tokens=4, num_candidates=16)
        capture(target.graphs)
        for _ in range(2):  # the second time, the inputs hold what the first one left
            assert verify(target, batch) == eager
        # A smaller batch after a larger one: what is left of it must not be seen.
        assert verify(target, batch[1:]) == eager[1:]


def test_what_the_inputs_keep_from_step_to_step_is_still_good(model: Path) -> None:
    """Catches a row that keeps the layout, the sampling or the blocks of another step, and frames taken in disorder."""
    target = Target(lambda: make_runner(model))
    target.load()
    generator = np.random.default_rng(5)
    sequences = [prefilled(target, SAMPLING[index], 10 + 3 * index, seed=index) for index in range(5)]
    frame = DraftRows(
        generator.integers(0, VOCABULARY, 20).astype(np.int32),
        np.tile(np.arange(8, dtype=np.int32), (20, 1)),
        np.full((20, 8), 1 << 13, np.uint16),
    )
    frame.token_ids %= 8  # one of its own candidates
    target.graphs = DecodeGraphs(target.runner, max_sequences=5, max_draft_tokens=4, num_candidates=16)
    capture(target.graphs)
    graphs = target.graphs
    for step in range(30):
        # The same sequences in the same order, some of them, others; as many drafts as before, or not.
        order = [0, 1, 2, 3, 4] if step < 4 else generator.permutation(5)[: 3 + step % 3].tolist()
        batch = []
        for index in order:
            sequence, count = sequences[index], 4 if step < 8 else int(generator.integers(0, 5))
            # Blocks that go back and come again are others, in other places.
            target.blocks.shrink(sequence.block_ids, sequence.length)
            sequence.speculation = Speculation(LINK)
            if count:
                drafts = DraftTokens(frame.token_ids[4 * index : 4 * index + count].tolist(), frame, 4 * index)
                arrive(sequence, drafts)
            batch.append(Scheduled(sequence, 1, count, True))
        for part in reversed(batch) if step % 2 else batch:
            assert target.blocks.grow(part.sequence.block_ids, part.sequence.length + 4)
        graphed = verify(target, batch)
        target.graphs = None
        assert verify(target, batch) == graphed
        target.graphs = graphs


def test_what_has_no_graph_runs_beside_those_that_have(model: Path) -> None:
    """Catches results handed to the wrong sequence when a step is split."""
    target = Target(lambda: make_runner(model))
    target.load()
    generator = np.random.default_rng(0)
    batch = []
    for index in range(5):
        sequence = prefilled(target, SAMPLING[index], 20 + index, seed=index)
        count = [2, 5, 0, 3, 1][index]  # five drafts are more than the graphs take
        if index == 3:
            sequence.num_logprobs = 2
        if count:
            arrive(sequence, random_draft(generator, count, 4))
        batch.append(Scheduled(sequence, 1, count, True))
    eager = verify(target, batch)
    target.graphs = DecodeGraphs(target.runner, max_sequences=8, max_draft_tokens=4, num_candidates=16)
    capture(target.graphs)
    assert verify(target, batch) == eager
    assert [bool(result.logprobs) for result in eager if result] == [False, False, False, True, False]


def draft_sequences() -> list[DraftSequence]:
    generator = np.random.default_rng(3)
    return [
        DraftSequence(
            sequence_id=index,
            token_ids=generator.integers(0, VOCABULARY, 3 + 9 * index).tolist(),
            num_prompt_tokens=1,
            sampling=sampling,
            max_draft_tokens=1 + index % 4,
            wants_candidates=not sampling.is_greedy,
        )
        for index, sampling in enumerate(SAMPLING)
    ]


def test_a_graphed_round_drafts_what_an_eager_one_does(model: Path) -> None:
    """Catches a token fed back at the wrong place, and a cache that is wrong after one or two tokens of catching up."""
    drafter = loaded_drafter(model)

    def three_rounds() -> list[tuple[list[int], list[list[int]], list[list[int]]]]:
        sequences = draft_sequences()
        found = []
        for round_number in range(3):
            for draft in sorted(drafter.draft(sequences), key=lambda draft: draft.sequence.sequence_id):
                assert isinstance(draft, Draft)
                tokens = list(draft.token_ids)
                if draft.candidate_ids is None or draft.candidate_weights is None:
                    found.append((tokens, [], []))
                else:
                    # Candidates without weight are padding, and may be any.
                    has_weight = draft.candidate_weights > 0
                    found.append(
                        (tokens, (draft.candidate_ids * has_weight).tolist(), draft.candidate_weights.tolist())
                    )
                # All accepted and a bonus token in one round, a rejection at the first token in the next.
                sequence = draft.sequence
                sequence.proposing.propose(tokens)
                verdict = [*tokens, 7] if (round_number + sequence.sequence_id) % 2 else [(tokens[0] + 1) % VOCABULARY]
                sequence.commit(verdict, sequence.length + len(verdict), 0)
        for sequence in sequences:
            drafter.release(sequence)
        return found

    eager = three_rounds()
    for max_sequences in (5, 8, 2):
        drafter._graphs = DraftGraphs(
            drafter._runner, max_sequences=max_sequences, max_draft_tokens=4, num_candidates=16
        )
        capture(drafter._graphs)
        assert three_rounds() == eager


def test_a_proposal_is_no_longer_than_graphs_make_it(model: Path) -> None:
    """Catches a request that is drafted without a graph, step by step, while everybody else waits."""
    drafter = loaded_drafter(model)

    def lengths() -> list[int]:
        sequences = draft_sequences()
        for sequence in sequences:
            sequence.max_draft_tokens = 6
        drafts = drafter.draft(sequences)
        for sequence in sequences:
            drafter.release(sequence)
        return [len(draft.token_ids) for draft in drafts if isinstance(draft, Draft)]

    assert set(lengths()) == {6}
    drafter._graphs = DraftGraphs(drafter._runner, max_sequences=8, max_draft_tokens=4, num_candidates=16)
    capture(drafter._graphs)
    assert lengths() == [4] * len(SAMPLING)


def test_a_graph_stays_within_learnt_positions(tmp_path: Path) -> None:
    """Catches a round that looks up positions which the model has not, for drafts that nobody asked for."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY, n_positions=20, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    drafter = loaded_drafter(tmp_path)

    def drafted() -> list[int]:
        sequence = DraftSequence(
            sequence_id=1,
            token_ids=list(range(18)),
            num_prompt_tokens=18,
            sampling=SAMPLING[1],
            max_draft_tokens=8,
            wants_candidates=True,
            num_computed=0,
        )
        (first,) = drafter.draft([sequence])  # the prompt is no round of a graph's
        assert isinstance(first, Draft)
        # From the last prompt token on: what a graph can do.
        sequence.num_computed = 17
        (draft,) = drafter.draft([sequence])
        assert isinstance(draft, Draft)
        drafter.release(sequence)
        return list(draft.token_ids)

    eager = drafted()
    drafter._graphs = DraftGraphs(drafter._runner, max_sequences=2, max_draft_tokens=8, num_candidates=16)
    capture(drafter._graphs)
    assert drafted() == eager
    assert len(eager) == 2


def test_a_full_cache_changes_no_draft(model: Path) -> None:
    """Catches a sequence that is evicted by one before it in the same round, and goes on as if its cache were there."""

    def drafts(num_blocks: int) -> list[tuple[int, list[int]]]:
        drafter = loaded_drafter(model, num_blocks=num_blocks)
        generator = np.random.default_rng(6)
        sequences = [
            DraftSequence(
                sequence_id=index,
                token_ids=generator.integers(0, VOCABULARY, 26 + 3 * index).tolist(),
                num_prompt_tokens=1,
                sampling=SamplingParameters(temperature=1.0, seed=index),
                max_draft_tokens=4,
                wants_candidates=True,
            )
            for index in range(6)
        ]
        found = []
        for _ in range(30):
            answers: dict[int, Draft] = {}
            while len(answers) < len(sequences):
                waiting = [sequence for sequence in sequences if sequence.sequence_id not in answers]
                for draft in drafter.draft(waiting):
                    assert isinstance(draft, Draft)
                    answers[draft.sequence.sequence_id] = draft
            for sequence in sequences:
                draft = answers[sequence.sequence_id]
                assert draft.candidate_weights is not None
                found += [(sequence.sequence_id, sorted(row)) for row in draft.candidate_weights.tolist()]
                # What the target commits does not depend on what was drafted: always something else.
                token_id = int(generator.integers(0, VOCABULARY))
                sequence.proposing.propose([token_id + 1])
                sequence.commit([token_id], sequence.length + 1, 0)
        return found

    # Behind the first draft token, later ones follow what was drawn, which may fall on either side of a rounded weight.
    enough, scarce = (drafts(num_blocks)[::4] for num_blocks in (128, 14))
    assert len(enough) == len(scarce) == 180
    for (number, weights), (other_number, other_weights) in zip(enough, scarce, strict=True):
        assert number == other_number
        assert max(abs(a - b) for a, b in zip(weights, other_weights, strict=True)) < 100
