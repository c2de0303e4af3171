"""The target's executor: rows in graphs, chained or not, against rows that are computed one step at a time without.

Without a GPU the graphs' work runs unrecorded, which covers its layout and padding; on one (make gpu-test) it replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.block_manager import BlockManager, BlockTable
from engine.draft_tokens import NO_DRAFT_TOKENS, DraftRows, DraftTokens
from engine.model_runner import ModelRunner
from engine.slots import Slot, SlotPool
from engine.step import Pass, PassKind, Row, Sampled, Wanted
from kernels.penalties import TokenHistory
from outrider.protocol.sampling_parameters import SamplingParameters
from tests.service_device import SERVICE_DEVICE, graph_pool
from tests.tiny_models import save_tiny_llama
from verifier_service.executor import MIN_PROMPT_TOKENS_TO_RIDE, TargetExecutor

VOCABULARY = 64
SAMPLING = [
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=1.0, seed=1),
    SamplingParameters(temperature=0.8, seed=(1 << 64) - 3),
    SamplingParameters(temperature=1.2, top_k=20, seed=3),
    SamplingParameters(temperature=1.0, top_p=0.7, min_p=0.02, seed=4),
]
PENALIZED = SamplingParameters(temperature=1.0, presence_penalty=0.7, repetition_penalty=1.2, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_length=128)


@dataclass(eq=False)
class Decoding:
    """A sequence as a service would keep it."""

    sampling: SamplingParameters
    token_ids: list[int]
    slot: Slot
    num_prompt_tokens: int
    blocks: BlockTable = field(default_factory=BlockTable)
    history: TokenHistory | None = None
    num_logprobs: int | None = None
    is_coupled: bool = False

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def row(self, drafts: DraftTokens = NO_DRAFT_TOKENS) -> Row:
        return Row(
            self.slot,
            self.sampling,
            self.blocks,
            start=len(self.token_ids) - 1,
            token_ids=self.token_ids[-1:],
            drafts=drafts,
            is_coupled=self.is_coupled,
            num_logprobs=self.num_logprobs,
            history=self.history,
        )

    def chained(self) -> Row:
        return replace(self.row(), start=-1, token_ids=())


class Rig:
    """An executor with some sequences, all but the last tokens of which are computed."""

    def __init__(self, model: Path, *, has_graphs: bool, max_rows: int = 8, num_candidates: int = 16) -> None:
        runner = ModelRunner(model, device=torch.device(SERVICE_DEVICE), dtype=torch.float32, num_blocks=128)
        self.executor = TargetExecutor(runner, max_rows=max_rows, max_draft_tokens=4, num_candidates=num_candidates)
        if has_graphs:
            self.executor.use_graphs(graph_pool())
        self.pool = SlotPool(max_rows)
        self.manager = BlockManager(runner.num_blocks, runner.block_size)

    def sequence(self, sampling: SamplingParameters, length: int, seed: int, **fields: Any) -> Decoding:
        generator = np.random.default_rng(seed)
        tokens = generator.integers(0, VOCABULARY, length).tolist()
        sequence = Decoding(sampling, tokens, self.pool.take(), length, **fields)
        if sampling.has_penalties:
            sequence.history = TokenHistory(tokens, logit_bias=sampling.logit_bias)
        assert self.manager.grow(sequence.blocks, length + 40)
        if length > 1:
            row = replace(sequence.row(), start=0, token_ids=tokens[:-1], wanted=Wanted.NOTHING, num_logprobs=None)
            assert self.run([row]) == [None]
        return sequence

    def run(self, rows: Sequence[Row]) -> list[Sampled | None]:
        return collected(self.executor.submit(rows), len(rows))


def collected(passes: Sequence[Pass[Sampled]], num_rows: int) -> list[Sampled | None]:
    found: list[Sampled | None] = [None] * num_rows
    for part in passes:
        for index, sampled in zip(part.rows, part.collect(), strict=True):
            found[index] = sampled
    return found


def extend(sequences: Sequence[Decoding], found: Sequence[Sampled | None]) -> None:
    for sequence, sampled in zip(sequences, found, strict=True):
        assert sampled is not None
        sequence.token_ids += sampled.token_ids


def commit(sequence: Decoding, sampled: Sampled | None) -> None:
    assert sampled is not None
    sequence.token_ids += sampled.token_ids
    if sequence.history is not None:
        sequence.history.append(sampled.token_ids)


def random_draft(generator: np.random.Generator, num_tokens: int, num_candidates: int) -> DraftTokens:
    """Draft tokens with a uniform q over some candidates, or none at all."""
    if num_candidates == 0:
        ids = generator.integers(0, VOCABULARY, (num_tokens, 1)).astype(np.int32)
        return DraftTokens.of(ids[:, 0].tolist(), DraftRows(ids[:, 0].copy(), ids[:, :0], ids[:, :0]))
    rows = [generator.choice(VOCABULARY, num_candidates, replace=False) for _ in range(num_tokens)]
    ids = np.array(rows, np.int32).reshape(num_tokens, num_candidates)
    weights = np.full((num_tokens, num_candidates), 65536 // num_candidates, np.int32)
    return DraftTokens.of(ids[:, 0].tolist(), DraftRows(ids[:, 0].copy(), ids, weights))


def assert_same(found: Sequence[Sampled | None], expected: Sequence[Sampled | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert (one.token_ids, one.num_accepted) == (other.token_ids, other.num_accepted)
        for here, there in zip(one.logprobs, other.logprobs, strict=True):
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
            assert list(here.top_logprobs) == pytest.approx(list(there.top_logprobs), abs=1e-4)
            assert list(here.top_token_ids) == list(there.top_token_ids)


@pytest.mark.parametrize("num_drafts", [(4, 0, 2, 3, 4), (0, 0, 0, 0, 0), (1, 4, 4)])
@pytest.mark.parametrize("num_candidates", [0, 8])
@pytest.mark.parametrize("max_rows", [5, 16])  # a bucket that the batch fills, and one with room for padding
def test_a_graph_samples_what_an_eager_pass_does(
    model: Path, num_drafts: tuple[int, ...], num_candidates: int, max_rows: int
) -> None:
    """Catches padding that reaches a real sequence, and ragged drafts laid out at the wrong rows."""
    outcomes = []
    for has_graphs in (False, True):
        rig = Rig(model, has_graphs=has_graphs, max_rows=max_rows)
        generator = np.random.default_rng(len(num_drafts) + num_candidates)
        rows = [
            rig.sequence(SAMPLING[index], 1 + 13 * index, seed=index, is_coupled=(index + max_rows) % 2 > 0).row(
                random_draft(generator, count, num_candidates) if count else NO_DRAFT_TOKENS
            )
            for index, count in enumerate(num_drafts)
        ]
        kinds = [part.kind for part in rig.executor.submit(rows)]
        assert kinds == [PassKind.GRAPH if has_graphs else PassKind.EAGER]
        # Again, over inputs that hold what came before; and less of it, of which the rest must not be seen.
        outcomes.append([*rig.run(rows), *rig.run(rows), *rig.run(rows[1:])])
    assert_same(outcomes[1], outcomes[0])
    assert_same(outcomes[0][len(num_drafts) + 1 : 2 * len(num_drafts)], outcomes[0][2 * len(num_drafts) :])


def test_what_slots_keep_from_step_to_step_is_still_good(model: Path) -> None:
    """Catches a slot with another sequence's sampling or blocks, and frames whose drafts are taken in disorder."""
    rigs = [Rig(model, has_graphs=has_graphs, max_rows=5, num_candidates=16) for has_graphs in (False, True)]
    outcomes: list[list[Sampled | None]] = [[], []]
    for number, rig in enumerate(rigs):
        generator = np.random.default_rng(5)
        sequences = [
            rig.sequence(SAMPLING[index], 10 + 3 * index, seed=index, is_coupled=index < 3) for index in range(5)
        ]
        frame = DraftRows(
            generator.integers(0, 8, 20).astype(np.int32),  # each one of its own candidates
            np.tile(np.arange(8, dtype=np.int32), (20, 1)),
            np.full((20, 8), 1 << 13, np.uint16),
        )
        for step in range(30):
            # The same sequences in the same order, some of them, others; as many drafts as before, or not.
            order = [0, 1, 2, 3, 4] if step < 4 else generator.permutation(5)[: 3 + step % 3].tolist()
            rows = []
            for index in order:
                sequence, count = sequences[index], 4 if step < 8 else int(generator.integers(0, 5))
                # Blocks that go back and come again are others, in other places.
                rig.manager.shrink(sequence.blocks, len(sequence.token_ids))
                tokens = frame.token_ids[4 * index : 4 * index + count].tolist()
                rows.append(sequence.row(DraftTokens.of(tokens, frame, 4 * index) if count else NO_DRAFT_TOKENS))
            for index in reversed(order) if step % 2 else order:
                assert rig.manager.grow(sequences[index].blocks, len(sequences[index].token_ids) + 4)
            outcomes[number] += rig.run(rows)
            if step % 7 == 6:  # another sequence in the place of one that is gone
                gone = int(generator.integers(0, 5))
                rig.manager.free(sequences[gone].blocks)
                rig.pool.give_back(sequences[gone].slot)
                sequences[gone] = rig.sequence(SAMPLING[step % 5], 20 + step, seed=100 + step, is_coupled=step % 2 > 0)
    assert_same(outcomes[1], outcomes[0])


@pytest.mark.parametrize("has_graphs", [False, True])
def test_coupled_drafts_are_accepted_while_they_are_what_comes_without(model: Path, has_graphs: bool) -> None:
    """Catches a rule that does not reach the device, or reaches a neighbour; a token that depends on who was tested;
    and a prompt's own token, or a penalised one, that is drawn in another way."""
    samplings = [*SAMPLING, PENALIZED, replace(PENALIZED, logit_bias={7: 3.0}, top_k=30)]
    num_tokens, generator = 12, np.random.default_rng(1)
    rig = Rig(model, has_graphs=has_graphs)
    expected = []
    for number, sampling in enumerate(samplings):
        sequence = rig.sequence(sampling, 9 + number, seed=number)
        for _ in range(num_tokens + 5):
            commit(sequence, *rig.run([sequence.row()]))
        expected.append(sequence.token_ids[9 + number :])
    assert len(set(map(tuple, expected))) == len(samplings)
    rig = Rig(model, has_graphs=has_graphs)
    counts: Counter[int] = Counter()
    decoding = []
    for number, (sampling, tokens) in enumerate(zip(samplings, expected, strict=True)):
        sequence = rig.sequence(sampling, 9 + number, seed=number, is_coupled=True)
        prompt = replace(sequence.row(), start=0, token_ids=sequence.token_ids)
        commit(sequence, *rig.run([prompt]))
        decoding.append((sequence, tokens))
    while decoding:
        rows, rights = [], []
        for sequence, tokens in decoding:
            drafts = tokens[sequence.num_outputs :][: generator.integers(0, 5)]
            if drafts and (right := int(generator.integers(0, len(drafts) + 1))) < len(drafts):
                drafts[right] = (drafts[right] + int(generator.integers(1, VOCABULARY))) % VOCABULARY
            ids = np.array(drafts, np.int32)
            none = np.empty((len(drafts), 0), np.int32)
            draft_tokens = DraftTokens.of(drafts, DraftRows(ids, none, none)) if drafts else NO_DRAFT_TOKENS
            rows.append(sequence.row(draft_tokens))
            rights.append(right if drafts else 0)
        for (sequence, tokens), right, sampled in zip(decoding, rights, rig.run(rows), strict=True):
            assert sampled is not None
            assert (sampled.num_accepted, sampled.token_ids) == (right, tokens[sequence.num_outputs :][: right + 1])
            commit(sequence, sampled)
            counts[right] += 1
        decoding = [(sequence, tokens) for sequence, tokens in decoding if sequence.num_outputs < num_tokens]
    assert set(counts) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("has_drafts", [False, True])
def test_penalties_and_logprobs_come_from_the_graphs_pass(model: Path, has_drafts: bool) -> None:
    """Catches logits of another row, a penalty that reaches a neighbour, and a slot left at the unpenalised token."""
    outcomes = []
    for has_graphs in (False, True):
        rig = Rig(model, has_graphs=has_graphs)
        generator = np.random.default_rng(3)
        fields: list[tuple[SamplingParameters, dict[str, Any]]] = [
            (SAMPLING[1], {}),
            (PENALIZED, {}),
            (SAMPLING[0], {"num_logprobs": 3}),
            (SAMPLING[4], {"num_logprobs": 0}),
            (replace(PENALIZED, logit_bias={7: 30.0}), {"num_logprobs": 2}),
        ]
        fields += [(sampling, {**more, "is_coupled": True}) for sampling, more in fields[:2]]
        sequences = [rig.sequence(sampling, 9 + i, seed=i, **more) for i, (sampling, more) in enumerate(fields)]
        counts = [2, 4, 0, 3, 1, 2, 3] if has_drafts else [0] * 7
        rows = [
            sequence.row(random_draft(generator, count, 8) if count else NO_DRAFT_TOKENS)
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        (only,) = rig.executor.submit(rows)
        found = list(only.collect())
        # Behind a penalised row the slot is where the host thinks: a chained row goes on from there.
        following = [replace(sequence.chained(), history=None) for sequence in sequences]
        if not has_graphs:
            for sequence, sampled in zip(sequences, found, strict=True):
                assert sampled is not None
                sequence.token_ids += sampled.token_ids
            following = [replace(sequence.row(), history=None) for sequence in sequences]
        outcomes.append([*found, *rig.run(following)])
        assert [len(sampled.logprobs) > 0 for sampled in found if sampled] == [
            False,
            False,
            True,
            True,
            True,
            False,
            False,
        ]
        assert found[4] is not None
        assert found[4].token_ids[-1] == 7
    assert_same(outcomes[1], outcomes[0])


def test_steps_are_chained_whatever_came_before(model: Path) -> None:
    """Catches a chained row at the wrong position or with another's token: behind drafts, a prompt, a plain row."""
    tokens = []
    for has_graphs in (False, True):
        rig = Rig(model, has_graphs=has_graphs)
        generator = np.random.default_rng(9)
        sequences = [rig.sequence(SAMPLING[index], 12 + 5 * index, seed=index) for index in range(4)]
        new = Decoding(SAMPLING[1], list(range(9)), rig.pool.take(), 9)
        sequences.append(new)
        starts = [len(sequence.token_ids) for sequence in sequences]
        for step in range(8):
            rows = []
            for index, sequence in enumerate(sequences):
                assert rig.manager.grow(sequence.blocks, len(sequence.token_ids) + 12)
                count = 1 + int(generator.integers(0, 4))
                rows.append(sequence.row(random_draft(generator, count, 8) if (step + index) % 3 else NO_DRAFT_TOKENS))
            if step == 0:
                rows[4] = replace(rows[4], start=0, token_ids=new.token_ids, drafts=NO_DRAFT_TOKENS)
            if has_graphs:
                # Two steps on their way: the second knows of the first only what the device knows.
                assert all(rig.executor.can_overlap(sequence.chained()) for sequence in sequences)
                first = rig.executor.submit(rows)
                second = rig.executor.submit([sequence.chained() for sequence in sequences])
                assert len(first) == 1 + (step == 0)
                extend(sequences, collected(first, 5))
                extend(sequences, collected(second, 5))
            else:
                extend(sequences, rig.run(rows))
                extend(sequences, rig.run([sequence.row() for sequence in sequences]))
        tokens.append([sequence.token_ids[start:] for sequence, start in zip(sequences, starts, strict=True)])
    assert tokens[0] == tokens[1]
    assert all(len(found) >= 16 for found in tokens[0])


LONG = (MIN_PROMPT_TOKENS_TO_RIDE // 3 + 1,) * 3
SHORT = (9, 5)


def prompts_of(rig: Rig, lengths: Sequence[int]) -> list[Decoding]:
    """Sequences that have a slot and blocks, of which nothing is computed."""
    generator = np.random.default_rng(len(lengths))
    sequences = []
    for number, length in enumerate(lengths):
        tokens = generator.integers(0, VOCABULARY, length).tolist()
        sequences.append(Decoding(SAMPLING[number], tokens, rig.pool.take(), length))
        assert rig.manager.grow(sequences[-1].blocks, length + 8)
    return sequences


def whole(sequence: Decoding) -> Row:
    return replace(sequence.row(), start=0, token_ids=sequence.token_ids)


def test_what_decodes_rides_along_with_long_prompts(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a rider's logits, drafts or penalties taken from another row, and a slot that it leaves behind."""
    fields: list[tuple[SamplingParameters, dict[str, Any], int]] = [
        (SAMPLING[1], {}, 3),
        (PENALIZED, {"num_logprobs": 2}, 2),
        (SAMPLING[0], {"num_logprobs": 3}, 0),
        (SAMPLING[4], {}, 4),
    ]
    outcomes = []
    for has_graphs in (False, True):
        rig = Rig(model, has_graphs=has_graphs)
        generator = np.random.default_rng(4)
        riders = [rig.sequence(sampling, 9 + i, seed=i, **more) for i, (sampling, more, _) in enumerate(fields)]
        prompts = prompts_of(rig, LONG)
        rows = [
            rider.row(random_draft(generator, count, 8) if count else NO_DRAFT_TOKENS)
            for rider, (_, _, count) in zip(riders, fields, strict=True)
        ]
        inner = replace(whole(prompts[1]), wanted=Wanted.NOTHING, token_ids=prompts[1].token_ids[:-1])
        # In disorder: results go back to where their rows came from.
        batch = [rows[0], whole(prompts[0]), rows[1], inner, rows[2], whole(prompts[2]), rows[3]]
        passes = rig.executor.submit(batch)
        assert [one.kind for one in passes] == [PassKind.PROMPT if has_graphs else PassKind.EAGER]
        found = collected(passes, len(batch))
        assert found[3] is None
        alone = [*found[:3], *found[4:]]
        sampling = [*riders[:1], prompts[0], riders[1], riders[2], prompts[2], riders[3]]
        if not has_graphs:
            extend(sampling, alone)
            following = [replace(sequence.row(), history=None) for sequence in sampling]
        else:
            following = [replace(sequence.chained(), history=None) for sequence in sampling]
        outcomes.append([*alone, *rig.run(following)])
    assert_same(outcomes[1], outcomes[0])
    assert not [record for record in caplog.records if record.name == "verifier_service.executor"]


def test_beside_short_prompts_what_decodes_has_its_graph(model: Path) -> None:
    rig = Rig(model, has_graphs=True)
    rows = [whole(prompt) for prompt in prompts_of(rig, SHORT)]
    passes = rig.executor.submit([rows[0], rig.sequence(SAMPLING[0], 9, seed=0).row(), rows[1]])
    assert [(one.kind, list(one.rows)) for one in passes] == [(PassKind.GRAPH, [1]), (PassKind.PROMPT, [0, 2])]


@pytest.mark.parametrize("lengths", [SHORT, LONG])
def test_chained_rows_ride_along(model: Path, lengths: tuple[int, ...]) -> None:
    """Catches a rider at the wrong position, with another's token, or with keys that go to another's blocks.

    Behind drafts, of which only the device knows how many were accepted, behind a prompt and behind another ride.
    """
    tokens = []
    for has_graphs in (False, True):
        rig = Rig(model, has_graphs=has_graphs)
        generator = np.random.default_rng(6)
        riders = [rig.sequence(SAMPLING[1 + i], 12 + 7 * i, seed=i, num_logprobs=i) for i in range(3)]
        first, *others = prompts_of(rig, lengths)
        assert rig.manager.grow(riders[0].blocks, 112)  # more than it needs, and than others have
        drafts = [random_draft(generator, 3, 8), random_draft(generator, 4, 8), NO_DRAFT_TOKENS]
        steps: list[list[Row | Decoding]] = [
            [*(rider.row(draft) for rider, draft in zip(riders, drafts, strict=True)), whole(first)],
            [*riders, first, *map(whole, others)],
            [*riders, first, *others],
            [*riders, *others],
        ]
        found: list[list[Sampled | None]] = []
        if has_graphs:
            in_flight: list[tuple[Sequence[Pass[Sampled]], int]] = []
            kinds = []
            for step in steps:
                rows = [one if isinstance(one, Row) else one.chained() for one in step]
                in_flight.append((rig.executor.submit(rows), len(rows)))
                kinds.append([one.kind for one in in_flight[-1][0]])
                if len(in_flight) == rig.executor.max_in_flight:
                    found.append(collected(*in_flight.pop(0)))
            found.append(collected(*in_flight.pop()))
            assert kinds[1:] == [[PassKind.PROMPT], [PassKind.GRAPH], [PassKind.GRAPH]]
        else:
            sequences = [[*riders, first], [*riders, first, *others], [*riders, first, *others], [*riders, *others]]
            for step, concerned in zip(steps, sequences, strict=True):
                rows = [one if isinstance(one, Row) else one.row() for one in step]
                found.append(rig.run(rows))
                extend(concerned, found[-1])
        tokens.append([sampled for one in found for sampled in one])
    assert_same(tokens[1], tokens[0])


def test_nothing_follows_a_step_that_did_not_get_to_the_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a chained row at the length of the slot's last sequence, which writes to blocks that are others' now."""
    rig = Rig(model, has_graphs=True)
    new = Decoding(SAMPLING[0], list(range(9)), rig.pool.take(), 9)
    other = rig.sequence(SAMPLING[0], 5, seed=1)
    assert rig.manager.grow(new.blocks, 12)
    prompt = replace(new.row(), start=0, token_ids=new.token_ids)

    def broken(*arguments: object) -> torch.Tensor:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(rig.executor._runner, "execute", broken)
        passes = rig.executor.submit([prompt, other.row()])
    assert not rig.executor.can_overlap(new.chained())
    assert rig.executor.can_overlap(other.chained())
    in_graph, eager = passes
    assert len(in_graph.collect()) == 1
    with pytest.raises(RuntimeError, match="planted"):
        eager.collect()


def test_warming_up_leaves_nothing_behind(model: Path) -> None:
    rig = Rig(model, has_graphs=True)
    rig.executor.warm_up()
    assert rig.run([rig.sequence(SAMPLING[0], 5, seed=1).row()])[0] is not None
