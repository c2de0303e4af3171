"""What a step costs: seconds by its number of rows and the longest row's tokens, as measured when graphs were made."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping


class StepCosts:
    """Steps run in graphs of fixed shapes: one costs what the smallest shape costs that holds it."""

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """Seconds by (rows, tokens of the longest row); at least one shape, and all rows' shapes begin with 1 token."""
        self._num_rows = sorted({num_rows for num_rows, _ in seconds})
        self._costs = [
            sorted((query_len, cost) for (rows, query_len), cost in seconds.items() if rows == num_rows)
            for num_rows in self._num_rows
        ]

    def of_rows(self, num_rows: int) -> list[tuple[int, float]]:
        """(tokens of the longest row, seconds) of each shape that holds so many rows, ascending; more than the largest
        holds take as long as that."""
        return self._costs[min(bisect_left(self._num_rows, num_rows), len(self._costs) - 1)]
