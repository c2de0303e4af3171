"""Drafter and verifier have the same tree, whatever happens to them and to what travels between them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.services.tree_histories import History

NUM_HISTORIES, NUM_MOVES = 2000, 200
# A simulation in which these do not happen as often proves nothing; about a third of what there is.
AT_LEAST = {
    "accepted": 800,
    "rejected": 150,
    "tested with its q": 300,
    "outcome first_child": 190,
    "outcome other_child": 300,
    "outcome miss": 280,
    "committed before it was expanded": 280,
    "drafter walked": 700,
    "drafter missed": 400,
    "restarts": 450,
    "ring full": 900,
    "depth reached": 50,
    "ids left out": 400,
    "late": 2500,
    "for nobody": 1200,
    "signs of life": 170,
    "nothing found": 150,
    "gave up waiting": 25,
    "closed": 500,
    "lost streams": 300,
    "refused expansions": 80,
    "REFUSAL_REASON_BAD_MESSAGE": 22,
    "compared": 400,
}


@pytest.mark.slow
def test_both_sides_agree_whatever_happens() -> None:
    """Catches drafts behind another prefix, a side that walks another way, a wait without end, and what is kept.

    Random histories of passes, steps, frames that are late and verdicts that are merged, misses, restarts, rings that
    are full, sequences that are opened and closed, streams that are lost, and lies on either side.
    """
    seen: Counter[str] = Counter()
    for seed in range(NUM_HISTORIES):
        history = History(seed)
        chance = history.chance
        moves = [
            (history.draft, 0.5 * chance.random() + 0.1),
            (history.hear, chance.random() + 0.1),
            (history.arrive, chance.random() + 0.1),
            (history.send, chance.random() + 0.1),
            (history.launch, 0.3 * chance.random() + 0.02),
            (history.come_back, 0.3 * chance.random() + 0.05),
            (history.open, 0.02),
            (history.close, 0.015),
            (history.restart, chance.choice([0.0, 0.0, 0.05])),
            (history.spoil, chance.choice([0.0, 0.0, 0.05])),
            (history.disconnect, chance.choice([0.0, 0.0, 0.02])),
            (history.lose_patience, chance.choice([0.0, 0.05])),
        ]
        try:
            for move in chance.choices(*zip(*moves, strict=True), k=NUM_MOVES):
                move()
                history.check()
            history.settle()
            history.end()
        except Exception as error:
            error.add_note(f"in the history of seed {seed}")
            raise
        seen += history.seen
    too_rare = {what: seen[what] for what, number in AT_LEAST.items() if seen[what] < number}
    assert not too_rare, seen
