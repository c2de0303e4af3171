"""How likely each child of an expansion is to be what the target commits, estimated from what the drafter alone knows.

Estimates decide what is worth a row and nothing else: the output is the same whatever they are.

The constants were fitted, by most likelihood, to where the target's tokens stood among the draft model's, at 5,026
positions of the bundled pair's held-out texts at temperature 1, with noise drawn eight times. A softmax of the scores,
a little steeper than they are, tells the chances of every rank to within 0.05 in each tenth of the margins: coupled,
the first child's goes from 0.33 where the second is as good to 1.00 where it is 8 behind; greedy from 0.36.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.dispatch import runs_triton
from kernels.limits import WEIGHT_TOTAL

# Where the target's token is the best of its own scores, log p + g or the logits. What is no child has as much as 0.75
# children of the last one's score have for each child that there is: 0.68, 0.77 and 0.75 of it for 2, 4 and 8.
STEEPNESS = 1.1
REST_PER_CHILD = 0.75
# Where the first child is drawn from q and tested: it is accepted as often as q is certain, 0.52 in the lowest tenth
# and 0.99 in the highest; after a rejection the scores of the others say less.
LEAST_ACCEPTANCE = 0.41
ACCEPTANCE_SLOPE = 0.52
STEEPNESS_REJECTED = 0.47
REST_PER_CHILD_REJECTED = 1.44


@dataclass(frozen=True)
class ChildEstimates:
    """How likely children are, given that all before them is what the target commits."""

    logps: torch.Tensor  # [n, F] float32, the logarithms of what sums to at most 1; -inf for no child
    units: torch.Tensor  # [n, F] int16 with the bits of a uint16, or int32: in units of 1/65,536, at most 65,535

    @classmethod
    def empty(cls, num_rows: int, num_children: int, device: torch.device) -> ChildEstimates:
        """Room for so many."""
        shape = (num_rows, num_children)
        return cls(torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int16, device=device))


def estimate_children(
    scores: torch.Tensor,  # [n, F] float32: of the first child, then falling ones of the others; -inf: no child
    largest_weights: torch.Tensor,  # [n] int16 with the bits of a uint16, or int32: of q's candidates; 0: q is certain
    is_tested: torch.Tensor,  # [n] bool: the first child was drawn from q, and is accepted with min(1, p / q)
    out: ChildEstimates,
) -> None:
    """Estimate each row's children; of rows that are not tested the weights are not looked at."""
    if runs_triton(scores):
        from kernels.child_probabilities_triton import launch_estimate_children

        launch_estimate_children(scores, largest_weights, is_tested, out)
        return
    shares = reference_child_shares(scores, largest_weights, is_tested)
    out.logps.copy_(shares.log())
    out.units.copy_((shares * WEIGHT_TOTAL).clamp(max=WEIGHT_TOTAL - 1).to(torch.int32))


def reference_child_shares(
    scores: torch.Tensor,  # [n, F] float32
    largest_weights: torch.Tensor,  # [n] int16 or int32
    is_tested: torch.Tensor,  # [n] bool
) -> torch.Tensor:  # [n, F] float32
    """The estimates of `estimate_children` in plain torch."""
    num_children = scores.shape[1]
    matched = _shares(scores, STEEPNESS, REST_PER_CHILD)
    weights = largest_weights.to(torch.int32) & (WEIGHT_TOTAL - 1)
    certainty = torch.where(weights > 0, weights.float() / WEIGHT_TOTAL, 1.0)
    accepted = (LEAST_ACCEPTANCE + ACCEPTANCE_SLOPE * certainty).unsqueeze(1)
    tested = accepted
    if num_children > 1:
        others = _shares(scores[:, 1:], STEEPNESS_REJECTED, REST_PER_CHILD_REJECTED)
        tested = torch.cat([accepted, (1 - accepted) * others], dim=1)
    return torch.where(is_tested.unsqueeze(1), tested, matched)


def _shares(
    scores: torch.Tensor,  # [n, F], falling
    steepness: float,
    rest_per_child: float,
) -> torch.Tensor:  # [n, F]
    first = scores[:, :1]
    weights = (steepness * (scores - torch.where(first > -torch.inf, first, 0.0))).exp()
    rest = rest_per_child * scores.shape[1] * weights[:, -1:]
    # Without any child that is possible, nothing is.
    return weights / (weights.sum(dim=1, keepdim=True) + rest).clamp(min=1e-30)
