"""What the drafter's loop times is what it says: rounds of K tokens at the context that was asked for, and replays."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import tree_rounds
from benchmarks.drafter_loop import DrafterLoop
from benchmarks.pair import PairDirectory
from benchmarks.records import of_kind, read_records
from drafter_service.model_drafter import ModelDrafter
from drafter_service.sequence import DraftSequence
from kernels.draft_trees import MAX_DEPTH

K = 4
CONTEXT = 100
BATCH = 2


def loop_of(pair: PairDirectory, *, takes_turns: bool) -> DrafterLoop:
    return DrafterLoop(
        pair.drafter,
        torch.device("cpu"),
        num_draft_tokens=K,
        num_blocks=32,
        max_batch_size=BATCH,
        takes_turns=takes_turns,
    )


def test_rounds_follow_each_other_at_the_context_asked_for(
    pair: PairDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rounds that stand still, which would draft behind the same context again and again."""
    lengths: dict[int, list[int]] = {}
    commit = ModelDrafter.commit

    def noted(self: ModelDrafter, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        lengths.setdefault(sequence.sequence_id, []).append(sequence.length)
        commit(self, sequence, token_ids)

    monkeypatch.setattr(ModelDrafter, "commit", noted)
    loop = loop_of(pair, takes_turns=True)
    # Twice: the first time must have given everything back.
    for _ in range(2):
        lengths.clear()
        assert loop.milliseconds(BATCH, CONTEXT, num_rounds=8, num_warm_up=2) > 0
        assert len(lengths) == BATCH
        for found in lengths.values():
            # Two accepted and one in place of the third, but for the first verdict.
            assert found == [found[0], *(found[1] + 3 * number for number in range(9))]
            assert statistics.mean(found[2:]) == pytest.approx(CONTEXT, abs=4)


def test_a_round_that_drafts_too_little_is_no_measurement(pair: PairDirectory) -> None:
    loop = loop_of(pair, takes_turns=True)
    loop._num_draft_tokens = MAX_DEPTH + 2  # more than a tree is deep
    with pytest.raises(RuntimeError, match=r"expected 34 draft tokens for 2 sequences, got \[32, 32\]"):
        loop.milliseconds(BATCH, CONTEXT)


def test_replays_expand_as_much_as_a_pass_holds(pair: PairDirectory) -> None:
    """Catches replays that rest, which would time nothing."""
    loop = loop_of(pair, takes_turns=False)
    found = loop.replay(BATCH, CONTEXT, num_runs=2, num_replays=2)
    assert found.milliseconds > 0
    assert found.num_expansions == 8


def test_the_program_runs_on_a_cpu(pair: PairDirectory, tmp_path: Path) -> None:
    out = tmp_path / "rounds.jsonl"
    arguments = ["--tiny", "--pair", str(pair.path), "--out", str(out), "--device", "cpu"]
    assert tree_rounds.main([*arguments, "--batch-sizes", "1", "2"]) == 0
    assert [record["batch_size"] for record in of_kind(read_records(out), "tree_replay")] == [1, 2]
