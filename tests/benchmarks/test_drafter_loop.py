"""What the drafter's loop times is what it says: rounds of K tokens at the context that was asked for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
import torch

from benchmarks.drafter_loop import DrafterLoop
from benchmarks.pair import PairDirectory
from drafter_service.executor import DraftExecutor
from engine.step import Drafted, DraftRow, Pass

K = 4
CONTEXT = 100
BATCH = 2


def test_rounds_follow_each_other_at_the_context_asked_for(
    pair: PairDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rounds that stand still, which would draft behind the same context again and again."""
    rounds: list[list[DraftRow]] = []
    starts: list[list[int]] = []
    submit = DraftExecutor.submit

    def noted(self: DraftExecutor, rows: Sequence[DraftRow]) -> list[Pass[Drafted]]:
        if rows[0].num_draft_tokens:
            rounds.append(list(rows))
            starts.append([row.start for row in rows])
        return submit(self, rows)

    monkeypatch.setattr(DraftExecutor, "submit", noted)
    loop = DrafterLoop(pair.drafter, torch.device("cpu"), num_draft_tokens=K, num_blocks=32, max_batch_size=BATCH)
    # Twice: the first time must have given everything back.
    for _ in range(2):
        rounds.clear()
        starts.clear()
        assert loop.milliseconds(BATCH, CONTEXT, num_rounds=8, num_warm_up=2) > 0
        assert [len(rows) for rows in rounds] == [BATCH] * 10
        assert all(row.num_draft_tokens == K for rows in rounds for row in rows)
        # Two accepted and one in place of the third.
        assert starts == [[starts[0][0] + 3 * number] * BATCH for number in range(10)]
        assert statistics.mean(starts[number][0] for number in range(2, 10)) == pytest.approx(CONTEXT, abs=3)


def test_a_round_that_drafts_too_little_is_no_measurement(pair: PairDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = DraftExecutor.submit

    def shortened(self: DraftExecutor, rows: Sequence[DraftRow]) -> list[Pass[Drafted]]:
        for row in rows:
            row.num_draft_tokens = min(row.num_draft_tokens, K - 1)
        return submit(self, rows)

    monkeypatch.setattr(DraftExecutor, "submit", shortened)
    loop = DrafterLoop(pair.drafter, torch.device("cpu"), num_draft_tokens=K, num_blocks=32, max_batch_size=BATCH)
    with pytest.raises(RuntimeError, match="expected 4 draft tokens for 2 rows"):
        loop.milliseconds(BATCH, CONTEXT)
