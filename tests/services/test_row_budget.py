"""How many draft tokens a step verifies: against the best of all numbers, and what it must not depend on."""

from __future__ import annotations

import random

from engine.step_costs import StepCosts
from verifier_service.row_budget import AcceptanceRate, RowBudget

# An 8B model on an H200, ms.
MEASURED = {
    (1, 1): 4.39,
    (1, 8): 4.55,
    (8, 1): 4.6,
    (8, 6): 4.96,
    (8, 8): 5.1,
    (64, 1): 4.83,
    (64, 3): 7.2,
    (64, 4): 8.3,
    (64, 5): 9.43,
    (64, 8): 12.7,
}


def budget(costs: dict[tuple[int, int], float] = MEASURED) -> RowBudget:
    return RowBudget(StepCosts({shape: cost * 1e-3 for shape, cost in costs.items()}))


def test_few_rows_take_long_chains_and_many_take_short_ones() -> None:
    """Catches costs of another batch size, and gains that are not discounted by distance."""
    assert budget().choose([(7, 0.75)]) == 7
    assert budget().choose([(7, 0.75)] * 6) == 7
    assert budget().choose([(7, 0.75)] * 60) == 3
    assert budget().choose([(7, 0.5)] * 64) == 2
    assert budget().choose([(7, 0.2)] * 64) == 0
    assert budget().choose([(7, 0.98)] * 64) == 7


def test_a_step_is_not_made_long_for_what_is_not_there() -> None:
    """Catches a choice that counts draft tokens which nobody has."""
    assert budget().choose([(0, 0.9)] * 8) == 0
    assert budget().choose([(2, 0.9)] * 8) == 2
    # One of 64 has a long chain: all others would pay for it.
    assert budget().choose([(7, 0.9)] + [(0, 0.9)] * 63) == 0
    assert budget().choose([]) == 0


def test_the_choice_is_the_best_of_all() -> None:
    """Catches any other maximum than that of expected tokens a second, over random costs and chains."""
    rng = random.Random(1)
    for _ in range(300):
        lens = [1, *sorted(rng.sample(range(2, 10), 3))]
        costs = {(rows, lens[i]): 4 + rng.random() * i * rows / 4 for rows in (1, 4, 16) for i in range(4)}
        chains = [(rng.randint(0, 9), 0.8) for _ in range(rng.randint(1, 16))]
        rows = next(rows for rows in (1, 4, 16) if rows >= len(chains))

        def speed(number: int, chains: list[tuple[int, float]] = chains, lens: list[int] = lens) -> float:
            tokens = sum(sum(0.8**place for place in range(min(number, length) + 1)) for length, _ in chains)
            query_len = next(one for one in lens if one >= number + 1)
            return tokens / (costs[rows, query_len] + 0.3)  # noqa: B023

        longest = min(max(length for length, _ in chains), lens[-1] - 1)
        chosen = budget(costs).choose(chains)
        best = max(range(longest + 1), key=speed)
        assert speed(chosen) >= speed(best) * (1 - 1e-9), (chosen, best, chains, costs)


def test_rates_follow_the_newest_tests() -> None:
    """Catches tokens behind a rejection that count as tested, and a rate that never forgets."""
    rate = AcceptanceRate()
    assert rate.value == 0.7
    for _ in range(200):
        rate.add(4, 0)  # the first is rejected, three are not tested
    assert rate.value < 0.02
    for _ in range(100):
        rate.add(4, 4)
    assert rate.value > 0.98
    before = rate.value
    rate.add(0, 0)
    assert rate.value == before
