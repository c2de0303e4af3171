"""Penalties and logit bias as dense tables, for graphs: how many tokens a sequence has seen changes no shape.

`kernels.shape_logits` is exact in float32 and counts draft tokens; a target needs that. Here a row is changed where it
stands, in its own type, which does for a drafter: its q may be any distribution, as long as tokens are drawn from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.arguments import check_logits, check_tensor
from kernels.dispatch import runs_triton


@dataclass(frozen=True)
class PenaltyTables:
    """By place, what a sequence's logits are divided or multiplied by, and what is added then."""

    factors: torch.Tensor  # [num_places, vocab_size] float32, above 0; 1 for tokens that have not occurred
    additions: torch.Tensor  # [num_places, vocab_size] float32: bias - presence - frequency * count

    @classmethod
    def empty(cls, num_places: int, vocab_size: int, device: torch.device) -> PenaltyTables:
        """Room for so many sequences, none of them penalised."""
        shape = (num_places, vocab_size)
        return cls(torch.ones(shape, device=device), torch.zeros(shape, device=device))


def apply_penalty_tables(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, bfloat16 or float16, changed in place
    places: torch.Tensor,  # [num_rows] int32: place in the tables of each row, or -1 for a row that stays as it is
    tables: PenaltyTables,
) -> None:
    """Penalise some rows; the others cost next to nothing.

    In the order of `apply_penalties`: a positive logit is divided by its factor, any other multiplied, and the addition
    is added, all in float32. Raises ValueError when the shapes or types do not fit.
    """
    check_logits("logits", logits)
    num_rows, vocab_size = logits.shape
    check_tensor("places", places, (num_rows,), (torch.int32,), logits.device)
    for name in ("factors", "additions"):
        check_tensor(f"tables.{name}", getattr(tables, name), (None, vocab_size), (torch.float32,), logits.device)
    if runs_triton(logits):
        from kernels.penalty_tables_triton import launch_penalty_tables

        launch_penalty_tables(logits, places, tables)
        return
    rows = torch.nonzero(places >= 0).flatten()
    where = places[rows].long()
    values, factors = logits[rows].float(), tables.factors[where]
    penalized = torch.where(values > 0, values / factors, values * factors) + tables.additions[where]
    logits[rows] = penalized.to(logits.dtype)
